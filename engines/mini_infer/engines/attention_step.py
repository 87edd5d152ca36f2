"""What the attention of all layers must know of one step. Derives masks and tables from it, each once and not in every
layer. Knows positions and blocks; no keys, no values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One row's tokens: packed places ``begin`` to ``end - 1``, positions ``start`` and on, kept in ``blocks``."""

    begin: int
    end: int
    start: int
    blocks: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """How many tokens this step feeds."""
        return self.end - self.begin

    @property
    def length(self) -> int:
        """Tokens of the row after this step."""
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class DecodeView:
    """The keys that the decoding rows see, through a window or not."""

    table: torch.Tensor  # [num_rows * width]: blocks to gather
    mask: torch.Tensor  # [num_rows, 1, 1, width * block_size]: added to scores, 0 or -inf


@dataclass(frozen=True, slots=True)
class SpanView:
    """The keys that one row's tokens see: places ``skip`` to ``skip + num_keys - 1`` of some of its blocks."""

    first_block: int | None  # those blocks lie one after the other from here; None: gather them by `table`
    table: torch.Tensor  # [some of its blocks]
    skip: int
    num_keys: int
    is_causal: bool  # query i sees keys 0 to i; no mask
    mask: torch.Tensor | None  # [num_tokens, num_keys]: added to scores, 0 or -inf; None: every query sees every key


class AttentionStep:
    """The tokens of one step, packed row after row, and where their keys and values lie. Used in one step only.

    Args:
        cache_index: [num_tokens] int64, block * block_size + offset of each token's own place.
        spans: The rows, in packed order; host integers.
        block_table: [num_rows, max_blocks] int64, each row's blocks in order; what follows them means nothing.
        lengths: [num_rows] int64, tokens of each row after this step, 1 or more.
        is_decode: Every row feeds one token.
    """

    def __init__(
        self,
        *,
        cache_index: torch.Tensor,
        spans: Sequence[Span],
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        is_decode: bool,
    ) -> None:
        self.cache_index = cache_index
        self.spans = tuple(spans)
        self.block_table = block_table
        self.lengths = lengths
        self.is_decode = is_decode
        self._decode_views: dict[tuple[int | None, int, torch.dtype], DecodeView] = {}
        self._span_views: dict[tuple[int | None, int, torch.dtype], tuple[SpanView, ...]] = {}
        self._opened: torch.Tensor | None = None

    def opened_blocks(self, block_size: int) -> torch.Tensor:
        """[any number] int64: blocks that this step begins and does not fill.

        They are to be cleared before they are written: the rest of a block is read under a mask, and what a former
        owner left there may be no number.
        """
        if self._opened is None:
            opened = [
                span.blocks[span.length // block_size]
                for span in self.spans
                if span.length % block_size and span.length // block_size * block_size >= span.start
            ]
            self._opened = torch.tensor(opened, dtype=torch.long).to(self.block_table.device, non_blocking=True)
        return self._opened

    def decode_view(self, window: int | None, block_size: int, dtype: torch.dtype) -> DecodeView:
        """For a step whose rows feed one token each."""
        key = (window, block_size, dtype)
        if key not in self._decode_views:
            self._decode_views[key] = self._make_decode_view(window, block_size, dtype)
        return self._decode_views[key]

    def span_views(self, window: int | None, block_size: int, dtype: torch.dtype) -> tuple[SpanView, ...]:
        """One for each span."""
        key = (window, block_size, dtype)
        if key not in self._span_views:
            self._span_views[key] = tuple(
                self._make_span_view(row, window, block_size, dtype) for row in range(len(self.spans))
            )
        return self._span_views[key]

    def _make_decode_view(self, window: int | None, block_size: int, dtype: torch.dtype) -> DecodeView:
        lengths = self.lengths[:, None]  # [num_rows, 1]
        device = lengths.device
        width = _num_blocks(max(span.length for span in self.spans), block_size)
        first = torch.zeros_like(lengths)  # [num_rows, 1]: the first block in sight
        if window is not None:
            width = min(width, _num_blocks(window - 1, block_size) + 1)
            first = (lengths - window).clamp(min=0) // block_size
        columns = first + torch.arange(width, device=device)  # [num_rows, width]
        # Beyond a row's end its own first block is read, under the mask: a stranger's may hold what is no number.
        columns_read = torch.where(columns * block_size < lengths, columns, 0)
        places = torch.arange(width * block_size, device=device)
        positions = first * block_size + places  # [num_rows, width * block_size]
        seen = positions < lengths
        if window is not None:
            seen &= positions >= lengths - window
        return DecodeView(
            table=self.block_table.gather(1, columns_read).flatten(),
            mask=_additive(seen, dtype)[:, None, None],
        )

    def _make_span_view(self, row: int, window: int | None, block_size: int, dtype: torch.dtype) -> SpanView:
        span = self.spans[row]
        begin = 0 if window is None else max(0, span.start + 1 - window)  # the first position in sight
        blocks = range(begin // block_size, _num_blocks(span.length, block_size))
        is_whole = span.start == 0 and (window is None or span.length <= window)
        return SpanView(
            first_block=span.blocks[blocks.start] if _is_run([span.blocks[index] for index in blocks]) else None,
            table=self.block_table[row, blocks.start : blocks.stop],
            skip=begin - blocks.start * block_size,
            num_keys=span.length - begin,
            is_causal=is_whole and span.num_tokens > 1,
            mask=None if is_whole or span.num_tokens == 1 else self._span_mask(span, begin, window, dtype),
        )

    def _span_mask(self, span: Span, begin: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        device = self.lengths.device
        queries = torch.arange(span.start, span.length, device=device)[:, None]  # [num_tokens, 1]
        keys = torch.arange(begin, span.length, device=device)  # [num_keys]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return _additive(seen, dtype)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _is_run(blocks: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in pairwise(blocks))


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # A bool mask would be turned into this one in every layer.
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
