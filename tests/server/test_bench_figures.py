"""The arithmetic of rounds, medians and ratios, with a clock that only the test moves; and how figures are told."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from mini_infer.server.bench.figures import DECODE, TOKENS, TTFT, Measurement, Spread
from mini_infer.server.bench.measure import OWN_TOKENS, compare_prefix, compare_streams
from mini_infer.server.bench.prompts import Prompt, Prompts
from mini_infer.server.bench.report import Report
from mini_infer.server.bench.side import BenchError, Run, finished_run

S = 10**9


class Clock:
    """Seconds that pass only where a side works."""

    def __init__(self) -> None:
        self.now_s = 0
        self.turns: list[str] = []


class FakeSide:
    """Takes ``first_s`` to the first token of all streams, then for each further token the next of ``step_s``."""

    def __init__(self, name: str, clock: Clock, first_s: int, steps_s: Sequence[int]) -> None:
        self.name, self._clock, self._first_s, self._steps_s = name, clock, first_s, list(steps_s)
        self.prompts: list[tuple[Prompt, ...]] = []

    def run(self, prompts: Sequence[Prompt], num_new_tokens: int) -> Run:
        self._clock.turns.append(self.name)
        self.prompts.append(tuple(prompts))
        begin_s, step_s = self._clock.now_s, self._steps_s.pop(0)
        stamps = [begin_s + self._first_s + step_s * index for index in range(num_new_tokens)]
        self._clock.now_s = stamps[-1]
        return finished_run(self.name, begin_s * S, [[at_s * S for at_s in stamps] for _ in prompts], num_new_tokens)


def measured(streams: Sequence[int] = (2,), rounds: int = 3) -> tuple[Measurement, FakeSide, FakeSide, Clock]:
    clock = Clock()
    fast = FakeSide("fast", clock, 2, [100, 1, 3, 2] * len(streams))
    slow = FakeSide("slow", clock, 4, [100, 4, 4, 8] * len(streams))
    kwargs = {"streams": streams, "prompt_tokens": 5, "new_tokens": 3, "rounds": rounds}
    return compare_streams("x", "y", (fast, slow), Prompts(50, Random(0)), **kwargs), fast, slow, clock


# --- one run ------------------------------------------------------------------------------------------------------


def test_a_runs_figures() -> None:
    run = Run(begin_ns=10 * S, token_ns=((11 * S, 12 * S, 13 * S), (12 * S, 13 * S, 14 * S), (16 * S, 17 * S, 20 * S)))
    assert run.tokens_per_s == 9 / 10
    assert run.decode_tokens_per_s == 2 / 4  # from 16 s, when the last stream has its first token
    assert run.ttft_s == 2


def test_a_run_of_first_tokens_has_no_decoding() -> None:
    assert Run(begin_ns=0, token_ns=((S,), (2 * S,))).decode_tokens_per_s is None


def test_a_stream_that_is_too_short_is_no_result() -> None:
    with pytest.raises(BenchError, match="engine made 2 tokens in place of 3"):
        finished_run("engine", 0, [[1, 2, 3], [1, 2]], 3)


# --- rounds -------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    told, _, _, clock = measured()
    assert clock.turns == ["fast", "slow"] * 4
    (pair,) = told.comparisons
    assert pair.first.spread(TOKENS).rounds == (6 / 4, 6 / 8, 6 / 6)  # 2 streams of 3 tokens in 2 s + 2 steps
    assert pair.second.spread(TOKENS).rounds == (6 / 12, 6 / 12, 6 / 20)


def test_ratios_are_of_medians() -> None:
    (pair,) = measured()[0].comparisons
    assert pair.ratio(TOKENS) == (6 / 6) / (6 / 12)
    assert pair.ratio(DECODE) == (4 / 4) / (4 / 8)
    assert pair.ratio(TTFT) == 2 / 4
    assert pair.first.spread(TOKENS) == Spread(median=1.0, low=6 / 8, high=6 / 4, rounds=(6 / 4, 6 / 8, 1.0))


def test_both_sides_get_the_same_prompts_and_every_round_new_ones() -> None:
    _, fast, slow, _ = measured(streams=(1, 4))
    assert fast.prompts == slow.prompts
    assert [len(prompts) for prompts in fast.prompts] == [1] * 4 + [4] * 4
    drawn = [prompt for prompts in fast.prompts for prompt in prompts]
    assert len(set(drawn)) == len(drawn)
    assert {len(prompt) for prompt in drawn} == {5}
    assert all(0 <= token_id < 50 for prompt in drawn for token_id in prompt)


def test_prefix_pairs_share_their_beginning_and_nothing_else() -> None:
    side = FakeSide("engine", Clock(), 1, [1] * 6)
    told = compare_prefix(side, Prompts(50, Random(0)), prefix_tokens=40, rounds=2)
    prompts = [prompt for (prompt,) in side.prompts]
    assert [len(prompt) for prompt in prompts] == [40 + OWN_TOKENS] * 6
    shares = [first[:40] == second[:40] for first, second in pairwise(prompts)]
    assert shares == [True, False, True, False, True]
    assert len({prompt[40:] for prompt in prompts}) == 6
    assert [metric.name for metric in told.metrics] == ["ttft_s"]
    assert len(told.comparisons[0].first.runs) == len(told.comparisons[0].second.runs) == 2


# --- how it is told -----------------------------------------------------------------------------------------------


def test_the_report_has_a_head_once_and_a_table_for_each_measurement(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    report = Report(path)
    for _ in range(2):
        report.begin({"model": "a [b] c", "threads": 2})
        report.add(measured()[0])
    lines = capsys.readouterr().out.splitlines()
    table = ["", "x: y", "streams  side         tokens/s         decode tokens/s  TTFT ms"]
    table += ["2        fast         1.0 (0.8..1.5)   1.0 (0.7..2.0)   2000.0 (2000.0..2000.0)"]
    table += ["2        slow         0.5 (0.3..0.5)   0.5 (0.2..0.5)   4000.0 (4000.0..4000.0)"]
    table += ["2        fast / slow  2.00             2.00             0.50"]
    assert [line.split() for line in lines] == [
        line.split() for line in ["model    a [b] c", "threads  2", *table, *table]
    ]
    assert all(line == line.rstrip() for line in lines)
    told = json.loads(path.read_text())
    assert told["facts"] == {"model": "a [b] c", "threads": 2}
    assert [each["name"] for each in told["measurements"]] == ["x", "x"]
    (pair,) = told["measurements"][0]["comparisons"]
    assert pair["streams"] == 2
    assert pair["ratios"] == {"tokens_per_s": 2.0, "decode_tokens_per_s": 2.0, "ttft_s": 0.5}
    assert [side["name"] for side in pair["sides"]] == ["fast", "slow"]
    assert pair["sides"][0]["ttft_s"] == {"median": 2.0, "min": 2.0, "max": 2.0, "rounds": [2.0, 2.0, 2.0]}


def test_a_figure_that_there_is_not_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    sides = FakeSide("a", clock, 1, [1, 1]), FakeSide("b", clock, 1, [1, 1])
    told = compare_streams("x", "y", sides, Prompts(9), streams=(1,), prompt_tokens=1, new_tokens=1, rounds=1)
    Report(None).add(told)
    rows = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[3] for row in rows] == ["-", "-", "-"]
    assert told.comparisons[0].ratio(DECODE) is None
