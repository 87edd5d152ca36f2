"""Whole answers to a list of prompts, without a server: an engine's events collected. Knows no model and no thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from mini_infer.engines.api import (
    Delta,
    Engine,
    EngineState,
    Event,
    Failed,
    Finished,
    PreparedRequest,
    Request,
    Sampling,
    StateChanged,
    StopConditions,
)
from mini_infer.engines.errors import MiniInferError

_numbers = count()


class Collector:
    """An `Emit` that puts the text of streams together, and wakes whoever waits for their ends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._texts: dict[str, list[str]] = {}
        self._ends: dict[str, Finished | Failed] = {}
        self._state: StateChanged | None = None

    def __call__(self, events: Sequence[Event]) -> None:
        """Takes events from any thread."""
        with self._changed:
            for event in events:
                self._take(event)
            self._changed.notify_all()

    def _take(self, event: Event) -> None:
        if isinstance(event, StateChanged):
            self._state = event
        elif isinstance(event, Delta) and event.key in self._texts:
            self._texts[event.key].append(event.text)
        elif isinstance(event, Finished | Failed) and event.key in self._texts:
            self._ends[event.key] = event

    def wait_ready(self) -> None:
        """Returns when the engine is READY. Raises the error with which it FAILED."""
        with self._changed:
            self._changed.wait_for(self._has_come_up)
            assert self._state is not None
            if self._state.error is not None:
                raise self._state.error

    def _has_come_up(self) -> bool:
        return self._state is not None and self._state.state in (
            EngineState.READY,
            EngineState.FAILED,
            EngineState.DRAINING,
        )

    def expect(self, keys: Sequence[str]) -> None:
        """Collects these streams from now on."""
        with self._changed:
            self._texts.update((key, []) for key in keys)

    def wait_text(self, key: str) -> str:
        """The whole text of a stream. Raises the error with which it failed."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._ends)
            end = self._ends[key]
        if isinstance(end, Failed):
            raise end.error
        return "".join(self._texts[key])

    def forget(self, keys: Sequence[str]) -> None:
        """Collects these streams no longer."""
        with self._changed:
            for key in keys:
                self._texts.pop(key, None)
                self._ends.pop(key, None)


def generate(
    engine: Engine,
    collector: Collector,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    stop: StopConditions = StopConditions(),
) -> list[str]:
    """The answers to ``prompts``, in their order, by an engine that emits to ``collector``. Blocking.

    All are in the engine at once. Raises the first error among them in their order; the others are then cancelled.
    """
    collector.wait_ready()
    requests = _prepare(engine, prompts, sampling, replace(stop, max_new_tokens=max_new_tokens))
    keys = [request.key for request in requests]
    collector.expect(keys)
    try:
        for request in requests:
            engine.submit(request)
        return [collector.wait_text(key) for key in keys]
    except (MiniInferError, KeyboardInterrupt):
        for key in keys:
            engine.cancel(key)
        raise
    finally:
        collector.forget(keys)


def _prepare(engine: Engine, prompts: Sequence[str], sampling: Sampling, stop: StopConditions) -> list[PreparedRequest]:
    """All prompts checked before the first one is run."""
    return [
        engine.text.prepare(Request(key=f"offline-{next(_numbers)}", prompt=prompt, sampling=sampling, stop=stop))
        for prompt in prompts
    ]
