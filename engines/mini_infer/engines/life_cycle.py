"""An engine from its load to its end, in tasks of one executor thread. Knows no step and nothing of a stream's answer.

`OwnedEngine` in `owner` is the other half, and says how the threads share the work.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress

from mini_infer.engines.api import Emit, EngineKind, EngineState, Event, Failed, StateChanged, StreamTimes, TextModel
from mini_infer.engines.delivery import Delivery
from mini_infer.engines.errors import Draining, EngineFailed, LoadError, MiniInferError, NoReadyEngine, one_line
from mini_infer.engines.inbox import Inbox

_log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for a step to end before it fails the streams itself and leaves the thread behind."""

CLOSE_LOADING_TIMEOUT_S = 1.0
"""How long `close` waits for a load: nobody's answer depends on it."""


class LifeCycle(ABC):
    """LOADING, WARMING_UP, READY, and then DRAINING or FAILED; whatever happens, every stream gets its end.

    ``_load`` and ``_warm_up`` may raise: a `LoadError` or anything else, and the engine is FAILED.
    """

    def __init__(self, engine_id: str, kind: EngineKind, devices: tuple[str, ...], max_running: int) -> None:
        self._engine_id, self._kind, self._devices, self._max_running = engine_id, kind, devices, max_running
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=engine_id)
        self._is_started = False
        self._finishing: Future[None] | None = None  # the last task
        self._text: TextModel | None = None
        self._closing = threading.Event()
        self._inbox = Inbox(max_running)
        self._delivery = Delivery(engine_id, self._inbox)
        self._state = EngineState.LOADING
        self._error: MiniInferError | None = None

    # --- what a subclass says, all on the owner thread ------------------------------------------------------------

    @abstractmethod
    def _load(self) -> TextModel:
        """Builds the model. Raises `LoadError`."""

    @abstractmethod
    def _warm_up(self) -> None:
        """Makes one real token, to see that it works."""

    @abstractmethod
    def _abandon(self, error: MiniInferError) -> None:
        """Ends the running streams: posts their last events, or has another thread pass them on and waits a while.

        A stream that it leaves out is failed by the caller; what another thread says of it later is dropped.
        """

    def _unload(self) -> None:  # noqa: B027  # some have nothing to free
        """Frees the device."""

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
        self._is_started = True
        self._delivery.open(emit)
        self._executor.submit(self._guard, self._come_up)

    def close(self) -> None:
        """Fails what it still holds, frees its device and joins its thread. Idempotent.

        A step that hangs is left behind after `CLOSE_TIMEOUT_S`; its streams are failed all the same. A load is left
        behind after `CLOSE_LOADING_TIMEOUT_S`: it may take minutes, and gives itself up at its end.
        """
        self._closing.set()
        self._inbox.shut()
        if self._is_started:
            with suppress(RuntimeError):  # closed before
                self._finishing = self._executor.submit(self._finish)
        is_joined = self._finishing is None or self._join(self._finishing)
        self._executor.shutdown(wait=is_joined)
        self._delivery.pass_last(self._owed_ends(self._closed()))

    def _join(self, finish: Future[None]) -> bool:
        is_loading = self._state is EngineState.LOADING
        try:
            finish.result(CLOSE_LOADING_TIMEOUT_S if is_loading else CLOSE_TIMEOUT_S)
        except FutureTimeout:
            if not is_loading:
                _log.error("engine %s: its step hangs; its thread is left behind", self._engine_id)
            return False
        return True

    def _closed(self) -> Draining:
        return Draining(f"engine {self._engine_id} is closed")

    def _owed_ends(self, error: MiniInferError) -> list[Event]:
        return [Failed(key, error, StreamTimes()) for key in self._inbox.owed()]

    # --- on the owner thread --------------------------------------------------------------------------------------

    def _guard(self, task: Callable[[], None]) -> None:
        """The edge: whatever a task raises, nobody must wait for ever."""
        try:
            task()
        except BaseException as error:  # noqa: BLE001
            known = isinstance(error, LoadError)  # its message says it all
            _log.error("engine %s failed: %s", self._engine_id, error, exc_info=None if known else error)
            self._end(EngineState.FAILED, self._as_failure(error))

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
            raise LoadError(f"engine {self._engine_id} did not come up: {one_line(error, named=True)}") from error
        self._inbox.open()
        self._change_state(EngineState.READY)

    def _change_state(self, state: EngineState) -> None:
        self._state = state
        self._delivery.post(StateChanged(self._engine_id, state))
        self._delivery.flush()

    def _finish(self) -> None:
        """The last task. An engine that has failed is there already."""
        if self._error is None:
            self._end(EngineState.DRAINING, self._closed())

    def _end(self, state: EngineState, error: MiniInferError) -> None:
        """Leaves service: reports the new state, then fails every stream that it holds."""
        self._error = error if state is EngineState.FAILED else None
        self._state = state
        self._inbox.shut()
        self._delivery.post(StateChanged(self._engine_id, state, self._error))
        self._delivery.flush_last()
        stream_error = EngineFailed(error.message) if isinstance(error, LoadError) else error
        try:
            self._abandon(stream_error)
        except Exception:  # noqa: BLE001  # the edge: it is logged, and the streams get their ends
            _log.exception("engine %s: running streams could not be let go in order", self._engine_id)
        self._delivery.post(*self._owed_ends(stream_error))
        self._delivery.flush_last()
        try:
            self._unload()
        except Exception:  # noqa: BLE001  # the edge again
            _log.exception("engine %s: its device could not be freed", self._engine_id)

    def _as_failure(self, error: BaseException) -> MiniInferError:
        if not isinstance(error, LoadError | EngineFailed):
            return EngineFailed(f"engine {self._engine_id} failed: {one_line(error, named=True)}")
        error.__cause__ = error.__context__ = None  # it is kept, and the frames that it came through hold the model
        return error.with_traceback(None)
