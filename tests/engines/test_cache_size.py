"""The cache gets what was asked for, or what the memory allows, and never more than all streams can fill."""

import pytest
import torch

from mini_infer.engines import cache_size
from mini_infer.engines.cache_size import num_cache_blocks
from mini_infer.engines.errors import LoadError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GB = 1 << 30


def blocks(device=CPU, **differences) -> int:
    facts = {
        "asked": None,
        "block_size": 32,
        "bytes_per_token": 1000,
        "step_bytes": 0,
        "max_running": 4,
        "max_context": 256,
    }
    return num_cache_blocks(device, **{**facts, **differences})


@pytest.fixture
def memory(monkeypatch):
    """Sets how much memory there is."""

    def has(num_bytes):
        sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": num_bytes // 4096}
        monkeypatch.setattr(cache_size.os, "sysconf", sizes.__getitem__)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (num_bytes, 2 * num_bytes))

    return has


@pytest.mark.parametrize(("asked", "expected"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (10**9, 31_250_000)])
def test_what_was_asked_for_is_there_whole(asked, expected, memory):
    memory(0)
    assert blocks(asked=asked) == expected
    assert expected * 32 >= asked


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(
    ("max_running", "max_context", "expected"),
    [(1, 2, 1), (1, 32, 1), (1, 33, 2), (1, 40, 2), (4, 40, 8), (16, 256, 128)],
)
def test_every_stream_can_fill_its_context_and_no_block_is_idle(device, max_running, max_context, expected, memory):
    memory(100 * GB)
    assert blocks(device, max_running=max_running, max_context=max_context) == expected
    assert expected * 32 >= max_running * max_context


def test_on_a_cpu_a_share_of_the_memory_and_a_limit(memory):
    many = {"max_running": 1000, "max_context": 10**6, "bytes_per_token": 10_000}
    memory(8 * GB)
    assert blocks(**many) == 2 * GB // 320_000
    memory(100 * GB)
    assert blocks(**many) == 4 * GB // 320_000
    assert blocks(**many, step_bytes=50 * GB) == 4 * GB // 320_000


def test_on_cuda_most_of_what_is_free_less_what_a_step_takes(memory):
    many = {"max_running": 1000, "max_context": 10**6, "bytes_per_token": 10_000}
    memory(80 * GB)
    assert blocks(CUDA, **many) == int(72 * GB) // 320_000
    assert blocks(CUDA, **many, step_bytes=2 * GB) == int(70 * GB) // 320_000


@pytest.mark.parametrize(
    ("device", "num_bytes", "step_bytes"), [(CPU, 4 * 31_000, 0), (CUDA, 35_000, 0), (CUDA, GB, GB), (CUDA, GB, 2 * GB)]
)
def test_where_there_is_no_memory_for_a_block_the_engine_does_not_come_up(device, num_bytes, step_bytes, memory):
    memory(num_bytes)
    with pytest.raises(LoadError, match="no memory"):
        blocks(device, step_bytes=step_bytes)


def test_a_single_block_is_enough_to_come_up(memory):
    memory(4 * 36_000)
    assert blocks() == 1
