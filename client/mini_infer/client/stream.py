"""One streamed generation: checks the order of events, repeats attempts that brought no token, adds up the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self

from grpc import aio

from mini_infer.client import convert
from mini_infer.client.calls import our_errors
from mini_infer.client.errors import ClientClosed, MiniInferError, ProtocolViolation, Truncated
from mini_infer.client.results import Delta, FirstToken, Result, Started, TokenLogprob
from mini_infer.client.retries import Retries
from mini_infer.v1 import generation_pb2 as pb

Call = aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateStreamResponse]
OpenCall = Callable[[float | None], Call]
"""Begins an attempt that may take so many seconds."""

OnRetry = Callable[[MiniInferError, float], None]
"""Is told why an attempt failed and the seconds until the next."""

_Progress = Delta | None
"""A delta, or None where the stream only came further: its header or its start arrived."""


class GenerationStream:
    """An answer while it is made: ``async for delta in stream``, once. The call begins with the loop, or with
    ``async with stream``, which returns as soon as the server has accepted the request (its header came).

    Leaving the loop or the block early ends the call, and with it the work on the server. A failure raises a
    `MiniInferError` that carries the text so far. Attempts that end before any token are repeated as `Client` says;
    then ``request_id`` and ``started`` are those of the newest one.
    """

    def __init__(self, open_call: OpenCall, new_retries: Callable[[], Retries], on_retry: OnRetry) -> None:
        self._open_call = open_call
        self._new_retries = new_retries
        self._on_retry = on_retry
        self._call: Call | None = None
        self._cancelled = asyncio.Event()
        self._progress = self._attempts()
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_tokens = 0
        self._result: Result | None = None
        self._iterated = False
        self.request_id = ""
        """The server's own id of this generation; empty until its header came."""
        self.started: Started | None = None
        """Set once the generation has left the queue."""
        self.num_attempts = 0
        """How often the server was asked so far."""
        self.retries_s = 0.0
        """From the first attempt to the newest: no part of the server's times, which are those of the newest."""
        self.first_token: FirstToken | None = None
        """Set with the first delta: where the time to the first token went."""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return self._num_tokens

    @property
    def result(self) -> Result:
        """The whole answer. Raises RuntimeError before the end, and after an end that was none of the server's."""
        if self._result is None:
            raise RuntimeError("a stream has its result only once its loop has run to the end")
        return self._result

    async def __aenter__(self) -> Self:
        if self._call is None:
            await anext(self._progress, None)  # its first step is the header or, of a server without ids, the start
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()
        with suppress(RuntimeError):  # a reader in another task is inside; it was just told to end
            await self._progress.aclose()

    async def wait_started(self) -> Started | None:
        """Waits until the generation leaves the queue; None where it was cancelled in there. Before the loop only."""
        while self.started is None:
            try:
                await anext(self._progress)
            except StopAsyncIteration:
                break
        return self.started

    async def __aiter__(self) -> AsyncIterator[Delta]:
        if self._iterated:
            raise RuntimeError("a stream can be read only once")
        self._iterated = True
        try:
            async for progress in self._progress:
                if progress is not None:
                    yield progress
        finally:
            await self._progress.aclose()

    async def cancel(self) -> None:
        """Ends the call now, from any task: its loop ends, without a result. Idempotent.

        For an end with usage and timing ask the server instead: ``client.cancel([stream.request_id])``.
        """
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def _attempts(self) -> AsyncGenerator[_Progress, None]:
        retries = self._new_retries()
        while not self._cancelled.is_set():
            self._call = self._open_call(retries.remaining_s())
            self.num_attempts = retries.num_attempts
            self.retries_s = retries.elapsed_s() if self.num_attempts > 1 else 0.0
            try:
                async with aclosing(self._events(self._call)) as events:
                    async for progress in events:
                        yield progress
                return
            except ClientClosed:
                if self._cancelled.is_set():
                    return
                raise
            except MiniInferError as error:
                self._complete(error)
                wait_s = retries.wait_s(error)
                self._on_retry(error, wait_s)
                await self._wait(wait_s)
            finally:
                self._call.cancel()  # without effect on a call that has ended; grpc.aio never cancels dropped ones

    async def _events(self, call: Call) -> AsyncGenerator[_Progress, None]:
        """One attempt, from its header to its status."""
        with our_errors(call):
            header = await call.initial_metadata()
        self.started = None
        self.request_id = str(header.get("mini-infer-request-id", ""))
        if self.request_id:
            yield None
        while (event := await self._read(call)) is not None:
            if self._result is not None:
                raise ProtocolViolation("the server sent another event after the last")
            kind = event.WhichOneof("event")
            self.request_id = event.request_id or self.request_id
            if kind == "started":
                self._start(event.started)
                yield None
            elif kind == "delta":
                yield self._add(event.delta)
            elif kind == "finished":
                self._finish(event.finished)
        if self._result is None:
            raise Truncated("the stream ended without its last event: the answer was cut off on the way")

    async def _read(self, call: Call) -> pb.GenerateStreamResponse | None:
        """The next event; None after the last."""
        with our_errors(call):
            event = await call.read()
        if isinstance(event, pb.GenerateStreamResponse):
            return event
        if event is aio.EOF:
            return None
        raise ProtocolViolation(
            "the server sent a message of another kind"
        )  # logged by grpc.aio, which hands over None

    def _start(self, message: pb.GenerationStarted) -> None:
        if self.started is not None:
            raise ProtocolViolation("the server sent `started` twice")
        self.started = convert.started(message)

    def _add(self, message: pb.GenerationDelta) -> Delta:
        if self.started is None:
            raise ProtocolViolation("the server sent `delta` before `started`")
        delta = convert.delta(message)
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._num_tokens = delta.cumulative_tokens
        self.first_token = self.first_token or delta.first_token
        return delta

    def _finish(self, message: pb.GenerationFinished) -> None:
        self._result = convert.result(self.request_id, self.text, self._token_ids, tuple(self._logprobs), message)

    def _complete(self, error: MiniInferError) -> None:
        """Adds what this side knows: trailers do not always arrive."""
        error.text = self.text
        error.request_id = error.request_id or self.request_id
        if self.started is not None:
            error.engine_id = error.engine_id or self.started.engine.engine_id
        if error.time_to_first_token_s is None and self.first_token is not None:
            error.time_to_first_token_s = self.first_token.time_to_first_token_s
        error.generated_tokens = max(error.generated_tokens or 0, self._num_tokens)

    async def _wait(self, wait_s: float) -> None:
        """Sleeps, unless cancelled."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._cancelled.wait()
