"""From the rows of a batch to the tensors of a step, in one copy to the device. Runs no model and chooses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mini_infer.engines.attention_step import AttentionStep, Span
from mini_infer.engines.batch import Batch, Row
from mini_infer.engines.slot_tables import SlotTables
from mini_infer.engines.stage import StepInputs


@dataclass(frozen=True, slots=True)
class PackedStep:
    """What stages are fed, and where the tokens go that the step chooses: [num_samples] each."""

    inputs: StepInputs
    sample_slots: Tensor
    sample_positions: Tensor


class StepPacker:
    """Packs batches into static tensors: a step of the same size finds its integers in the same place.

    Args:
        tables: rows are gathered from them.
        block_size: tokens in a cache block.
        spare_slot: the slot of padding rows, which belongs to no sequence.
        max_step_tokens: tokens of the largest step.
        decode_buckets: sizes that a decode step is padded to, ascending; a larger step stays as it is.
    """

    def __init__(
        self,
        tables: SlotTables,
        device: torch.device,
        *,
        block_size: int,
        spare_slot: int,
        max_step_tokens: int,
        decode_buckets: Sequence[int],
    ) -> None:
        self._tables = tables
        self._block_size = block_size
        self._spare_slot = spare_slot
        self._decode_buckets = decode_buckets
        self._is_pinned = device.type == "cuda"
        self._integers = torch.zeros(7 * max_step_tokens, dtype=torch.long, device=device)

    def pack(self, batch: Batch) -> PackedStep:
        """The tensors of a step; they hold until the next one is packed."""
        rows = self._padded(batch)
        ends = list(accumulate(row.num_tokens for row in rows))
        sampling = [index for index, row in enumerate(rows) if row.samples]
        positions, cache_index, token_slots, slots, lengths, sample_rows, sample_index = self._to_device(
            [position for row in rows for position in _positions(row)],
            [self._cache_index(row, position) for row in rows for position in _positions(row)],
            [row.slot for row in rows for _ in range(row.num_tokens)],
            [row.slot for row in rows],
            [row.start + row.num_tokens for row in rows],
            sampling,
            [ends[index] - 1 for index in sampling],
        )
        max_blocks = max(len(row.blocks) for row in rows)
        attention = AttentionStep(
            cache_index=cache_index,
            spans=tuple(
                Span(begin=end - row.num_tokens, end=end, start=row.start, blocks=row.blocks)
                for row, end in zip(rows, ends, strict=True)
            ),
            block_table=self._tables.blocks[slots, :max_blocks],
            lengths=lengths,
            is_decode=batch.is_decode,
        )
        token_ids = self._tables.tokens[token_slots, positions]
        inputs = StepInputs(token_ids=token_ids, positions=positions, sample_index=sample_index, attention=attention)
        return PackedStep(inputs, slots[sample_rows], lengths[sample_rows])

    def _padded(self, batch: Batch) -> tuple[Row, ...]:
        """The rows, and those that fill a decode step up to its bucket: one token each, into the block of nobody."""
        num_rows = len(batch.rows)
        if not batch.is_decode:
            return batch.rows
        bucket = next((size for size in self._decode_buckets if size >= num_rows), num_rows)
        padding = Row(key="", slot=self._spare_slot, start=0, num_tokens=1, samples=False, blocks=(0,))
        return batch.rows + (padding,) * (bucket - num_rows)

    def _cache_index(self, row: Row, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return row.blocks[block] * self._block_size + offset

    def _to_device(self, *parts: list[int]) -> tuple[Tensor, ...]:
        host = torch.tensor([value for part in parts for value in part], dtype=torch.long, pin_memory=self._is_pinned)
        integers = self._integers[: len(host)]
        integers.copy_(host, non_blocking=True)
        split: tuple[Tensor, ...] = integers.split([len(part) for part in parts])
        return split


def _positions(row: Row) -> range:
    return range(row.start, row.start + row.num_tokens)
