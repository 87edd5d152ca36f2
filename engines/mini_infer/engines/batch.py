"""What scheduler and runner hand each other for one step. Plain values; knows no tensors and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mini_infer.engines.api import PreparedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A sequence that gets a slot in this step: what the device has to know of it."""

    slot: int
    request: PreparedRequest
    token_ids: tuple[int, ...]  # prompt, and after a preemption the answer so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence's share of a step: its tokens at positions ``start`` to ``start + num_tokens - 1`` are fed."""

    key: str
    slot: int
    start: int
    num_tokens: int  # 1 or more
    samples: bool  # whether its last token's logits choose the next token; a prefill chunk that is not the last: no
    blocks: Sequence[int]  # its cache blocks, in order, enough for all positions; valid until the next plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step: the slots that are filled anew, then the rows that are run, packed one after the other."""

    rows: tuple[Row, ...]  # 1 or more
    admitted: tuple[Admitted, ...] = ()
    is_decode: bool = False  # every row feeds one token

    @property
    def sampling_rows(self) -> tuple[Row, ...]:
        """The rows that choose a token, in order."""
        return tuple(row for row in self.rows if row.samples)


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token. Log-probabilities are of the raw distribution; None and empty where they were not asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # best first: token id, logprob
    error: str | None = None  # why no token could be chosen for this row; the token id means nothing then
