"""How many blocks the key/value cache gets: what was asked for, or what the memory allows. Allocates nothing."""

from __future__ import annotations

import os

import torch

from mini_infer.engines.errors import LoadError

CPU_SHARE, CPU_LIMIT_BYTES = 0.25, 4 << 30
"""Of the machine's memory. Pages of it that were never written take none."""

CUDA_SHARE = 0.9
"""Of what is free when the model is loaded, less what a step needs for itself."""


def num_cache_blocks(
    device: torch.device,
    *,
    asked: int | None,
    block_size: int,
    bytes_per_token: int,
    step_bytes: int,
    max_running: int,
    max_context: int,
) -> int:
    """Blocks that the cache shall have, 1 or more: never more than all slots could fill.

    Args:
        device: where it will lie.
        asked: tokens that the operator wants it to hold, if any number.
        block_size: tokens in a block.
        bytes_per_token: keys and values of all layers.
        step_bytes: what the largest step takes beside the cache; used on CUDA.
        max_running: slots.
        max_context: tokens that a slot can fill.

    Raises:
        LoadError: There is no memory for a single block.
    """
    if asked is not None:
        return -(-asked // block_size)
    num_bytes = _cpu_bytes() if device.type == "cpu" else _cuda_bytes(device, step_bytes)
    num_blocks = num_bytes // (bytes_per_token * block_size)
    if num_blocks < 1:
        raise LoadError(f"{device} has no memory left for a key/value cache")
    return min(num_blocks, max_running * -(-max_context // block_size))


def _cpu_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(total * CPU_SHARE), CPU_LIMIT_BYTES)


def _cuda_bytes(device: torch.device, step_bytes: int) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * CUDA_SHARE) - step_bytes
