"""Device labels: how they are written, which of them exist, and which torch device each means.

Only torch's own visible numbering counts; nothing here reads the environment.
"""

from __future__ import annotations

import torch

from mini_infer.engines.errors import LoadError


def num_cuda_devices() -> int:
    """How many CUDA devices torch can see; 0 where there is no CUDA."""
    return torch.cuda.device_count()


def canonical_label(label: str) -> str:
    """One spelling for each device, so that labels can be compared as strings: "cuda" is "cuda:0", "cpu:0" is "cpu".

    Raises `LoadError` for anything that is not a CPU or CUDA label.
    """
    kind, colon, index = label.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (index.isascii() and index.isdecimal())):
        raise LoadError(f"device must look like cpu or cuda:0, not {label!r}")
    number = int(index or 0)
    return "cpu" if (kind, number) == ("cpu", 0) else f"{kind}:{number}"


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
    count = num_cuda_devices() if num_cuda is None else num_cuda
    if int(index) >= count:
        raise LoadError(f"no CUDA device {label!r}: torch sees {count}{_range_hint(count)}")
    return torch.device("cuda", int(index))


def default_devices(num_cuda: int | None = None) -> tuple[str, ...]:
    """The labels to use where none were asked for: every visible CUDA device, else the CPU."""
    count = num_cuda_devices() if num_cuda is None else num_cuda
    return tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)


def _range_hint(count: int) -> str:
    return f", numbered 0 to {count - 1}" if count else ""
