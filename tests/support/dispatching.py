"""What the dispatcher's tests share: calls, a served dispatcher that must end balanced, and an engine moved by hand."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from mini_infer.engines.api import (
    Delta,
    Emit,
    Engine,
    EngineKind,
    EngineState,
    EngineStats,
    Event,
    Failed,
    Finished,
    FinishReason,
    PreparedRequest,
    Request,
    Started,
    StateChanged,
    StreamTimes,
    Usage,
)
from mini_infer.engines.errors import EngineFailed, LoadError, MiniInferError
from mini_infer.engines.scripted_text import ScriptedText
from mini_infer.server.call import Call
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.pool import Pool, PoolConfig
from mini_infer.server.stream import Stream

_NUMBERS = itertools.count()
PATIENCE_S = 10.0
"""How long a test waits for what must come soon, on a busy machine."""


def make_call(prompt: str = "Hello", *, deadline_s: float | None = None, **fields: Any) -> Call:
    """A call with a key of its own, which arrives now."""
    now_ns = time.monotonic_ns()
    key = fields.pop("key", f"call-{next(_NUMBERS)}")
    deadline_ns = None if deadline_s is None else now_ns + round(deadline_s * 1e9)
    fields = {"caller": "ipv4:127.0.0.1", "arrival_ns": now_ns} | fields
    return Call(request=Request(key=key, prompt=prompt, deadline_ns=deadline_ns), **fields)


def make_pool(*engines: Engine, **config: Any) -> Pool:
    return Pool(
        config=PoolConfig(**{"model": "m", "policy": "least_loaded", "max_queue": 4096} | config), engines=engines
    )


@asynccontextmanager
async def serving(*pools: Pool, ready: bool = True, **settings: Any) -> AsyncIterator[Dispatcher]:
    """A started dispatcher; at the end all its counts must be 0, closed engines and all."""
    dispatcher = Dispatcher(pools, **settings)
    await dispatcher.start()
    try:
        if ready:
            await dispatcher.wait_ready()
        yield dispatcher
    finally:
        await dispatcher.close()
    await until(lambda: not any(queue._preparing for queue in dispatcher._queues.values()))  # threads end last
    assert_idle(dispatcher)


def assert_idle(dispatcher: Dispatcher) -> None:
    """Nothing is queued, runs or holds a slot."""
    assert [(engine.num_running, engine.num_waiting) for engine in dispatcher.engines] == [
        (0, 0) for _ in dispatcher.engines
    ]
    assert not dispatcher._live
    assert not any(queue._preparing for queue in dispatcher._queues.values())


async def until(holds: Any) -> None:
    """Waits for what other threads bring about and no event tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.001)


async def idle(dispatcher: Dispatcher) -> None:
    """Waits until all slots and places are free."""
    await until(lambda: all(engine.num_running == engine.num_waiting == 0 for engine in dispatcher.engines))


async def read(stream: Stream) -> list[Started | Delta | Finished]:
    """Serves a stream to its end."""
    async with asyncio.timeout(PATIENCE_S):
        async with stream:
            await stream.prepare()
            return [event async for event in stream]


async def rest(stream: Stream) -> list[Started | Delta | Finished]:
    """Serves a prepared stream to its end."""
    async with asyncio.timeout(PATIENCE_S), stream:
        return [event async for event in stream]


async def ending(stream: Stream) -> FinishReason | type[MiniInferError]:
    """How a stream ended: the reason of its one `Finished`, or the type of what it raised."""
    try:
        events = await read(stream)
    except MiniInferError as error:
        return type(error)
    finished = [event for event in events if isinstance(event, Finished)]
    assert finished == events[-1:]
    return finished[0].reason


async def placed(stream: Stream) -> None:
    """Prepares a stream and waits until it has an engine."""
    await stream.prepare()
    await until(lambda: stream.served_by is not None)


class GatedText(ScriptedText):
    """Tokenizes only while its gate is open."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.gate = threading.Event()
        self.num_prepared = 0

    def prepare(self, request: Request) -> PreparedRequest:
        assert self.gate.wait(PATIENCE_S)
        self.num_prepared += 1
        return super().prepare(request)


class ManualEngine:
    """An `api.Engine` that does nothing but what a test makes it do, and nothing by itself when told to."""

    def __init__(
        self,
        engine_id: str = "manual/0",
        *,
        max_running: int = 1,
        kind: EngineKind = EngineKind.SCRIPTED,
        text: ScriptedText | None = None,
        loads: bool = True,
        obedient: bool = True,
    ) -> None:
        self.engine_id, self.max_running, self.kind = engine_id, max_running, kind
        self.devices = ("cpu",)
        self.text = text or ScriptedText()
        self.state = EngineState.LOADING
        self.held: dict[str, PreparedRequest] = {}
        self.forgotten: list[str] = []
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.peak_running = 0
        self.last_step_ns: int | None = None
        self._loads, self._obedient = loads, obedient
        self._emit: Emit | None = None

    def start(self, emit: Emit) -> None:
        self._emit = emit
        if self._loads:
            self.become(EngineState.READY)

    def submit(self, request: PreparedRequest) -> None:
        if self.state is not EngineState.READY:
            self.emit(Failed(request.key, EngineFailed("it is dead"), StreamTimes()))
            return
        self.held[request.key] = request
        self.submitted.append(request.key)
        self.peak_running = max(self.peak_running, len(self.held))

    def cancel(self, key: str) -> None:
        self.cancelled.append(key)
        if self._obedient and key in self.held:
            self.finish(key, FinishReason.CANCELLED)

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.held), generated_tokens=0, last_step_ns=self.last_step_ns)

    def close(self) -> None:
        for key in list(self.held):
            self.fail(key, EngineFailed("it is closed"))
        self.emit(*(Failed(key, EngineFailed("it is closed"), StreamTimes()) for key in self.forgotten))

    # --- by hand ---

    def emit(self, *events: Event) -> None:
        assert self._emit is not None
        self._emit(events)

    def become(self, state: EngineState, error: MiniInferError | None = None) -> None:
        self.state = state
        self.emit(StateChanged(self.engine_id, state, error))

    def begin(self, key: str) -> None:
        self.emit(Started(key, time.monotonic_ns()))

    def token(self, key: str, text: str = "a", number: int = 1) -> None:
        now_ns = time.monotonic_ns()
        self.emit(Delta(key, text, (0,), number, now_ns, first_token_ns=now_ns if number == 1 else None))

    def finish(self, key: str, reason: FinishReason = FinishReason.EOS) -> None:
        request = self.held.pop(key)
        self.emit(Finished(key, reason, Usage(len(request.prompt_ids), 0), StreamTimes()))

    def fail(self, key: str, error: MiniInferError) -> None:
        del self.held[key]
        self.emit(Failed(key, error, StreamTimes()))

    def die(self, *, loudly: bool = True) -> None:
        """Becomes FAILED and fails what it holds, or, not loudly, forgets that until it is closed."""
        error = LoadError("no such file") if self.state is EngineState.LOADING else EngineFailed("it died")
        ends: Iterable[Event] = [Failed(key, error, StreamTimes()) for key in self.held] if loudly else []
        self.state = EngineState.FAILED
        self.forgotten += [] if loudly else self.held
        self.held.clear()
        self.emit(StateChanged(self.engine_id, EngineState.FAILED, error), *ends)


def engine_ids(streams: Sequence[Stream]) -> list[str | None]:
    """Where streams were placed."""
    return [stream.served_by.engine_id if stream.served_by else None for stream in streams]
