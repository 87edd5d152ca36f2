"""How a command ends: exit statuses, and every failure as one line on standard error."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import typer

from mini_infer.client import errors
from mini_infer.client.cli.output import count_tokens, say

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

HINTS: dict[type[errors.MiniInferError], str] = {
    errors.ServerUnreachable: "is it running? --address names another",
    errors.NoReadyEngine: "`mini-infer generate --wait SECONDS` waits for the model, `mini-infer engines` shows it",
    errors.ModelNotFound: "`mini-infer models` shows what is served",
    errors.EngineNotFound: "`mini-infer engines` shows what there is",
    errors.Overloaded: "the server is busy; try again later",
    errors.Unimplemented: "is {address} a mini-infer server of this version?",
}


class UsageError(Exception):
    """The command was called wrongly, in a way that its flags alone do not tell."""


def run(work: Callable[[], Coroutine[Any, Any, int]], address: str) -> None:
    """Runs a command's coroutine, made when its loop is, and ends the program as `leave` does."""
    leave(lambda: asyncio.run(work()), address)


def leave(work: Callable[[], int], address: str) -> None:
    """Does a command's work and raises `typer.Exit` with its exit status, whatever happens in it."""
    raise typer.Exit(_status_of(work, address))


def error_line(error: errors.MiniInferError, address: str) -> str:
    """A failure as one line: what, the reason's fixed word, a hint."""
    reason = error.reason or (error.code.name if error.code is not None else "")
    hint = next((hint for kind, hint in HINTS.items() if isinstance(error, kind)), "").format(address=address)
    return "".join(
        (
            f"error: {_what(error, address)}",
            f" [{reason}]" if reason else "",
            f" (after {count_tokens(error.generated_tokens)})" if error.generated_tokens else "",
            f" (after {error.num_attempts} attempts)" if error.num_attempts > 1 else "",
            f" - {hint}" if hint else "",
        )
    )


def _what(error: errors.MiniInferError, address: str) -> str:
    """What went wrong. Of gRPC's sentences about a connection the last part tells why there is none."""
    text = " ".join(str(error).split())
    if not isinstance(error, errors.ServerUnreachable) or error.code is None:
        return text
    if text.startswith(("failed to connect", "errors resolving")):
        return f"no server at {address} ({text.rpartition(': ')[2].rstrip(']').lower()})"
    return f"the connection to {address} broke ({text})"


def _status_of(work: Callable[[], int], address: str) -> int:
    try:
        return work()
    except UsageError as error:
        say(f"error: {error}")
        return USAGE
    except errors.MiniInferError as error:
        say(error_line(error, address))
        return FAILED
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EINVAL):  # the reader of our output has left; Windows says EINVAL
            _discard_stdout()
        else:
            say(f"error: {error}")
        return FAILED


def _discard_stdout() -> None:
    """Or else the interpreter complains at exit that it cannot write what is left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
