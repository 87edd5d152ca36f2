"""Gives every accepted call to an engine and every engine's events to their streams. Knows no gRPC and no model code.

Threads: everything here runs on one event loop. Engines emit from their own threads; each emit is one
`call_soon_threadsafe`. Tokenizing runs on threads of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from mini_infer.engines.api import Delta, Engine, EngineState, Event, Started, StateChanged
from mini_infer.engines.errors import Draining, EngineFailed, InvalidRequest, LoadError, MiniInferError, NotFound
from mini_infer.server.call import Call
from mini_infer.server.engine_slots import EngineSlots
from mini_infer.server.model_queue import ModelQueue
from mini_infer.server.pool import EngineSnapshot, ModelSnapshot, Pool
from mini_infer.server.stream import Stream
from mini_infer.server.text_calls import ModelText, TextThread

_log = logging.getLogger(__name__)
_NUM_TOKENIZER_THREADS = 2
_WATCHES_PER_STALL = 4  # so that a stall is seen within 1.25 times its timeout


class Dispatcher:
    """All models, engines and live streams of a server. Raises `LoadError` where two share a name.

    An engine that holds streams and shows no sign of life for `stall_timeout_s` is taken out of rotation;
    one that does not close within `close_timeout_s` is left behind.
    """

    def __init__(self, pools: Sequence[Pool], *, stall_timeout_s: float = 600.0, close_timeout_s: float = 30.0) -> None:
        self._live: dict[str, tuple[ModelQueue, Stream]] = {}
        self._threads = ThreadPoolExecutor(_NUM_TOKENIZER_THREADS, thread_name_prefix="mini-infer-prepare")
        self._text_thread = TextThread()
        queues = [ModelQueue(pool, threads=self._threads, post=self._post, on_end=self._on_end) for pool in pools]
        _require_unique("model", [queue.config.model for queue in queues])
        _require_unique("engine", [slots.engine_id for queue in queues for slots in queue.slots])
        self._queues = {queue.config.model: queue for queue in queues}
        self._listeners: list[Callable[[EngineSnapshot], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stall_timeout_s = stall_timeout_s
        self._close_timeout_s = close_timeout_s
        self._watch_timer: asyncio.TimerHandle | None = None
        self._settled = asyncio.Event()  # every engine is READY or FAILED
        self._idle = asyncio.Event()  # no stream is live
        self._idle.set()
        self._draining = False
        self._closed: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts all engines and returns at once; they load on."""
        self._loop = asyncio.get_running_loop()
        for queue, slots in self._all_slots():
            slots.engine.start(partial(self._post, self._on_events, queue, slots))
        self._watch()

    async def wait_ready(self) -> None:
        """Waits until every engine is READY or FAILED. Raises `LoadError` if any failed, `Draining` after `close`."""
        await self._settled.wait()
        if self._closed is not None:
            raise _stopping()
        failures = [f"{slots.engine_id}: {slots.failure.message}" for _, slots in self._all_slots() if slots.failure]
        if failures:
            raise LoadError("; ".join(failures))

    def on_change(self, listener: Callable[[EngineSnapshot], None]) -> None:
        """Calls `listener` on the event loop after every change of an engine's state."""
        self._listeners.append(listener)

    async def drain(self, grace_s: float) -> None:
        """Takes no newcomers, waits for what is running and queued, and after `grace_s` fails the rest."""
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        self._fail_all()

    async def close(self) -> None:
        """Fails what is left and closes all engines. Idempotent."""
        if self._closed is None:
            self._closed = asyncio.create_task(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        self._draining = True
        self._settled.set()
        self._loop = asyncio.get_running_loop()
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self._fail_all()
        self._text_thread.close()
        self._threads.shutdown(wait=False)
        await asyncio.gather(*(self._close_engine(slots.engine) for _, slots in self._all_slots()))

    async def _close_engine(self, engine: Engine) -> None:
        closed = asyncio.Event()

        def close() -> None:
            try:
                engine.close()
            finally:
                self._post(closed.set)

        # A daemon, so that an engine that hangs in its driver does not keep the process.
        threading.Thread(target=close, name=f"close {engine.engine_id}", daemon=True).start()
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await closed.wait()
        except TimeoutError:
            _log.error("engine %s did not close within %g s", engine.engine_id, self._close_timeout_s)

    # --- calls ----------------------------------------------------------------------------------------------------

    def enter(self, call: Call) -> Stream:
        """Takes a place in the model's queue before anything else happens to the call.

        Raises `NotFound`, `InvalidRequest` (no model named where there are several), `Draining`, `NoReadyEngine`,
        `QueueFull`, `DeadlineExceeded`, or `QueueTimeout` for a call that must not wait and would have to.
        """
        if self._draining:
            raise _stopping()
        queue = self._queue(call.model)
        assert call.request.key not in self._live, "a stream's key is unique"
        stream = queue.enter(call)
        self._live[stream.key] = queue, stream
        self._idle.clear()
        return stream

    def cancel(self, ids: Sequence[str], caller: str) -> tuple[list[str], list[str]]:
        """Ends the caller's streams by the server's ids or by labels. Returns (ids ended, names without a match)."""
        found: dict[str, list[str]] = {}
        for queue_stream in self._live.values():
            call = queue_stream[1].call
            if call.caller == caller:
                for name in {call.request.key, call.label} - {""}:
                    found.setdefault(name, []).append(call.request.key)
        keys = list(dict.fromkeys(key for name in ids for key in found.get(name, ())))
        for key in keys:
            queue, stream = self._live[key]
            queue.cancel(stream)
        return keys, [name for name in dict.fromkeys(ids) if name not in found]

    def text_model(self, model: str) -> ModelText:
        """The model's tokenizer, for coroutines. Raises `NotFound`, `InvalidRequest` or `NoReadyEngine`."""
        return ModelText(self._queue(model).text(), self._text_thread)

    def served_name(self, model: str) -> str:
        """The model that a request means: the only one where it names none, and "" where that could be several."""
        return next(iter(self._queues)) if not model and len(self._queues) == 1 else model

    @property
    def models(self) -> list[ModelSnapshot]:
        """All models as they are now, in the order of the configuration."""
        return [queue.snapshot() for queue in self._queues.values()]

    @property
    def engines(self) -> list[EngineSnapshot]:
        """All engines as they are now, in the order of the configuration."""
        return [queue.engine_snapshot(slots) for queue, slots in self._all_slots()]

    # --- engines --------------------------------------------------------------------------------------------------

    def _post(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None, "start() comes first"
        with suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(function, *args)

    def _on_events(self, queue: ModelQueue, slots: EngineSlots, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StateChanged):
                self._change(queue, slots, event.state, event.error)
            else:
                queue.take(slots, event)
        if not all(isinstance(event, Started | Delta) for event in events):
            queue.place()

    def _change(
        self, queue: ModelQueue, slots: EngineSlots, state: EngineState, failure: MiniInferError | None
    ) -> None:
        if not queue.change(slots, state, failure):
            return
        if slots.failure is not None:
            _log.error("engine %s failed: %s", slots.engine_id, slots.failure)
        else:
            _log.info("engine %s is %s", slots.engine_id, state)
        if all(other.state in (EngineState.READY, EngineState.FAILED) for _, other in self._all_slots()):
            self._settled.set()
        for listener in self._listeners:
            asyncio.get_running_loop().call_soon(listener, queue.engine_snapshot(slots))

    def _watch(self) -> None:
        """Looks for engines that hold streams and do nothing, and for prompts stuck in tokenizing; comes back."""
        interval_s = self._stall_timeout_s / _WATCHES_PER_STALL
        self._watch_timer = asyncio.get_running_loop().call_later(interval_s, self._watch)
        now_ns = time.monotonic_ns()
        for queue, slots in self._all_slots():
            if slots.silent_s(now_ns) > self._stall_timeout_s:
                message = f"engine {slots.engine_id} made no progress for {self._stall_timeout_s:g} s"
                self._change(queue, slots, EngineState.FAILED, EngineFailed(message))
                queue.fail_running(slots, message)
        for queue in self._queues.values():
            queue.fail_stuck(now_ns - round(self._stall_timeout_s * 1e9))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _queue(self, model: str) -> ModelQueue:
        name = self.served_name(model)
        if not name:
            raise InvalidRequest("model", f"name one of {', '.join(self._queues)}")
        queue = self._queues.get(name)
        if queue is None:
            raise NotFound(f"model {model!r} is not served here; there is {', '.join(self._queues)}", "MODEL_NOT_FOUND")
        return queue

    def _all_slots(self) -> list[tuple[ModelQueue, EngineSlots]]:
        return [(queue, slots) for queue in self._queues.values() for slots in queue.slots]

    def _on_end(self, stream: Stream) -> None:
        del self._live[stream.key]
        if not self._live:
            self._idle.set()

    def _fail_all(self) -> None:
        for queue, stream in list(self._live.values()):
            queue.end(stream, stream.failed(_stopping()))


def _stopping() -> Draining:
    return Draining("the server is stopping")


def _require_unique(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise LoadError(f"two of the {what}s are called {name!r}")
