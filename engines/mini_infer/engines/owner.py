"""The owner thread: one executor thread holds all state of one engine. Knows no model, no tokenizer and no torch.

Threading. Everything below "on the owner thread" runs on that thread alone, and so do the subclass's methods.
Everyone else speaks to it through the inbox: `submit` adds a stream, `cancel` marks one, `close` ends all. Events are
handed over once per step, and only those that the inbox's ledger lets pass. The thread works in tasks of its
executor: one to load, one for every time that there are streams, one to close. In between it rests in the executor,
so that a process whose owner forgot `close` can exit.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

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
from mini_infer.engines.inbox import Inbox, Interruption

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for a step to end before it fails the streams itself and leaves the thread behind."""

CLOSE_LOADING_TIMEOUT_S = 1.0
"""How long `close` waits for a load: nobody's answer depends on it."""


class EmitFailed(Exception):
    """Events were not taken. Whoever emits cannot go on: nobody would hear of it."""


class OwnedEngine(ABC):
    """An `api.Engine` on one owner thread; subclasses say how to load, warm up and step.

    ``_load``, ``_warm_up`` and ``_step`` may raise: a `LoadError` or anything else, and the engine is FAILED.
    """

    def __init__(self, engine_id: str, kind: EngineKind, devices: tuple[str, ...], max_running: int) -> None:
        self._engine_id, self._kind, self._devices, self._max_running = engine_id, kind, devices, max_running
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=engine_id)
        self._is_started = False
        self._emit: Emit = _nowhere
        self._text: TextModel | None = None
        self._closing = threading.Event()
        self._inbox = Inbox(max_running)
        self._state = EngineState.LOADING
        self._error: MiniInferError | None = None
        self._outbox: list[Event] = []  # since the last hand-over
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
        """Ends the running streams and posts their last events; a stream that it leaves out is failed by the caller."""

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
        if self._is_started:
            raise RuntimeError(f"engine {self._engine_id} was started before")
        self._is_started, self._emit = True, emit
        self._executor.submit(self._guard, self._come_up)

    def submit(self, request: PreparedRequest) -> None:
        """Takes a stream, or emits its `Failed` from the caller's thread. Raises `ValueError` for a key in use."""
        if not self._inbox.put(request):
            self._try_emit([Failed(request.key, self._refusal(), StreamTimes())])
        elif self._inbox.claim():
            with suppress(RuntimeError):  # closed since: then `close` gives the stream its end
                self._executor.submit(self._guard, self._work)

    def cancel(self, key: str) -> None:
        """Ends a stream within one step; a key that it does not hold is ignored."""
        self._inbox.cancel(key)

    def stats(self) -> EngineStats:
        """Its load now."""
        return EngineStats(
            num_running=len(self._inbox.running),
            generated_tokens=self._generated_tokens,
            last_step_ns=self._last_step_ns,
        )

    def close(self) -> None:
        """Fails what it still holds, frees its device and joins its thread. Idempotent.

        A step that hangs is left behind after `CLOSE_TIMEOUT_S`; its streams are failed all the same. A load is left
        behind after `CLOSE_LOADING_TIMEOUT_S`: it may take minutes, and gives itself up at its end.
        """
        self._closing.set()
        self._inbox.shut()
        is_joined = True
        if self._is_started:
            with suppress(RuntimeError):  # closed before
                is_joined = self._join(self._executor.submit(self._finish))
        self._executor.shutdown(wait=is_joined)
        self._try_emit(self._inbox.pass_on(self._owed_ends(self._closed())))

    def _join(self, finish: Future[None]) -> bool:
        is_loading = self._state is EngineState.LOADING
        try:
            finish.result(CLOSE_LOADING_TIMEOUT_S if is_loading else CLOSE_TIMEOUT_S)
        except FutureTimeout:
            if not is_loading:
                _log.error("engine %s: its step hangs; its thread is left behind", self._engine_id)
            return False
        return True

    def _refusal(self) -> MiniInferError:
        if self._closing.is_set():
            return self._closed()
        if self._error is not None:
            return EngineFailed(f"engine {self._engine_id} has failed: {self._error.message}")
        return NoReadyEngine(f"engine {self._engine_id} is still {self._state.value.replace('_', ' ')}")

    def _closed(self) -> Draining:
        return Draining(f"engine {self._engine_id} is closed")

    def _owed_ends(self, error: MiniInferError) -> list[Event]:
        return [Failed(key, error, StreamTimes()) for key in self._inbox.owed()]

    def _try_emit(self, events: Sequence[Event]) -> None:
        try:
            if events:
                self._emit(events)
        except Exception:  # noqa: BLE001  # the edge: it is logged, and the streams get their ends
            _log.exception("engine %s: nobody took its last events", self._engine_id)

    # --- on the owner thread --------------------------------------------------------------------------------------

    def _guard(self, task: Callable[[], None]) -> None:
        """The edge: whatever a task raises, nobody must wait for ever."""
        try:
            task()
        except BaseException as error:  # noqa: BLE001
            known = isinstance(error, LoadError)  # its message says it all
            _log.error("engine %s failed: %s", self._engine_id, error, exc_info=None if known else error)
            self._end(EngineState.FAILED, self._as_failure(error))

    def _work(self) -> None:
        """Steps until no stream is left."""
        while not self._inbox.rest():
            self._inbox.wait(self._next_step_ns)
            if self._closing.is_set():
                return
            self._sweep()
            self._step()
            self._flush()

    def _finish(self) -> None:
        """The last task. An engine that has failed is there already."""
        if self._error is None:
            self._end(EngineState.DRAINING, self._closed())

    def _come_up(self) -> None:
        self._change_state(EngineState.LOADING)
        try:
            self._text = self._load()
            if self._closing.is_set():
                return
            self._change_state(EngineState.WARMING_UP)
            self._warm_up()
        except LoadError:
            raise
        except Exception as error:
            _log.exception("engine %s did not come up", self._engine_id)
            raise LoadError(f"engine {self._engine_id} did not come up: {first_line(error)}") from error
        self._inbox.open()
        self._change_state(EngineState.READY)

    def _change_state(self, state: EngineState) -> None:
        self._state = state
        self._post(StateChanged(self._engine_id, state))
        self._flush()

    def _interruption(self, request: PreparedRequest) -> Interruption | None:
        """What ends a stream from outside: CANCELLED, or the error that it fails with."""
        if request.key in self._inbox.cancelled:
            return FinishReason.CANCELLED
        if self._closing.is_set():
            return self._closed()
        if request.deadline_ns is not None and time.monotonic_ns() >= request.deadline_ns:
            return DeadlineExceeded("the deadline passed before the answer was complete")
        return None

    def _sweep(self) -> None:
        """Ends the waiting streams that were cancelled or whose deadline passed."""
        ended = self._inbox.remove_waiting(self._interruption)
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
        events, self._outbox = self._inbox.pass_on(self._outbox), []
        if not events:
            return
        try:
            self._emit(events)
        except BaseException as error:
            self._inbox.owe(events)
            raise EmitFailed(first_line(error)) from error

    def _end(self, state: EngineState, error: MiniInferError) -> None:
        """Leaves service: reports the new state, then fails every stream that it holds."""
        self._error = error if state is EngineState.FAILED else None
        self._state = state
        self._inbox.shut()
        stream_error = EngineFailed(error.message) if isinstance(error, LoadError) else error
        self._post(StateChanged(self._engine_id, state, self._error))
        try:
            self._abandon(stream_error)
        except Exception:  # noqa: BLE001  # the edge: it is logged, and the streams get their ends
            _log.exception("engine %s: running streams could not be let go in order", self._engine_id)
        events, self._outbox = [*self._outbox, *self._owed_ends(stream_error)], []
        self._try_emit(self._inbox.pass_on(events))
        try:
            self._unload()
        except Exception:  # noqa: BLE001  # the edge again
            _log.exception("engine %s: its device could not be freed", self._engine_id)

    def _as_failure(self, error: BaseException) -> MiniInferError:
        if isinstance(error, LoadError | EngineFailed):
            return error
        return EngineFailed(f"engine {self._engine_id} failed: {first_line(error)}")


def unstarted_end(request: PreparedRequest, why: Interruption) -> StreamEvent:
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
