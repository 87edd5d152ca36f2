"""Which engine takes the next stream: pure functions over loads. Knows no engine, no queue and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PolicyName = Literal["least_loaded", "round_robin", "pack"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


@dataclass(frozen=True, slots=True)
class Load:
    """An engine that can take one more stream: fewer are assigned to it than it can run."""

    position: int  # in the order of the configuration
    num_assigned: int
    max_running: int


def least_loaded(loads: Sequence[Load]) -> Load:
    """The engine with the smallest share of its slots in use; of equals the first. `loads` is not empty."""
    return min(loads, key=lambda load: (load.num_assigned / load.max_running, load.position))


def round_robin(loads: Sequence[Load], last_position: int) -> Load:
    """The next engine after the one that was chosen last, going round. `loads` is not empty."""
    return min(loads, key=lambda load: (load.position <= last_position, load.position))


def pack(loads: Sequence[Load], knee: int) -> Load:
    """The first engine with fewer than `knee` streams; past all knees, the least loaded. `loads` is not empty.

    Batching is sublinear: up to its knee an engine gains most from one more stream, so a second one stays idle.
    """
    below = [load for load in loads if load.num_assigned < knee]
    return min(below, key=lambda load: load.position) if below else least_loaded(loads)
