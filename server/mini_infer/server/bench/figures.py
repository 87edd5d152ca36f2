"""From rounds to figures: medians, spreads and ratios. Pure arithmetic; knows neither sides nor tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from mini_infer.server.bench.side import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of a run: ``name`` for programs, ``title`` and ``scale`` for people. None: this run has no such."""

    name: str
    title: str
    scale: float
    of: Callable[[Run], float | None]


TOKENS = Metric(name="tokens_per_s", title="tokens/s", scale=1, of=lambda run: run.tokens_per_s)
DECODE = Metric(name="decode_tokens_per_s", title="decode tokens/s", scale=1, of=lambda run: run.decode_tokens_per_s)
TTFT = Metric(name="ttft_s", title="TTFT ms", scale=1000, of=lambda run: run.ttft_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The rounds of one side that count."""

    side: str
    runs: tuple[Run, ...]

    def spread(self, metric: Metric) -> Spread | None:
        """Of one figure over the rounds; None where a round has none."""
        values = [metric.of(run) for run in self.runs]
        known = [value for value in values if value is not None]
        return Spread.of(known) if len(known) == len(values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over some rounds."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more, in the order of the rounds."""
        return cls(median=median(values), low=min(values), high=max(values), rounds=tuple(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides that took turns, with the same load."""

    num_streams: int
    first: Series
    second: Series

    def ratio(self, metric: Metric) -> float | None:
        """The first side's median over the second's."""
        first, second = self.first.spread(metric), self.second.spread(metric)
        return first.median / second.median if first and second and second.median else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """All comparisons of one kind."""

    name: str
    title: str
    metrics: tuple[Metric, ...]
    comparisons: tuple[Comparison, ...]
