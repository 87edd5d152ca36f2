"""What a served model is made of, and how it and its engines look from outside. Plain values; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer.engines.api import Engine, EngineKind, EngineState, EngineStats, ModelInfo
from mini_infer.engines.errors import LoadError
from mini_infer.server.policy import POLICIES, PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """How the streams of one model are queued and placed. Raises `LoadError` for an invalid value."""

    model: str  # the served name
    policy: PolicyName = "least_loaded"
    knee: int | None = None  # of "pack": streams per engine before the next engine is used
    max_queue: int = 256  # streams that hold no engine slot yet, those being tokenized included

    def __post_init__(self) -> None:
        if not self.model:
            raise LoadError("a pool needs the name of its model")
        if self.policy not in POLICIES:
            raise LoadError(f"{self.model}: policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.max_queue < 1:
            raise LoadError(f"{self.model}: max_queue must be 1 or more, not {self.max_queue}")
        if self.policy == "pack" and self.knee is None:
            raise LoadError(f"{self.model}: policy pack needs a knee, the streams per engine before the next is used")
        if self.knee is not None and (self.policy != "pack" or self.knee < 1):
            raise LoadError(f"{self.model}: knee goes with policy pack and must be 1 or more, not {self.knee}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A model and the engines that serve it, in the order of the configuration."""

    config: PoolConfig
    engines: Sequence[Engine]

    def __post_init__(self) -> None:
        if not self.engines:
            raise LoadError(f"{self.config.model}: no engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """An engine as it is at this moment."""

    engine_id: str
    kind: EngineKind
    devices: tuple[str, ...]
    model: str
    state: EngineState
    failure: str  # one line; empty unless FAILED
    stats: EngineStats
    num_running: int  # streams that hold a slot
    num_waiting: int  # streams that wait for the model, over all its engines
    max_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSnapshot:
    """A served model as it is at this moment."""

    name: str
    info: ModelInfo | None  # None until one of its engines is loaded
    engine_ids: tuple[str, ...]
    num_waiting: int
    max_queue: int
