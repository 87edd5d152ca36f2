"""One engine as the dispatcher sees it: its state, its slots and who holds them. Chooses nothing, queues nothing."""

from __future__ import annotations

import time

from mini_infer.engines.api import Engine, EngineState, TextModel
from mini_infer.engines.errors import EngineFailed, MiniInferError
from mini_infer.server.call import PlacementReason, ServedBy
from mini_infer.server.policy import Load
from mini_infer.server.stream import Stream


class EngineSlots:
    """An engine's slots. A slot is free again only when the engine's own final event of its stream has come."""

    def __init__(self, engine: Engine, position: int) -> None:
        self.engine = engine
        self.engine_id = engine.engine_id
        self.position = position  # in its pool's configuration
        self.state = EngineState.LOADING
        self.failure: MiniInferError | None = None
        self.text: TextModel | None = None  # kept when the engine has failed, for what is known of the model
        self.assigned: dict[str, Stream] = {}
        self._newest_submit_ns = 0

    @property
    def ready(self) -> bool:
        """Whether it may be chosen at all."""
        return self.state is EngineState.READY

    @property
    def can_take(self) -> bool:
        """Whether it may be chosen now."""
        return self.ready and len(self.assigned) < self.engine.max_running

    @property
    def load(self) -> Load:
        """What a policy looks at."""
        return Load(self.position, len(self.assigned), self.engine.max_running)

    def change(self, state: EngineState, failure: MiniInferError | None) -> bool:
        """Notes a new state; False where nothing changed. FAILED is for good."""
        if self.state in (state, EngineState.FAILED):
            return False
        if state is EngineState.FAILED:
            self.failure = failure or EngineFailed(f"engine {self.engine_id} failed and did not say why")
        self.state = state
        if state is EngineState.READY:
            self.text = self.engine.text
        return True

    def submit(self, stream: Stream, reason: PlacementReason) -> None:
        """Gives a prepared stream a slot and hands it to the engine."""
        assert stream.prepared is not None
        self.assigned[stream.key] = stream
        self._newest_submit_ns = time.monotonic_ns()
        engine = self.engine
        stream.served_by = ServedBy(engine_id=engine.engine_id, kind=engine.kind, devices=engine.devices, reason=reason)
        engine.submit(stream.prepared)

    def silent_s(self, now_ns: int) -> float:
        """Seconds since the newest sign of life that the engine owes, 0 while it holds no stream."""
        if not self.assigned:
            return 0.0
        last_step_ns = self.engine.stats().last_step_ns or 0
        return (now_ns - max(last_step_ns, self._newest_submit_ns)) / 1e9
