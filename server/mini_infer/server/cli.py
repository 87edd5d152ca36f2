"""The command line of the server, made from the table of options. Applies no defaults and reads no other source."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from mini_infer.server.options import OPTIONS, ConfigError, Option
from mini_infer.server.server_info import version

PROGRAM = "mini-infer-server"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {PROGRAM} --help")


def parse(argv: Sequence[str]) -> tuple[str | None, dict[str, Any]]:
    """The configuration file and the settings that stand on the command line. Raises `ConfigError`.

    ``--help`` and ``--version`` print and raise `SystemExit`.
    """
    given = vars(_parser().parse_args(argv))
    path = given.pop("config", None)
    by_name = {option.name: option for option in OPTIONS}
    return path, {
        name: by_name[name].from_text(text, by_name[name].flag) if isinstance(text, str) else text
        for name, text in given.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Streams text of Hugging Face causal language models over gRPC.",
        epilog=f"{PROGRAM} bench measures instead of serving; see {PROGRAM} bench --help. "
        "Every option can also stand in the file, as in max_queue = 8, or in the environment, as in "
        "MINI_INFER_MAX_QUEUE=8. Flags go before the environment, the environment before the file.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {version()}")
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    for option in OPTIONS:
        _add(parser, option)
    return parser


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    text = option.help.replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction, help=text)
        return
    if option.default not in (None, ()):
        text += f" (default: {option.default})"
    metavar = "|".join(option.choices) or _METAVARS[option.kind]
    parser.add_argument(option.flag, dest=option.name, metavar=metavar, help=text)


_METAVARS = {str: "TEXT", int: "N", float: "NUMBER", tuple: "LIST"}
