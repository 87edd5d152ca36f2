"""One model's bounded queue in front of its engines: who waits, who is next, what ends a wait. Knows no other model.

All of it happens on the event loop, in calls that do not await, so that every call leaves it consistent:
a live stream is either in `waiting` or assigned to one engine, and none waits that could be placed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from mini_infer.engines.api import EngineState, Failed, Finished, PreparedRequest, Request, StreamEvent, TextModel
from mini_infer.engines.errors import (
    DeadlineExceeded,
    EngineFailed,
    MiniInferError,
    NoReadyEngine,
    QueueFull,
    QueueTimeout,
    StreamFailed,
)
from mini_infer.server.call import Call
from mini_infer.server.engine_slots import EngineSlots
from mini_infer.server.pace import Pace
from mini_infer.server.placement import Placement
from mini_infer.server.pool import EngineSnapshot, ModelSnapshot, Pool
from mini_infer.server.stream import Stream

DEADLINE_GRACE_NS = 500_000_000
"""How long past its deadline a running stream is left to its engine, which knows its last times."""

_log = logging.getLogger(__name__)
_Prepared = Future[tuple[PreparedRequest, int]]


class ModelQueue:
    """The queue and the engines of one model; the `Host` of its streams.

    `threads` tokenizes, `post` calls a function on the event loop from any thread, `on_end` hears of every stream's
    end.
    """

    def __init__(
        self, pool: Pool, *, threads: Executor, post: Callable[..., None], on_end: Callable[[Stream], None]
    ) -> None:
        self.config = pool.config
        self.slots = [EngineSlots(engine, position) for position, engine in enumerate(pool.engines)]
        self.waiting: dict[str, Stream] = {}  # in order of arrival; those being tokenized too
        self._placement = Placement(pool.config, self.slots)
        self._pace = Pace()
        self._preparing: dict[str, _Prepared] = {}
        self._threads = threads
        self._post = post
        self._on_end = on_end

    # --- in -------------------------------------------------------------------------------------------------------

    def enter(self, call: Call) -> Stream:
        """Takes a place in the queue, or raises before anything has happened."""
        matching = self._placement.matching(call)
        if not any(slots.ready for slots in matching):
            raise self._no_ready_engine()
        limit_ns = _wait_limit_ns(call)
        if limit_ns is not None and limit_ns <= time.monotonic_ns():
            raise self._overdue(call)
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(
                f"{len(self.waiting)} streams wait for {self.config.model!r} already", self._retry_after_s()
            )
        if call.max_queue_ns == 0 and not any(slots.can_take for slots in matching):
            raise self._queue_timeout()
        if not self.waiting:
            self._pace.begin(time.monotonic_ns())
        stream = Stream(call, self)
        self.waiting[stream.key] = stream
        stream.set_timer(limit_ns, partial(self._expire, stream))
        return stream

    def start_preparing(self, stream: Stream) -> None:
        """Tokenizes on a thread; see `Host`."""
        if stream.ended:
            return
        assert stream.key not in self._preparing, "prepare() is called once"
        assert stream.prepared is None, "prepare() is called once"
        future = self._threads.submit(_prepare, self.text(stream.call), stream.call.request)
        self._preparing[stream.key] = future
        future.add_done_callback(partial(self._post, self._on_prepared, stream))

    def _on_prepared(self, stream: Stream, future: _Prepared) -> None:
        self._preparing.pop(stream.key, None)
        if stream.ended:
            return
        if error := future.exception():
            self.end(stream, stream.failed(_stream_error(error)))
            return
        stream.mark_prepared(*future.result())
        self.place()
        if stream.call.max_queue_ns == 0 and stream.key in self.waiting:
            self.end(stream, stream.failed(self._queue_timeout()))

    # --- on -------------------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Gives every free slot to the first stream that can have it."""
        full = set()  # pins of streams that found no room
        for stream in list(self.waiting.values()):
            pin = (stream.call.engine_id, stream.call.engine_kind)
            if stream.prepared is None or pin in full:
                continue
            if choice := self._placement.choose(stream.call):
                self._leave(stream)
                stream.set_timer(_backup_ns(stream.call), partial(self._expire, stream))
                slots, reason = choice
                slots.submit(stream, reason)
            elif pin == (None, None):
                return  # no room anywhere
            else:
                full.add(pin)

    def take(self, slots: EngineSlots, event: StreamEvent) -> None:
        """Hands an engine's event to its stream; the final one frees the slot."""
        stream = slots.assigned.get(event.key)
        if stream is None:
            return
        if isinstance(event, Finished | Failed):
            del slots.assigned[event.key]
            if not stream.ended:
                stream.push(event)
                self._on_end(stream)
        else:
            stream.push(event)

    def change(self, slots: EngineSlots, state: EngineState, failure: MiniInferError | None) -> bool:
        """Notes an engine's new state and ends the waits that it makes hopeless; False where nothing changed."""
        changed = slots.change(state, failure)
        if changed and not slots.ready:
            for stream in list(self.waiting.values()):
                if not any(other.ready for other in self._placement.matching(stream.call)):
                    self.end(stream, stream.failed(self._no_ready_engine()))
        return changed

    # --- out ------------------------------------------------------------------------------------------------------

    def end(self, stream: Stream, final: Finished | Failed) -> None:
        """Ends a stream from this side; see `Host`. A running one keeps its slot until its engine lets go."""
        if stream.ended:
            return
        if stream.key in self.waiting:
            self._leave(stream)
            if future := self._preparing.pop(stream.key, None):
                future.cancel()
        else:
            self._cancel_running(stream)
        stream.push(final)
        self._on_end(stream)

    def cancel(self, stream: Stream) -> None:
        """Ends a stream with `Finished` CANCELLED: a waiting one now, a running one as soon as its engine hears."""
        if stream.key in self.waiting:
            self.end(stream, stream.cancelled())
        else:
            self._cancel_running(stream)

    def fail_running(self, slots: EngineSlots, message: str) -> None:
        """Fails all streams of an engine that does not do it itself."""
        for stream in list(slots.assigned.values()):
            self.end(stream, stream.failed(EngineFailed(message)))

    def fail_stuck(self, before_ns: int) -> None:
        """Fails the streams that arrived before an instant and are not tokenized yet."""
        for stream in list(self.waiting.values()):
            if stream.prepared is None and stream.call.arrival_ns < before_ns:
                self.end(stream, stream.failed(StreamFailed("tokenizing the prompt made no progress")))

    def _cancel_running(self, stream: Stream) -> None:
        for slots in self.slots:
            if stream.key in slots.assigned:
                slots.engine.cancel(stream.key)

    def _leave(self, stream: Stream) -> None:
        del self.waiting[stream.key]
        self._pace.left(time.monotonic_ns())

    def _expire(self, stream: Stream) -> None:
        if stream.key in self.waiting:
            error = self._overdue(stream.call)
        else:
            error = DeadlineExceeded("the deadline passed while the answer was made")
        self.end(stream, stream.failed(error))

    # --- what it says ---------------------------------------------------------------------------------------------

    def text(self, call: Call | None = None) -> TextModel:
        """The model's tokenizer, of an engine that is ready. Raises `NoReadyEngine`."""
        for slots in self._placement.matching(call) if call else self.slots:
            if slots.ready and slots.text is not None:
                return slots.text
        raise self._no_ready_engine()

    def snapshot(self) -> ModelSnapshot:
        """The model as it is now."""
        return ModelSnapshot(
            name=self.config.model,
            info=next((slots.text.info for slots in self.slots if slots.text is not None), None),
            engine_ids=tuple(slots.engine_id for slots in self.slots),
            num_waiting=len(self.waiting),
            max_queue=self.config.max_queue,
        )

    def engine_snapshot(self, slots: EngineSlots) -> EngineSnapshot:
        """One of its engines as it is now."""
        return EngineSnapshot(
            engine_id=slots.engine_id,
            kind=slots.engine.kind,
            devices=slots.engine.devices,
            model=self.config.model,
            state=slots.state,
            failure=slots.failure.message if slots.failure else "",
            stats=slots.engine.stats(),
            num_running=len(slots.assigned),
            num_waiting=len(self.waiting),
            max_running=slots.engine.max_running,
        )

    def _retry_after_s(self) -> float:
        return self._pace.retry_after_s(time.monotonic_ns())

    def _no_ready_engine(self) -> NoReadyEngine:
        states = ", ".join(f"{slots.engine_id} is {slots.state}" for slots in self.slots)
        return NoReadyEngine(f"no engine can take this stream of {self.config.model!r}: {states}")

    def _overdue(self, call: Call) -> MiniInferError:
        if call.request.deadline_ns is not None and call.request.deadline_ns == _wait_limit_ns(call):
            return DeadlineExceeded("the deadline passed before an engine was free")
        return self._queue_timeout()

    def _queue_timeout(self) -> QueueTimeout:
        return QueueTimeout("no engine was free within max_queue_duration", self._retry_after_s())


def _prepare(text: TextModel, request: Request) -> tuple[PreparedRequest, int]:
    prepared = text.prepare(request)
    return prepared, time.monotonic_ns()


def _stream_error(error: BaseException) -> MiniInferError:
    if isinstance(error, MiniInferError):
        return error
    _log.error("tokenizing failed", exc_info=error)
    return StreamFailed("the prompt could not be tokenized")


def _wait_limit_ns(call: Call) -> int | None:
    """When a wait is over. A stream that must not wait at all is judged by the slots, not by the clock."""
    limits = [call.request.deadline_ns] if call.request.deadline_ns is not None else []
    if call.max_queue_ns:
        limits.append(call.arrival_ns + call.max_queue_ns)
    return min(limits, default=None)


def _backup_ns(call: Call) -> int | None:
    return None if call.request.deadline_ns is None else call.request.deadline_ns + DEADLINE_GRACE_NS
