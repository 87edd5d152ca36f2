"""The real server as a process of its own on a free loopback port, with an engine like the one beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from threading import Timer
from typing import IO, Any

from mini_infer.engines.config import EngineConfig
from mini_infer.server.bench.side import LOAD_TIMEOUT_S, BenchError
from mini_infer.server.options import ENV_PREFIX, OPTIONS

STOP_TIMEOUT_S = 30.0
_SERVING = " serving on "


@contextmanager
def running_server(config: EngineConfig, kind: str, max_queue: int) -> Iterator[str]:
    """The address of a server that serves, ended with the context. Raises `BenchError` where it does not come up."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    command = [sys.executable, "-m", "mini_infer.server", *words(settings(config, kind, max_queue))]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)  # noqa: S603
        try:
            yield _address(process, log)
        finally:
            _stop(process)


def settings(config: EngineConfig, kind: str, max_queue: int) -> dict[str, Any]:
    """The server's settings for one engine like this, by the names of its options."""
    return {field.name: getattr(config, field.name) for field in fields(config)} | {
        "engine": kind,
        "devices": (config.device,),
        "threads": config.num_threads,
        "max_queue": max_queue,
        "host": "127.0.0.1",
        "port": 0,
        "grace": 0.0,
        "propagation": 0.0,
    }


def words(values: Mapping[str, Any]) -> list[str]:
    """Settings as flags; what is no option of the server, or None, is left out."""
    return [_word(option.flag, value) for option in OPTIONS if (value := values.get(option.name)) is not None]


def _word(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag}={','.join(value) if isinstance(value, tuple) else value}"


def _address(process: subprocess.Popen[str], log: IO[str]) -> str:
    """What follows the words of a server that is ready."""
    assert process.stdout is not None
    limit = Timer(LOAD_TIMEOUT_S, process.kill)
    limit.start()
    try:
        for line in process.stdout:
            if _SERVING in line:
                return line.split()[-1]
    finally:
        limit.cancel()
    log.seek(0)
    last = (log.read().splitlines() or [f"nothing for {LOAD_TIMEOUT_S:g} s"])[-1]
    raise BenchError(f"the server did not come up; its last words: {last}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
