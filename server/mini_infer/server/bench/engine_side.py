"""An engine of this process, spoken to as the dispatcher speaks to it. Knows no gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mini_infer.engines.api import (
    Delta,
    Engine,
    EngineState,
    Event,
    Failed,
    Finished,
    OutputOptions,
    PreparedRequest,
    Request,
    StateChanged,
    StopConditions,
)
from mini_infer.engines.errors import MiniInferError
from mini_infer.engines.preparation import BUILT_IN_SAMPLING
from mini_infer.server.bench.prompts import Prompt
from mini_infer.server.bench.side import LOAD_TIMEOUT_S, ROUND_TIMEOUT_S, BenchError, Run, finished_run


class EngineSide:
    """Answers with a running engine. Use `running` to get one."""

    name = "engine"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_requests = 0
        self._has_come_up = threading.Event()
        self._load_error: MiniInferError | None = None
        self._round = _Round(())

    def run(self, prompts: Sequence[Prompt], num_new_tokens: int) -> Run:
        """Submits all prompts at once and hears them to their ends."""
        requests = [self._prepare(prompt, num_new_tokens) for prompt in prompts]
        this = self._round = _Round([request.key for request in requests])
        begin_ns = time.monotonic_ns()
        for request in requests:
            self.engine.submit(request)
        if not this.is_over.wait(ROUND_TIMEOUT_S):
            raise BenchError(f"the engine took more than {ROUND_TIMEOUT_S:g} s for one round")
        if this.error is not None:
            raise this.error
        return finished_run(self.name, begin_ns, list(this.token_ns.values()), num_new_tokens)

    def come_up(self) -> None:
        """Starts the engine and waits until it is ready. Raises the error that it failed with."""
        self.engine.start(self._take)
        if not self._has_come_up.wait(LOAD_TIMEOUT_S):
            raise BenchError(f"the engine took more than {LOAD_TIMEOUT_S:g} s to come up")
        if self._load_error is not None:
            raise self._load_error

    def _prepare(self, prompt: Prompt, num_new_tokens: int) -> PreparedRequest:
        self._num_requests += 1
        return self.engine.text.prepare(
            Request(
                key=f"bench-{self._num_requests}",
                prompt_token_ids=prompt,
                sampling=BUILT_IN_SAMPLING,
                stop=StopConditions(max_new_tokens=num_new_tokens, ignore_eos=True),
                output=OutputOptions(token_ids=True),  # every token by itself, so that it can be stamped
            )
        )

    def _take(self, events: Sequence[Event]) -> None:
        """On the engine's thread."""
        at_ns = time.monotonic_ns()
        for event in events:
            if not isinstance(event, StateChanged):
                self._round.take(event, at_ns)
            elif event.state in (EngineState.READY, EngineState.FAILED):
                self._load_error = event.error
                self._has_come_up.set()


class _Round:
    """What is heard of the streams of one round."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.token_ns: dict[str, list[int]] = {key: [] for key in keys}
        self.error: MiniInferError | None = None
        self.is_over = threading.Event()
        self._num_open = len(keys)

    def take(self, event: Event, at_ns: int) -> None:
        """An event of a stream of this round; those of an earlier one are late and do not count."""
        if isinstance(event, StateChanged) or event.key not in self.token_ns:
            return
        if isinstance(event, Delta):
            self.token_ns[event.key] += [at_ns] * len(event.token_ids)
        elif isinstance(event, Finished | Failed):
            self.error = event.error if isinstance(event, Failed) else self.error
            self._num_open -= 1
            if self._num_open == 0:
                self.is_over.set()


@contextmanager
def running(engine: Engine) -> Iterator[EngineSide]:
    """An engine that is ready, closed at the end. Raises `LoadError` where it does not come up."""
    side = EngineSide(engine)
    try:
        side.come_up()
        yield side
    finally:
        engine.close()
