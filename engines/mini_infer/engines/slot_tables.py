"""What the device knows of each slot: its token ids and its cache blocks. Knows no model and chooses nothing.

Rows of a step are gathered from here, so that a steady decode brings nothing but a few integers to the device: the
token that a step chose is written here by the device itself, and the next step reads it here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mini_infer.engines.batch import Admitted, Row


class SlotTables:
    """Tables of ``num_slots`` rows; ``tokens`` [num_slots, max_length] and ``blocks`` [num_slots, max_blocks], long."""

    def __init__(self, num_slots: int, max_length: int, max_blocks: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_slots, max_length, dtype=torch.long, device=device)
        self.blocks = torch.zeros(num_slots, max_blocks, dtype=torch.long, device=device)
        self._num_written = [0] * num_slots  # blocks of each slot that the device knows
        self._device = device

    def admit(self, admitted: Admitted) -> None:
        """Fills a slot anew."""
        ids = torch.tensor(admitted.token_ids, dtype=torch.long)
        self.tokens[admitted.slot, : len(ids)] = ids.to(self._device, non_blocking=True)
        self._num_written[admitted.slot] = 0

    def note_blocks(self, rows: Sequence[Row]) -> None:
        """Tells the device of the blocks that rows got since the step before."""
        new = [
            (row.slot, index, row.blocks[index])
            for row in rows
            for index in range(self._num_written[row.slot], len(row.blocks))
        ]
        if not new:
            return
        slots, indices, blocks = torch.tensor(new, dtype=torch.long).T.to(self._device, non_blocking=True)  # [num_new]
        self.blocks[slots, indices] = blocks
        for row in rows:
            self._num_written[row.slot] = len(row.blocks)

    def note_tokens(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Keeps what a step chose; all [num_rows]. A negative id is no token, and that row is read by nobody."""
        self.tokens[slots, positions] = token_ids.clamp(min=0)
