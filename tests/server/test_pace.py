from __future__ import annotations

import pytest

from mini_infer.server.pace import Pace

S = 1_000_000_000


def test_a_guess_before_anything_was_seen() -> None:
    assert Pace().retry_after_s(5 * S) == 1.0


def test_the_mean_gap_between_departures() -> None:
    pace = Pace()
    pace.begin(0)
    for second in (2, 4, 6):
        pace.left(second * S)
    assert pace.retry_after_s(6 * S) == 2.0


def test_refused_streams_stand_behind_each_other_until_the_next_departure() -> None:
    pace = Pace()
    pace.begin(0)
    pace.left(2 * S)
    assert [pace.retry_after_s(2 * S) for _ in range(3)] == [2.0, 4.0, 6.0]
    pace.left(4 * S)
    assert pace.retry_after_s(4 * S) == 2.0


def test_a_queue_that_nobody_leaves_grows_slow() -> None:
    pace = Pace()
    pace.begin(0)
    assert pace.retry_after_s(20 * S) == 20.0
    pace.left(20 * S)
    assert pace.retry_after_s(50 * S) == 50.0


def test_idle_hours_do_not_count() -> None:
    pace = Pace()
    pace.begin(0)
    pace.left(1 * S)
    pace.begin(7200 * S)
    pace.left(7202 * S)
    assert pace.retry_after_s(7202 * S) == 2.0


@pytest.mark.parametrize(("gap_ns", "seconds"), [(1, 0.1), (1000 * S, 60.0)])
def test_bounds(gap_ns: int, seconds: float) -> None:
    pace = Pace()
    pace.begin(0)
    pace.left(gap_ns)
    assert pace.retry_after_s(gap_ns) == seconds
