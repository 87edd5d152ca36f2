"""The memory for keys and values: one pair of tensors for each layer, cut into blocks of tokens.

Knows shapes and sizes; who owns which block is the block pool's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of each token: ``num_kv_heads`` keys and as many values."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """``keys[layer]`` and ``values[layer]`` are [num_blocks, block_size, num_kv_heads, dim], zeros at first."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        def zeros(num_kv_heads: int, dim: int) -> torch.Tensor:
            return torch.zeros(num_blocks, block_size, num_kv_heads, dim, dtype=dtype, device=device)

        self.block_size = block_size
        self.keys = [zeros(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.values = [zeros(shape.num_kv_heads, shape.value_dim) for shape in shapes]


def bytes_per_token(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """What one token takes in all layers together."""
    return dtype.itemsize * sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
