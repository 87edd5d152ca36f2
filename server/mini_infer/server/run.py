"""The life of a server process: what it prints, which signals it heeds, and the code that it exits with."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mini_infer.engines.errors import LoadError
from mini_infer.server.address import CannotListen
from mini_infer.server.cli import PROGRAM

if TYPE_CHECKING:
    from mini_infer.server.app import App  # needs packages that the light installation does not have

EXIT_FAILED = 1
EXIT_AT_ONCE = 130
ONE_SIGNAL_S = 0.3
"""Signals so soon after the first are the same one: timeout(1) sends it to the process and then to its group."""

_log = logging.getLogger(__name__)


async def run(app: App) -> int:
    """Serves until SIGTERM or SIGINT, then drains; a second one ends the process on the spot. Returns an exit code."""
    stopping, armed = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stopping, armed)
    try:
        address = await app.start()
        say(f"listening on {address}")
        if await _ready_before(stopping, app):
            _tell_models(app)
            say(f"serving on {address}")
            await stopping.wait()
    except (CannotListen, LoadError) as error:
        await app.stop_at_once()
        complain(error)
        return EXIT_FAILED
    await app.stop()
    return 0


def say(line: str) -> None:
    """To stdout, for people and for programs that started this one."""
    _write(sys.stdout, line)


def complain(error: Exception | str) -> None:
    """To stderr, in one line."""
    _write(sys.stderr, f"error: {' '.join(str(error).split())}")


def open_closed_streams() -> None:
    """Gives the null device to standard streams that were closed: a socket would get their numbers, and their text."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # as long as the process


def _write(stream: TextIO, line: str) -> None:
    """A stream that is full or read by nobody any more is no reason not to serve."""
    with suppress(OSError):
        stream.write(f"{PROGRAM}: {line}\n")
        stream.flush()


async def _ready_before(stopping: asyncio.Event, app: App) -> bool:
    """Waits for the engines, but no longer than for a signal. Raises `LoadError`."""
    loading = asyncio.create_task(app.wait_ready())
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait({loading, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if not loading.done():
        loading.cancel()
        return False
    await loading
    return True


def _tell_models(app: App) -> None:
    for model in app.models:
        if model.info is not None:
            say(
                f"model {model.name}: context {model.info.context_length} tokens, dtype {model.info.dtype}, "
                f"vocabulary {model.info.vocab_size} ids, engines {', '.join(model.engine_ids)}"
            )


def _on_signal(stopping: asyncio.Event, armed: asyncio.Event) -> None:
    if armed.is_set():
        _log.warning("second signal: ended at once")
        os._exit(EXIT_AT_ONCE)  # nothing else is at once: a thread inside a model's step cannot be ended
    if not stopping.is_set():
        _log.info("signal: draining; a second one ends the process at once")
        stopping.set()
        asyncio.get_running_loop().call_later(ONE_SIGNAL_S, armed.set)
