"""The owner thread: one executor thread holds all state of one engine. Knows no model, no tokenizer and no torch.

Threading. Everything below `# on the owner thread` runs on that thread alone, and so do the subclass's methods.
Everyone else speaks to it through an inbox under one short lock: `submit` adds a stream, `cancel` marks one, `close`
ends all. The ledger `_held` names every accepted stream that has had no final event: an event leaves only for a
stream in it, and a final event takes the stream out, so no race can give a stream two ends or none.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from mini_infer.engines.api import (
    Emit,
    EngineKind,
    EngineState,
    EngineStats,
    Event,
    Failed,
    Finished,
    FinishReason,
    PreparedRequest,
    Started,
    StateChanged,
    StreamEvent,
    StreamTimes,
    TextModel,
    Usage,
)
from mini_infer.engines.errors import (
    DeadlineExceeded,
    Draining,
    EngineFailed,
    LoadError,
    MiniInferError,
    NoReadyEngine,
)

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for a step to end before it fails the streams itself and leaves the thread behind."""


class EmitFailed(Exception):
    """Events were not taken. Whoever emits cannot go on: nobody would hear of it."""


class OwnedEngine(ABC):
    """An `api.Engine` on one owner thread; subclasses say how to load, warm up and step.

    ``_load``, ``_warm_up`` and ``_step`` may raise: a `LoadError` or anything else, and the engine is FAILED.
    """

    def __init__(self, engine_id: str, kind: EngineKind, devices: tuple[str, ...], max_running: int) -> None:
        self._engine_id, self._kind, self._devices, self._max_running = engine_id, kind, devices, max_running
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=engine_id)
        self._life: Future[None] | None = None
        self._emit: Emit = _nowhere
        self._text: TextModel | None = None
        self._closing = threading.Event()
        self._inbox = threading.Condition()  # guards everything below
        self._state = EngineState.LOADING
        self._error: MiniInferError | None = None
        self._taking = False  # whether submit takes streams: from READY on, until it fails or closes
        self._woken = False
        self._waiting: deque[PreparedRequest] = deque()
        self._held: set[str] = set()
        self._running: set[str] = set()
        self._cancelled: set[str] = set()
        self._outbox: list[Event] = []  # the owner thread's alone, like the two below
        self._generated_tokens = 0
        self._last_step_ns: int | None = None

    # --- what a subclass says, all on the owner thread ------------------------------------------------------------

    @abstractmethod
    def _load(self) -> TextModel:
        """Builds the model. Raises `LoadError`."""

    @abstractmethod
    def _warm_up(self) -> None:
        """Makes one real token, to see that it works."""

    @abstractmethod
    def _step(self) -> None:
        """Admits what waits and there is room for, and makes the next token of all that run."""

    @abstractmethod
    def _abandon(self, error: MiniInferError) -> None:
        """Lets go of the running streams and posts their last events; those that it cannot give are made up for."""

    def _unload(self) -> None:  # noqa: B027  # some have nothing to free
        """Frees the device."""

    def _next_step_ns(self) -> int | None:
        """When running streams want a step: 0 is now, None is not before the inbox wakes it. Under the lock."""
        return None

    # --- from any thread ------------------------------------------------------------------------------------------

    @property
    def engine_id(self) -> str:
        """Unique in the server."""
        return self._engine_id

    @property
    def kind(self) -> EngineKind:
        """What it is."""
        return self._kind

    @property
    def devices(self) -> tuple[str, ...]:
        """Its device labels, in the order of its stages."""
        return self._devices

    @property
    def max_running(self) -> int:
        """The most streams that it runs at once."""
        return self._max_running

    @property
    def state(self) -> EngineState:
        """What it is doing now."""
        return self._state

    @property
    def text(self) -> TextModel:
        """Its model's tokenizer and limits. Raises `NoReadyEngine` before they are loaded."""
        if self._text is None:
            raise NoReadyEngine(f"engine {self._engine_id} has not loaded its model")
        return self._text

    def start(self, emit: Emit) -> None:
        """Begins to load on the owner thread. Raises `RuntimeError` the second time."""
        if self._life is not None:
            raise RuntimeError(f"engine {self._engine_id} was started before")
        self._emit = emit
        self._life = self._executor.submit(self._run)

    def submit(self, request: PreparedRequest) -> None:
        """Takes a stream, or emits its `Failed` from the caller's thread. Raises `ValueError` for a key in use."""
        with self._inbox:
            if request.key in self._held:
                raise ValueError(f"stream {request.key} is already here")
            if self._taking:
                self._held.add(request.key)
                self._waiting.append(request)
                self._wake()
                return
            refusal = self._refusal()
        self._try_emit([Failed(request.key, refusal, StreamTimes())])

    def cancel(self, key: str) -> None:
        """Ends a stream within one step; a key that it does not hold is ignored."""
        with self._inbox:
            if key in self._held:
                self._cancelled.add(key)
                self._wake()

    def stats(self) -> EngineStats:
        """Its load now."""
        return EngineStats(
            num_running=len(self._running), generated_tokens=self._generated_tokens, last_step_ns=self._last_step_ns
        )

    def close(self) -> None:
        """Fails what it still holds, frees its device and joins its thread. Idempotent.

        A step that hangs is left behind after `CLOSE_TIMEOUT_S`; its streams are failed all the same.
        """
        with self._inbox:
            self._taking = False
            self._closing.set()
            self._wake()
        try:
            if self._life is not None:
                self._life.result(CLOSE_TIMEOUT_S)
        except FutureTimeout:
            _log.error("engine %s: its step hangs; its thread is left behind", self._engine_id)
        self._executor.shutdown(wait=self._life is None or self._life.done())
        self._try_emit(self._through_ledger(self._rest(self._closed())))

    def _wake(self) -> None:
        with self._inbox:
            self._woken = True
            self._inbox.notify_all()

    def _refusal(self) -> MiniInferError:
        if self._closing.is_set():
            return self._closed()
        if self._error is not None:
            return EngineFailed(f"engine {self._engine_id} has failed: {self._error.message}")
        return NoReadyEngine(f"engine {self._engine_id} is still {self._state.value.replace('_', ' ')}")

    def _closed(self) -> Draining:
        return Draining(f"engine {self._engine_id} is closed")

    def _rest(self, error: MiniInferError) -> list[Event]:
        with self._inbox:
            return [Failed(key, error, StreamTimes()) for key in sorted(self._held)]

    def _through_ledger(self, events: Sequence[Event]) -> list[Event]:
        """Drops events of streams that have ended, and notes who runs and who ends."""
        passed: list[Event] = []
        with self._inbox:
            for event in events:
                if isinstance(event, StateChanged):
                    passed.append(event)
                elif event.key in self._held:
                    passed.append(event)
                    if isinstance(event, Started):
                        self._running.add(event.key)
                    elif isinstance(event, Finished | Failed):
                        for keys in (self._held, self._running, self._cancelled):
                            keys.discard(event.key)
        return passed

    def _try_emit(self, events: Sequence[Event]) -> None:
        try:
            if events:
                self._emit(events)
        except Exception:  # noqa: BLE001  # the edge: it is logged, and the streams get their ends
            _log.exception("engine %s: nobody took its last events", self._engine_id)

    # --- on the owner thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._come_up()
            while self._wait():
                self._sweep()
                self._step()
                self._flush()
            self._end(EngineState.DRAINING, self._closed())
        except BaseException as error:  # noqa: BLE001  # the edge: whatever it is, nobody must wait for ever
            known = isinstance(error, LoadError)  # its message says it all
            _log.error("engine %s failed: %s", self._engine_id, error, exc_info=None if known else error)
            self._end(EngineState.FAILED, self._as_failure(error))
        finally:
            try:
                self._unload()
            except Exception:  # noqa: BLE001  # the edge again
                _log.exception("engine %s: its device could not be freed", self._engine_id)

    def _come_up(self) -> None:
        self._change_state(EngineState.LOADING)
        try:
            self._text = self._load()
            self._change_state(EngineState.WARMING_UP)
            self._warm_up()
        except LoadError:
            raise
        except Exception as error:
            _log.exception("engine %s did not come up", self._engine_id)
            raise LoadError(f"engine {self._engine_id} did not come up: {first_line(error)}") from error
        with self._inbox:
            self._taking = not self._closing.is_set()
        self._change_state(EngineState.READY)

    def _change_state(self, state: EngineState) -> None:
        self._state = state
        self._post(StateChanged(self._engine_id, state))
        self._flush()

    def _wait(self) -> bool:
        """Sleeps until there is something to do. Returns False when the engine is to close."""
        with self._inbox:
            if (until_ns := self._wanted_ns()) != 0:
                timeout_s = None if until_ns is None else max(0.0, (until_ns - time.monotonic_ns()) / 1e9)
                self._inbox.wait_for(lambda: self._woken, timeout_s)
            self._woken = False
            return not self._closing.is_set()

    def _wanted_ns(self) -> int | None:
        if self._waiting and len(self._running) < self._max_running:
            return 0
        instants = [request.deadline_ns for request in self._waiting if request.deadline_ns is not None]
        if (step_ns := self._next_step_ns()) is not None:
            instants.append(step_ns)
        return min(instants, default=None)

    def _take(self) -> list[PreparedRequest]:
        """The waiting streams, oldest first, for which there are slots."""
        with self._inbox:
            num_free = self._max_running - len(self._running)
            return [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]

    def _interruption(self, request: PreparedRequest) -> FinishReason | MiniInferError | None:
        """What ends a stream from outside: CANCELLED, or the error that it fails with."""
        if request.key in self._cancelled:
            return FinishReason.CANCELLED
        if self._closing.is_set():
            return self._closed()
        if request.deadline_ns is not None and time.monotonic_ns() >= request.deadline_ns:
            return DeadlineExceeded("the deadline passed before the answer was complete")
        return None

    def _sweep(self) -> None:
        """Ends the waiting streams that were cancelled or whose deadline passed."""
        with self._inbox:
            ended = [(r, why) for r in self._waiting if (why := self._interruption(r)) is not None]
            for request, _ in ended:
                self._waiting.remove(request)
        self._post(*(unstarted_end(request, why) for request, why in ended))

    def _end_step(self, num_tokens: int) -> None:
        """Closes a step: counts it, ends waiting streams that must, and hands over what happened."""
        self._generated_tokens += num_tokens
        self._last_step_ns = time.monotonic_ns()
        self._sweep()
        self._flush()

    def _post(self, *events: Event) -> None:
        """Keeps events for the end of the step."""
        self._outbox.extend(events)

    def _flush(self) -> None:
        events, self._outbox = self._through_ledger(self._outbox), []
        if not events:
            return
        try:
            self._emit(events)
        except BaseException as error:
            with self._inbox:  # nobody heard of these ends: the streams are still owed one
                self._held.update(e.key for e in events if isinstance(e, Finished | Failed))
            raise EmitFailed(first_line(error)) from error

    def _end(self, state: EngineState, error: MiniInferError) -> None:
        """Leaves service: tells so, then fails every stream that it holds."""
        with self._inbox:
            self._taking = False
            self._state = state
            self._error = error if state is EngineState.FAILED else None
            self._waiting.clear()
        stream_error = EngineFailed(error.message) if isinstance(error, LoadError) else error
        self._post(StateChanged(self._engine_id, state, self._error))
        try:
            self._abandon(stream_error)
        except Exception:  # noqa: BLE001  # the edge: it is logged, and the streams get their ends
            _log.exception("engine %s: running streams could not be let go in order", self._engine_id)
        events, self._outbox = [*self._outbox, *self._rest(stream_error)], []
        self._try_emit(self._through_ledger(events))

    def _as_failure(self, error: BaseException) -> MiniInferError:
        if isinstance(error, LoadError | EngineFailed):
            return error
        return EngineFailed(f"engine {self._engine_id} failed: {first_line(error)}")


def unstarted_end(request: PreparedRequest, why: FinishReason | MiniInferError) -> StreamEvent:
    """The end of a stream that never held a slot."""
    if isinstance(why, MiniInferError):
        return Failed(request.key, why, StreamTimes())
    return Finished(request.key, why, Usage(len(request.prompt_ids), 0), StreamTimes(), seed=request.sampling.seed)


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _nowhere(events: Sequence[Event]) -> None:
    """Where events go before `start`: there are none."""
