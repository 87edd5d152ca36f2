"""What is measured, and in which order the sides take turns. Knows neither engines nor tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from mini_infer.server.bench.figures import DECODE, TOKENS, TTFT, Comparison, Measurement, Series
from mini_infer.server.bench.prompts import Prompt, Prompts
from mini_infer.server.bench.side import Run, Side

OWN_TOKENS = 32
"""Tokens that a prompt of `prefix` has for itself, after those that it shares."""

_log = logging.getLogger(__name__)
Turn = Callable[[], Run]


def compare_streams(
    name: str,
    title: str,
    sides: tuple[Side, Side],
    prompts: Prompts,
    *,
    streams: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
) -> Measurement:
    """Both sides with the same prompts, new ones in each round, for each number of streams. Raises `BenchError`."""

    def turns(num_streams: int) -> tuple[Turn, Turn]:
        drawn = prompts.many(num_streams, prompt_tokens)
        first, second = sides
        return lambda: first.run(drawn, new_tokens), lambda: second.run(drawn, new_tokens)

    names = (sides[0].name, sides[1].name)
    return Measurement(
        name=name,
        title=title,
        metrics=(TOKENS, DECODE, TTFT),
        comparisons=tuple(
            _alternate(f"{name}, streams {number}", names, number, partial(turns, number), rounds) for number in streams
        ),
    )


def compare_prefix(side: Side, prompts: Prompts, *, prefix_tokens: int, rounds: int) -> Measurement:
    """One side twice: a prompt whose beginning is new, then one with the same beginning. Raises `BenchError`."""

    def turns() -> tuple[Turn, Turn]:
        prefix = prompts.one(prefix_tokens)
        return _first_token(side, prefix + prompts.one(OWN_TOKENS)), _first_token(
            side, prefix + prompts.one(OWN_TOKENS)
        )

    return Measurement(
        name="prefix",
        title=f"a prompt of {prefix_tokens} + {OWN_TOKENS} tokens that are all new, "
        f"and the next one, which begins with the same {prefix_tokens}",
        metrics=(TTFT,),
        comparisons=(_alternate("prefix", ("new", "known"), 1, turns, rounds),),
    )


def _first_token(side: Side, prompt: Prompt) -> Turn:
    return lambda: side.run([prompt], 1)


def _alternate(
    label: str, names: tuple[str, str], num_streams: int, turns: Callable[[], tuple[Turn, Turn]], rounds: int
) -> Comparison:
    """First, second, first, second: what disturbs the machine for a while disturbs both. Round 0 does not count."""
    runs: tuple[list[Run], list[Run]] = [], []
    for number in range(rounds + 1):
        for name, turn, kept in zip(names, turns(), runs, strict=True):
            run = turn()
            _log.info(
                "%s, round %d of %d: %s %.1f tokens/s, TTFT %.1f ms",
                *(label, number, rounds, name),
                *(run.tokens_per_s, run.ttft_s * 1e3),
            )
            if number:
                kept.append(run)
    first, second = (Series(side=name, runs=tuple(kept)) for name, kept in zip(names, runs, strict=True))
    return Comparison(num_streams=num_streams, first=first, second=second)
