"""How figures are told: tables for people on standard output, JSON for programs. Measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mini_infer.server.bench.facts import Facts
from mini_infer.server.bench.figures import Comparison, Measurement, Metric, Series, Spread

_PIPE_WIDTH = 10_000  # so that every row is one line there


class Report:
    """Writes each measurement as soon as it is there, so that a later one's failure loses nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
        self._facts: Facts = {}
        self._measurements: list[Measurement] = []

    def begin(self, facts: Facts) -> None:
        """The head, once."""
        if self._facts:
            return
        self._facts = facts
        self._table([], [(name, str(value)) for name, value in facts.items()])

    def add(self, measurement: Measurement) -> None:
        """One table more. Raises `OSError` where the file cannot be written."""
        self._measurements.append(measurement)
        self._write(Text(f"\n{measurement.name}: {measurement.title}"))
        titles = [metric.title for metric in measurement.metrics]
        self._table(["streams", "side", *titles], _rows(measurement))
        if self._path is not None:
            self._path.write_text(json.dumps(as_data(self._facts, self._measurements), indent=2) + "\n")

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(*columns, box=None, pad_edge=False, show_header=bool(columns))
        for row in rows:
            table.add_row(*map(Text, row))
        self._write(table)

    def _write(self, what: Table | Text) -> None:
        """Without the blanks that fill up a table's last column."""
        with self._console.capture() as written:
            self._console.print(what)
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in written.get().splitlines())
        sys.stdout.flush()


def as_data(facts: Facts, measurements: Sequence[Measurement]) -> dict[str, Any]:
    """What the tables say, and every round."""
    return {
        "facts": facts,
        "measurements": [
            {
                "name": measurement.name,
                "title": measurement.title,
                "comparisons": [_comparison(each, measurement.metrics) for each in measurement.comparisons],
            }
            for measurement in measurements
        ],
    }


def _rows(measurement: Measurement) -> list[list[str]]:
    """Three for each comparison: both sides, and the first over the second."""
    rows = []
    for each in measurement.comparisons:
        for series in (each.first, each.second):
            cells = [_spread(series.spread(metric), metric.scale) for metric in measurement.metrics]
            rows.append([str(each.num_streams), series.side, *cells])
        ratios = [_ratio(each.ratio(metric)) for metric in measurement.metrics]
        rows.append([str(each.num_streams), f"{each.first.side} / {each.second.side}", *ratios])
    return rows


def _spread(spread: Spread | None, scale: float) -> str:
    """The median, and in brackets the lowest and the highest."""
    if spread is None:
        return "-"
    return f"{spread.median * scale:.1f} ({spread.low * scale:.1f}..{spread.high * scale:.1f})"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _comparison(comparison: Comparison, metrics: Sequence[Metric]) -> dict[str, Any]:
    return {
        "streams": comparison.num_streams,
        "sides": [_series(series, metrics) for series in (comparison.first, comparison.second)],
        "ratios": {metric.name: comparison.ratio(metric) for metric in metrics},
    }


def _series(series: Series, metrics: Sequence[Metric]) -> dict[str, Any]:
    return {"name": series.side} | {metric.name: _plain(series.spread(metric)) for metric in metrics}


def _plain(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {"median": spread.median, "min": spread.low, "max": spread.high, "rounds": list(spread.rounds)}
