"""Which engine of a pool serves a call: pins, sessions, then the policy. Remembers choices; holds no stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mini_infer.engines.errors import NotFound
from mini_infer.server import policy
from mini_infer.server.call import Call, PlacementReason
from mini_infer.server.engine_slots import EngineSlots
from mini_infer.server.pool import PoolConfig

MAX_SESSIONS = 10_000
"""Sessions remembered per model; the one unused for longest is forgotten first."""


class Placement:
    """Chooses among the engines of one pool."""

    def __init__(self, config: PoolConfig, slots: Sequence[EngineSlots]) -> None:
        self._config = config
        self._slots = slots
        self._sessions: OrderedDict[str, EngineSlots] = OrderedDict()
        self._last_position = -1  # of round robin

    def matching(self, call: Call) -> list[EngineSlots]:
        """The engines that a call allows, in any state. Raises `NotFound` where there is none."""
        matching = [
            slots
            for slots in self._slots
            if call.engine_id in (None, slots.engine_id) and call.engine_kind in (None, slots.engine.kind)
        ]
        if not matching:
            pin = f"engine {call.engine_id!r}" if call.engine_id is not None else f"engine of kind {call.engine_kind}"
            raise NotFound(f"model {self._config.model!r} has no {pin}", "ENGINE_NOT_FOUND")
        return matching

    def choose(self, call: Call) -> tuple[EngineSlots, PlacementReason] | None:
        """The engine that takes a call now, and why; None where no engine that it allows has room."""
        open_slots = [slots for slots in self.matching(call) if slots.can_take]
        if not open_slots:
            return None
        usual = self._sessions.get(call.session_id)
        if usual in open_slots:
            chosen, reason = usual, PlacementReason.SESSION
        else:
            chosen, reason = self._by_policy(open_slots)
        if call.session_id:
            self._remember(call.session_id, chosen)
        if call.engine_id is not None or call.engine_kind is not None:
            reason = PlacementReason.PINNED
        elif len(self._slots) == 1:
            reason = PlacementReason.ONLY_ENGINE
        return chosen, reason

    def _by_policy(self, open_slots: Sequence[EngineSlots]) -> tuple[EngineSlots, PlacementReason]:
        loads = [slots.load for slots in open_slots]
        match self._config.policy:
            case "least_loaded":
                load = policy.least_loaded(loads)
            case "round_robin":
                load = policy.round_robin(loads, self._last_position)
                self._last_position = load.position
            case "pack":
                assert self._config.knee is not None
                load = policy.pack(loads, self._config.knee)
        return self._slots[load.position], PlacementReason(self._config.policy)

    def _remember(self, session_id: str, slots: EngineSlots) -> None:
        self._sessions[session_id] = slots
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
