"""The engine that suits the model: `LLMEngine` where it is exact, else `GenerateEngine`. Runs nothing itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mini_infer.engines.api import (
    Emit,
    EngineKind,
    EngineState,
    EngineStats,
    Event,
    PreparedRequest,
    StateChanged,
    TextModel,
)
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.errors import NotExact
from mini_infer.engines.generate_engine import GenerateEngine
from mini_infer.engines.llm_engine import LLMEngine
from mini_infer.engines.model import LoadedModel, load_model

_log = logging.getLogger(__name__)


class AutoEngine:
    """An `api.Engine` that is an `LLMEngine` until its load says that the model would not be served exactly.

    Then it is a `GenerateEngine` of the same model, which is not loaded twice. Callers see one engine that comes up
    late; ``kind`` and ``max_running`` are final when it is READY.
    """

    def __init__(
        self, config: EngineConfig, engine_id: str, *, load: Callable[[EngineConfig], LoadedModel] = load_model
    ) -> None:
        self._config = config
        self._load_model = load
        self._loaded: LoadedModel | None = None  # between the two loads only
        self._emit: Emit = _nowhere
        self._engines: list[LLMEngine | GenerateEngine] = [LLMEngine(config, engine_id, load=self._load)]
        self._is_closed = False

    @property
    def _current(self) -> LLMEngine | GenerateEngine:
        return self._engines[-1]

    @property
    def engine_id(self) -> str:
        """Unique in the server."""
        return self._current.engine_id

    @property
    def kind(self) -> EngineKind:
        """What it is."""
        return self._current.kind

    @property
    def devices(self) -> tuple[str, ...]:
        """Its device labels, in the order of its stages."""
        return self._current.devices

    @property
    def max_running(self) -> int:
        """The most streams that it runs at once."""
        return self._current.max_running

    @property
    def state(self) -> EngineState:
        """What it is doing now."""
        return self._current.state

    @property
    def text(self) -> TextModel:
        """Its model's tokenizer and limits. Raises `NoReadyEngine` before they are loaded."""
        return self._current.text

    def start(self, emit: Emit) -> None:
        """Begins to load. Raises `RuntimeError` the second time."""
        self._emit = emit
        self._current.start(self._pass_on)

    def submit(self, request: PreparedRequest) -> None:
        """Takes a stream, or emits its `Failed`. Raises `ValueError` for a key in use."""
        self._current.submit(request)

    def cancel(self, key: str) -> None:
        """Ends a stream; a key that it does not hold is ignored."""
        self._current.cancel(key)

    def stats(self) -> EngineStats:
        """Its load now."""
        return self._current.stats()

    def close(self) -> None:
        """Fails what it still holds, frees its device and joins its threads. Idempotent."""
        self._is_closed = True
        for engine in self._engines:  # one more may join them while the first is closed
            engine.close()

    # --- on the owner thread of the engine that loads --------------------------------------------------------------

    def _load(self, config: EngineConfig) -> LoadedModel:
        self._loaded = self._load_model(config)
        return self._loaded

    def _hand_over(self, _: EngineConfig) -> LoadedModel:
        loaded, self._loaded = self._loaded, None
        assert loaded is not None, "a model was loaded before it was looked at"
        return loaded

    def _pass_on(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StateChanged) and isinstance(event.error, NotExact) and not self._is_closed:
                self._fall_back(event.error)
                return  # an engine that never came up held no stream: this was its only event
            if isinstance(event, StateChanged) and event.state not in (EngineState.LOADING, EngineState.WARMING_UP):
                self._loaded = None  # nobody will ask for it again
        self._emit(events)

    def _fall_back(self, why: NotExact) -> None:
        _log.warning("engine %s: one stream at a time, through model.generate: %s", self.engine_id, why.message)
        engine = GenerateEngine(self._config, self.engine_id, load=self._hand_over)
        self._engines.append(engine)
        engine.start(self._emit)


def _nowhere(events: Sequence[Event]) -> None:
    """Where events go before `start`: there are none."""
