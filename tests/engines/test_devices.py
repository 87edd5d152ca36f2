"""Device labels against pretended machines with 0, 1 and 4 GPUs."""

from __future__ import annotations

import pytest
import torch

from mini_infer.engines.config import canonical_label
from mini_infer.engines.devices import default_device, resolve_device
from mini_infer.engines.errors import LoadError


@pytest.mark.parametrize(("num_cuda", "label"), [(0, "cpu"), (1, "cuda:0"), (4, "cuda:0")])
def test_default_is_the_first_visible_gpu_else_the_cpu(
    num_cuda: int, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cuda)
    assert default_device() == label


@pytest.mark.parametrize("visible", ["3", "2,3", "", "GPU-1234"])
def test_only_torchs_numbering_counts(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert default_device() == "cuda:0"
    assert resolve_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(LoadError, match="no CUDA device 'cuda:3': torch sees 1, numbered 0 to 0"):
        resolve_device("cuda:3")


@pytest.mark.parametrize(
    ("label", "num_cuda", "device"),
    [
        ("cpu", 0, "cpu"),
        ("cpu:1", 0, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:0", 1, "cuda:0"),
        ("cuda:3", 4, "cuda:3"),
    ],
)
def test_labels_resolve(label: str, num_cuda: int, device: str) -> None:
    assert resolve_device(label, num_cuda) == torch.device(device)


@pytest.mark.parametrize(("label", "num_cuda"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:4", 4)])
def test_absent_gpu_is_an_error_and_never_the_cpu(label: str, num_cuda: int) -> None:
    with pytest.raises(LoadError, match=f"no CUDA device '{label}': torch sees {num_cuda}"):
        resolve_device(label, num_cuda)


@pytest.mark.parametrize("label", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:²", "mps", "meta"])
def test_other_labels_are_refused(label: str) -> None:
    with pytest.raises(LoadError, match="must look like"):
        resolve_device(label, 4)


def test_one_spelling_for_each_device() -> None:
    spellings = ["cuda", "cuda:0", "cuda:00", "cpu", "cpu:0", "cpu:1"]
    assert [canonical_label(label) for label in spellings] == ["cuda:0", "cuda:0", "cuda:0", "cpu", "cpu", "cpu:1"]
