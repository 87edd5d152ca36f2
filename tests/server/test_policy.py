from __future__ import annotations

import pytest

from mini_infer.server.policy import Load, least_loaded, pack, round_robin


def loads(*num_assigned: int, capacity: int = 8) -> list[Load]:
    return [Load(position, number, capacity) for position, number in enumerate(num_assigned)]


@pytest.mark.parametrize(
    ("assigned", "chosen"),
    [((0, 0, 0), 0), ((1, 0, 0), 1), ((2, 1, 1), 1), ((3, 3, 2), 2), ((7,), 0)],
)
def test_least_loaded_takes_the_emptiest_and_of_equals_the_first(assigned: tuple[int, ...], chosen: int) -> None:
    assert least_loaded(loads(*assigned)).position == chosen


def test_least_loaded_compares_shares_not_counts() -> None:
    assert least_loaded([Load(0, 2, 4), Load(1, 3, 16)]).position == 1


@pytest.mark.parametrize(("last", "chosen"), [(-1, 0), (0, 1), (1, 2), (2, 0)])
def test_round_robin_goes_round(last: int, chosen: int) -> None:
    assert round_robin(loads(5, 0, 7), last).position == chosen


def test_round_robin_skips_engines_without_room() -> None:
    with_room = [Load(0, 0, 1), Load(3, 0, 1)]
    assert round_robin(with_room, 0).position == 3
    assert round_robin(with_room, 3).position == 0


@pytest.mark.parametrize(
    ("assigned", "chosen"),
    [((0, 0), 0), ((3, 0), 0), ((4, 0), 1), ((4, 3), 1), ((4, 4), 0), ((5, 4), 1), ((6, 5), 1), ((2, 4), 0)],
)
def test_pack_fills_an_engine_to_its_knee_before_the_next(assigned: tuple[int, ...], chosen: int) -> None:
    assert pack(loads(*assigned), knee=4).position == chosen


def test_pack_with_a_knee_above_the_capacity_fills_to_the_capacity() -> None:
    only_second_has_room = [Load(1, 0, 2)]
    assert pack(only_second_has_room, knee=100).position == 1
