"""Device labels: which of them exist here, and which torch device each means.

Only torch's own visible numbering counts; nothing here reads the environment.
"""

from __future__ import annotations

import torch

from mini_infer.engines.config import canonical_label
from mini_infer.engines.errors import LoadError


def resolve_device(label: str, num_cuda: int | None = None) -> torch.device:
    """The torch device of a label. Raises `LoadError` where this machine has no such device.

    Every "cpu:N" is the one CPU: torch keeps no numbers there, the label alone tells replicas apart.

    Args:
        label: "cpu", "cpu:1", "cuda", "cuda:0".
        num_cuda: Visible CUDA devices; None asks torch.
    """
    kind, _, index = canonical_label(label).partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if num_cuda is None else num_cuda
    if int(index) >= count:
        raise LoadError(f"no CUDA device {label!r}: torch sees {count}{_range_hint(count)}")
    return torch.device("cuda", int(index))


def default_device() -> str:
    """The label to use where none was asked for: the first CUDA device that torch sees, else the CPU."""
    return "cuda:0" if torch.cuda.device_count() else "cpu"


def _range_hint(count: int) -> str:
    return f", numbered 0 to {count - 1}" if count else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device: torch's CPU allocator has no class of its own for that."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)
