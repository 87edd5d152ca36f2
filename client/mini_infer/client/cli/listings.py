"""`mini-infer engines` and `mini-infer models`: tables for people, JSON lines for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mini_infer.client import Client, Engine, Model
from mini_infer.client.cli.output import tolerate_any_text, write_json
from mini_infer.client.cli.run import OK

TIMEOUT_S = 10.0


async def show_engines(address: str, *, as_json: bool) -> int:
    """One row for each engine."""
    async with Client(address) as client:
        engines = await client.engines(timeout_s=TIMEOUT_S)
    columns = ("id", "kind", "devices", "model", "state", "running", "waiting", "tokens")
    _show(engines, columns, [_engine_row(engine) for engine in engines], as_json)
    return OK


async def show_models(address: str, *, as_json: bool) -> int:
    """One row for each model."""
    async with Client(address) as client:
        models = await client.models(timeout_s=TIMEOUT_S)
    columns = ("name", "source", "context", "vocabulary", "dtype", "chat", "engines")
    _show(models, columns, [_model_row(model) for model in models], as_json)
    return OK


def _engine_row(engine: Engine) -> tuple[str, ...]:
    return (
        engine.engine_id,
        engine.kind,
        ",".join(engine.devices),
        engine.model,
        f"{engine.state}: {engine.failure}" if engine.failure else engine.state,
        f"{engine.num_running}/{engine.max_running}",
        str(engine.num_waiting),
        str(engine.generated_tokens),
    )


def _model_row(model: Model) -> tuple[str, ...]:
    return (
        model.name,
        model.source,
        str(model.context_length),
        str(model.vocab_size),
        model.dtype,
        "yes" if model.has_chat_template else "no",
        ",".join(model.engine_ids),
    )


def _show(entries: Sequence[object], columns: Sequence[str], rows: Sequence[Sequence[str]], as_json: bool) -> None:
    tolerate_any_text()
    if as_json:
        for entry in entries:
            write_json(entry)
    else:
        _print_table(columns, rows)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Folded to the terminal's width; in a pipe every row is one line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=not sys.stdout.isatty())
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 10_000, highlight=False).print(table)
