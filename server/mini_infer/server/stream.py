"""One accepted call, from its place in the queue to its end: what its reader sees. Decides nothing about others.

Everything here happens on the event loop. A stream has one reader and ends in exactly one final event.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from mini_infer.engines.api import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    PreparedRequest,
    Started,
    StreamEvent,
    StreamTimes,
    Usage,
)
from mini_infer.engines.errors import MiniInferError
from mini_infer.server.call import Call, ServedBy, Timing


class Host(Protocol):
    """Where a stream waits and runs."""

    def start_preparing(self, stream: Stream) -> None:
        """Tokenizes off the event loop; `Stream.mark_prepared` or a final event follows."""

    def end(self, stream: Stream, final: Finished | Failed) -> None:
        """Ends a stream from this side: its place is freed, or its engine is told to stop."""


class Stream:
    """An accepted call, as an async context manager and the async iterator of its events.

    `prepare` comes first. Iterating yields `Started`, any number of `Delta`, then `Finished`; a stream that ends
    badly raises its `MiniInferError` instead. Leaving the context cancels what has not ended.
    """

    def __init__(self, call: Call, host: Host) -> None:
        self.call = call
        self.key = call.request.key
        self.prepared: PreparedRequest | None = None
        self.served_by: ServedBy | None = None
        self.num_tokens = 0  # handed over so far
        self._host = host
        self._events: deque[StreamEvent] = deque()
        self._final: Finished | Failed | None = None
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._tokenized_ns: int | None = None
        self._times = StreamTimes()
        self._ended_ns: int | None = None

    # --- what the reader does -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the stream unless it has ended. Idempotent."""
        if not self.ended:
            self._host.end(self, self.cancelled())

    async def prepare(self) -> None:
        """Tokenizes and checks the request, off the event loop. Raises what ended the stream meanwhile.

        That is `InvalidRequest` or `StreamFailed` of the request itself, or any error of the queue. A stream that
        was cancelled meanwhile raises nothing: its `Finished` is there to be read.
        """
        self._host.start_preparing(self)
        while self.prepared is None and self._final is None:
            await self._change()
        if isinstance(self._final, Failed):
            raise _fresh(self._final.error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Started | Delta | Finished:
        while not self._events:
            if isinstance(self._final, Finished):
                raise StopAsyncIteration
            if self._final is not None:
                raise _fresh(self._final.error)
            await self._change()
        event = self._events.popleft()
        if isinstance(event, Failed):
            raise _fresh(event.error)
        return event

    @property
    def timing(self) -> Timing:
        """Where the time went so far; complete once the stream has ended."""
        return Timing(
            arrival_ns=self.call.arrival_ns,
            tokenized_ns=self._tokenized_ns,
            times=self._times,
            ended_ns=self._ended_ns,
        )

    # --- what its host does ---------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the final event has come, read or not."""
        return self._final is not None

    def mark_prepared(self, prepared: PreparedRequest, tokenized_ns: int) -> None:
        """The request is tokenized and sound."""
        self.prepared, self._tokenized_ns = prepared, tokenized_ns
        self._changed.set()

    def push(self, event: StreamEvent) -> None:
        """Hands an event to the reader; whatever comes after the final event is dropped."""
        if self.ended:
            return
        match event:
            case Started():
                self._times = replace(self._times, admitted_ns=event.at_ns)
            case Delta():
                self._note(event)
            case Finished() | Failed():
                self._finish(event)
        self._events.append(event)
        self._changed.set()

    def set_timer(self, at_ns: int | None, then: Callable[[], None]) -> None:
        """Calls `then` at an instant unless the stream ends before; replaces the timer before it. None is never."""
        self._drop_timer()
        if at_ns is not None:
            delay_s = (at_ns - time.monotonic_ns()) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay_s, then)

    def cancelled(self) -> Finished:
        """The final event of a stream that is cancelled now."""
        prompt_tokens = len(self.prepared.prompt_ids) if self.prepared else 0
        return Finished(self.key, FinishReason.CANCELLED, Usage(prompt_tokens, self.num_tokens), self._times)

    def failed(self, error: MiniInferError) -> Failed:
        """The final event of a stream that is failed now."""
        return Failed(self.key, error, self._times)

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _note(self, delta: Delta) -> None:
        self.num_tokens = delta.cumulative_tokens
        seen = self._times
        self._times = StreamTimes(
            admitted_ns=seen.admitted_ns,
            first_token_ns=_known(seen.first_token_ns, delta.first_token_ns),
            first_text_ns=_known(seen.first_text_ns, delta.at_ns if delta.text else None),
            last_token_ns=delta.at_ns,
            num_tokens=delta.cumulative_tokens,
        )

    def _finish(self, final: Finished | Failed) -> None:
        self._final = final
        self._ended_ns = time.monotonic_ns()
        if isinstance(final, Finished):
            self.num_tokens = final.usage.completion_tokens
        # An engine that dies may have lost its stamps; what the reader has been given must stay true.
        told, seen = final.times, self._times
        self._times = StreamTimes(
            admitted_ns=_known(told.admitted_ns, seen.admitted_ns),
            first_token_ns=_known(told.first_token_ns, seen.first_token_ns),
            first_text_ns=_known(told.first_text_ns, seen.first_text_ns),
            last_token_ns=_known(told.last_token_ns, seen.last_token_ns),
            max_gap_ns=told.max_gap_ns,
            num_tokens=max(told.num_tokens, seen.num_tokens),
        )
        self._drop_timer()

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _known(best_ns: int | None, else_ns: int | None) -> int | None:
    return else_ns if best_ns is None else best_ns


def _fresh(error: MiniInferError) -> MiniInferError:
    """Without the frames of earlier readers: an engine may give one error to many streams."""
    return error.with_traceback(None)
