"""The command line of `bench`: its own options, and the server's for the model. Loads no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mini_infer.engines.config import MAX_RUNNING
from mini_infer.server import cli
from mini_infer.server.config import ModelConfig, load_config
from mini_infer.server.options import ConfigError, Option

PROGRAM = f"{cli.PROGRAM} bench"
MEASUREMENTS = ("engine", "grpc", "prefix")
MAX_COUNT = 1_000_000
OPTIONS = (
    Option(name="streams", kind=tuple, default="1,8", help="numbers of streams at once, each measured by itself"),
    Option(name="prompt_tokens", kind=int, default="128", help="tokens of each prompt"),
    Option(name="new_tokens", kind=int, default="64", help="tokens of each answer"),
    Option(name="rounds", kind=int, default="3", help="rounds that count; one more comes before them"),
    Option(name="prefix_tokens", kind=int, default="1024", help="tokens that the prompts of prefix have in common"),
    Option(name="only", kind=tuple, default=",".join(MEASUREMENTS), help="what to measure"),
    Option(name="json", help="file to write the figures to as well"),
)
"""Defaults are text, as if they were given."""
_OF_SERVING = (
    *("served_model_name", "policy", "knee", "max_queue", "prefix_cache"),
    *("host", "port", "grace", "propagation", "stall_timeout"),
)
"""The server's options that have no say in what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What to measure, of which model, and how long."""

    streams: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    prefix_tokens: int
    only: tuple[str, ...]
    json: Path | None
    model: ModelConfig  # one model, one engine
    log_level: str
    argv: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {PROGRAM} --help")


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> BenchOptions:
    """All that a run needs to know. Raises `ConfigError`; `SystemExit` after --help."""
    parsed, others = _parser().parse_known_args(argv)
    texts = {option: getattr(parsed, option.name) for option in OPTIONS}
    given: dict[str, Any] = {
        option.name: None if text is None else option.from_text(text, option.flag) for option, text in texts.items()
    }
    model, log_level = _served(others, environ)
    return BenchOptions(
        streams=tuple(_count("--streams", text, MAX_RUNNING) for text in given["streams"]),
        prompt_tokens=_count("--prompt-tokens", given["prompt_tokens"]),
        new_tokens=_count("--new-tokens", given["new_tokens"]),
        rounds=_count("--rounds", given["rounds"]),
        prefix_tokens=_count("--prefix-tokens", given["prefix_tokens"]),
        only=_chosen(given["only"]),
        json=_writable(given["json"]),
        model=model,
        log_level=log_level,
        argv=tuple(argv),
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Measures the engine against plain model.generate, the server against its engine, and prompts "
        "with a known beginning against new ones: both sides in one run, in turns, as ratios.",
        epilog=f"The model and how it runs are the options of {cli.PROGRAM}: --model, --load-format, --devices (one), "
        f"--dtype, --threads and so on; see {cli.PROGRAM} --help.",
        allow_abbrev=False,
    )
    for option in OPTIONS:
        default = "" if option.default is None else f" (default: {option.default})"
        parser.add_argument(
            option.flag, default=option.default, metavar=_METAVARS[option.kind], help=option.help + default
        )
    return parser


_METAVARS = {str: "FILE", int: "N", tuple: "LIST"}


def _served(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[ModelConfig, str]:
    for name in cli.parse(argv)[1]:
        if name in _OF_SERVING:
            raise ConfigError(f"--{name.replace('_', '-')} has no say in what bench measures; leave it out")
    config = load_config(argv, environ)
    if len(config.models) > 1:
        raise ConfigError(f"bench measures one model, and the configuration names {len(config.models)}")
    (model,) = config.models
    if len(model.groups) > 1 or len(model.groups[0].devices) > 1:
        raise ConfigError("bench measures one engine on one device, and the configuration names several")
    return model, config.log_level


def _count(flag: str, value: str | int, most: int = MAX_COUNT) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise ConfigError(f"{flag} must be from 1 to {most}, not {value}")
    return number


def _chosen(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in MEASUREMENTS:
            raise ConfigError(f"--only must name some of {', '.join(MEASUREMENTS)}, not {name!r}")
    return tuple(dict.fromkeys(names))


def _writable(name: str | None) -> Path | None:
    """Found out before the measuring, which takes its time."""
    if name is None:
        return None
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--json {name}: no file can be written there")
    return path
