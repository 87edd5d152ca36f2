"""`mini-infer-server`: reads its configuration, then serves or measures. Loads torch only in between."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from mini_infer.engines.errors import LoadError
from mini_infer.server.address import CannotListen, listen_address
from mini_infer.server.bench.options import BenchOptions, read_options
from mini_infer.server.config import ServerConfig, load_config
from mini_infer.server.options import ConfigError
from mini_infer.server.run import EXIT_FAILED, complain, open_closed_streams, run, say

EXIT_USAGE = 2
_EXTRA = (
    *("accelerate", "gguf", "grpc_reflection", "huggingface_hub", "jinja2"),
    *("numpy", "safetensors", "tokenizers", "torch", "transformers"),
)
"""What the server imports beyond the client's packages, those included that come with others."""


def main() -> NoReturn:
    """Serves or measures, and exits: 0 after a drain, 2 for an invalid configuration, 1 for what does not work here."""
    open_closed_streams()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_at_once)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name need not be in its encoding
    try:
        is_bench = sys.argv[1:2] == ["bench"]
        work = _read_bench(sys.argv[2:]) if is_bench else _read_server(sys.argv[1:])
    except ConfigError as error:
        complain(error)
        sys.exit(EXIT_USAGE)
    except CannotListen as error:
        complain(error)
        sys.exit(EXIT_FAILED)
    # OpenMP's threads spin while they wait. Where anything else runs on the machine, an answer then takes several times
    # as long: 2 threads on 2 cores that were not idle made 3 tokens/s spinning and 12 asleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = work()
    except LoadError as error:
        complain(error)
        code = EXIT_FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        complain(f"the server needs more packages than the client: pip install 'mini-infer[server]' ({error})")
        code = EXIT_FAILED
    logging.shutdown()
    os._exit(code)  # a thread that still loads a model would be waited for


def _read_server(argv: Sequence[str]) -> Callable[[], int]:
    config = load_config(argv, os.environ)
    _log_to_stderr(config.log_level)
    listen_address(config.host, config.port)  # so that a taken port is reported before torch is loaded
    return lambda: asyncio.run(_serve(config))


def _read_bench(argv: Sequence[str]) -> Callable[[], int]:
    options = read_options(argv, os.environ)
    _log_to_stderr(options.log_level)
    return lambda: _measure(options)


def _end_at_once(number: int, _: object) -> NoReturn:
    """What signals do until `run` heeds them: there is nothing to drain yet.

    Without a handler, process 1 of a container gets no SIGTERM; and asyncio's own for SIGINT waits for torch's import.
    """
    os._exit(128 + number)


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if level != "debug":
        handler.addFilter(_is_no_load_error)
    logging.basicConfig(
        level=level.upper(), handlers=[handler], format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )


def _is_no_load_error(record: logging.LogRecord) -> bool:
    """Drops records about a `LoadError`, which is printed once, in one line, as the process ends."""
    values = [*(record.args if isinstance(record.args, tuple) else ()), *(record.exc_info or ())]
    return not any(isinstance(value, LoadError) for value in values)


async def _serve(config: ServerConfig) -> int:
    from mini_infer.server.build import build_app, decisions

    app = build_app(config)
    for line in decisions(config):
        say(line)
    return await run(app)


def _measure(options: BenchOptions) -> int:
    from mini_infer.server.bench.command import run_bench

    return run_bench(options)


if __name__ == "__main__":
    main()
