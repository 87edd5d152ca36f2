"""What is written where: answers and JSON to standard output, everything else to standard error.

Colours, and the spinner, only where standard error is a terminal (and NO_COLOR is not set: rich sees to that).
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mini_infer.client.results import FirstToken
from mini_infer.client.stream import GenerationStream

if TYPE_CHECKING:
    from rich.status import Status


def write(text: str) -> None:
    """A piece of an answer, at once. A terminal gets no control characters that a model may have written."""
    sys.stdout.write(_harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_json(event: object) -> None:
    """One JSON line, at once, of a mapping or a dataclass."""
    print(json.dumps(_plain(event), ensure_ascii=False, allow_nan=False), flush=True)


def say(line: str, *, dim: bool = False) -> None:
    """A line on standard error. That it cannot be written is no failure of the command."""
    if not (dim and sys.stderr.isatty()):
        with suppress(OSError):
            print(_harmless(line), file=sys.stderr, flush=True)
        return
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    console.print(_harmless(line), style="dim")


def tolerate_any_text() -> None:
    """A character that an encoding lacks is no reason to fail."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def summary(stream: GenerationStream) -> str:
    """The line after an answer. Its times are those of the last attempt, which it names where it was not the first."""
    result, timing = stream.result, stream.result.timing
    parts = [
        "" if timing.time_to_first_token_s is None else f"TTFT {milliseconds(timing.time_to_first_token_s)}",
        count_tokens(result.usage.completion_tokens),
        f"{timing.tokens_per_second:.1f} tokens/s" if timing.tokens_per_second else "",
        f"engine {result.engine.engine_id}" if result.engine.engine_id else "",
        f"finished: {result.finish_reason}",
        f"seed {result.seed}" if result.seed is not None else "",
        f"attempt {stream.num_attempts} after {stream.retries_s:.1f} s" if stream.num_attempts > 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def cancelled_summary(first_token: FirstToken | None, num_tokens: int) -> str:
    """The line after an answer that was broken off here."""
    ttft = f"TTFT {milliseconds(first_token.time_to_first_token_s)}, " if first_token is not None else ""
    return f"{ttft}{count_tokens(num_tokens)}, cancelled"


def milliseconds(seconds: float) -> str:
    """Whole milliseconds, for people."""
    return f"{seconds * 1e3:.0f} ms"


class Spinner:
    """Says what is being waited for, on a terminal only; gone once stopped or left."""

    def __init__(self) -> None:
        self._status: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def show(self, line: str) -> None:
        """Replaces what was said before."""
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.text import Text

        if self._status is None:
            self._status = Console(stderr=True).status("")
            self._status.start()
        self._status.update(Text(_harmless(line)))

    def stop(self) -> None:
        """Takes the line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def count_tokens(number: int) -> str:
    """With the noun, for people."""
    return "1 token" if number == 1 else f"{number} tokens"


def _harmless(text: str) -> str:
    """Without the characters that steer a terminal (C0 and C1 controls)."""
    return "".join(char if char in "\n\t" or not _steers(char) else "\ufffd" for char in text)


def _steers(char: str) -> bool:
    return char < " " or "\x7f" <= char <= "\x9f"


def _plain(value: Any) -> Any:
    """What JSON can hold: bytes become lists of numbers, and numbers that are none become null."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | bytes):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.isoformat() if isinstance(value, datetime) else value
