"""Where and on what the figures were made: machine, versions, settings."""

from __future__ import annotations

import os
import platform
import shlex
from datetime import UTC, datetime
from pathlib import Path

import torch

from mini_infer.engines.api import Engine
from mini_infer.engines.config import EngineConfig
from mini_infer.server.bench.options import PROGRAM, BenchOptions
from mini_infer.server.server_info import library_versions, version

Facts = dict[str, str | int]


def facts_of(options: BenchOptions, config: EngineConfig, engine: Engine) -> Facts:
    """All that a reader needs to judge the figures, or to make them again; the engine is ready."""
    return {
        "command": shlex.join([*PROGRAM.split(), *options.argv]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "device": _device(config.device),
        "python": platform.python_version(),
        **library_versions(),
        "mini-infer": version(),
        "model": config.model,
        "load format": config.load_format,
        "dtype": engine.text.info.dtype,
        "threads": torch.get_num_threads(),
        "waiting threads": os.environ.get("OMP_WAIT_POLICY", "").lower() or "OpenMP's default",
        "engine": f"{engine.kind.value}, up to {engine.max_running} streams at once",
        "cache tokens": config.cache_tokens or "what the memory allows",
        "prompt tokens": options.prompt_tokens,
        "new tokens": options.new_tokens,
        "rounds": options.rounds,
    }


def _machine() -> str:
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {_num_cores()} cores"


def _cpu_lines() -> list[str]:
    """Linux's own words; other systems have no such file."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def _num_cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device(label: str) -> str:
    return f"{label}, {torch.cuda.get_device_name(label)}" if label.startswith("cuda") else label
