"""What an engine is built from: one frozen dataclass, checked on creation. Reads no file and no environment."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mini_infer.engines.api import Sampling
from mini_infer.engines.errors import LoadError

DEFAULT_MODEL = "default"
"""The name of the embedded default model, SmolLM2-135M-Instruct."""

LOAD_FORMATS = ("auto", "dummy")
SHAPES = ("tiny", "qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-72b", "llama-3.1-8b")
"""What load format "dummy" can make."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_THREADS = 1024
MAX_RUNNING = 4096
_DEVICE = re.compile(r"(cpu|cuda)(?::([0-9]{1,4}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine's model and place. Raises `LoadError` on creation for an invalid value."""

    model: str = DEFAULT_MODEL  # folder, hub id, "default", or with load_format "dummy" the name of a shape
    revision: str | None = None  # of a hub id; None is its main branch
    load_format: str = "auto"  # "dummy": random weights, made on the device
    device: str = "cpu"  # a device label: "cpu", "cpu:1", "cuda:0"
    dtype: str = "auto"  # "auto": the model's own on CUDA, float32 on CPU
    max_context: int | None = None  # tokens; None is the model's own limit
    num_threads: int | None = None  # of torch on CPU; None is torch's own choice
    chat_template: str | None = None  # a file; None is the model's own
    trust_remote_code: bool = False  # whether to run Python code that comes with the model
    cache_dir: str | None = None  # where the default model's unpacked copy is kept; None is ~/.cache/mini-infer
    default_sampling: Sampling = Sampling()  # the operator's; goes before the model's own
    max_running: int | None = None  # streams at once, of engines that batch; None is 16 on a CPU, 256 on CUDA
    cache_tokens: int | None = None  # tokens that the key/value cache holds; None is what the memory allows
    prefill_tokens: int | None = None  # most prompt tokens in one step; None is 512 on a CPU, 2048 on CUDA
    prefix_cache: bool = True  # whether prompts share the cached keys and values of equal beginnings

    def __post_init__(self) -> None:
        _require(bool(self.model), "model must not be empty")
        _require(
            self.load_format in LOAD_FORMATS, f"load_format must be one of {LOAD_FORMATS}, not {self.load_format!r}"
        )
        _require(self.dtype in DTYPES, f"dtype must be one of {DTYPES}, not {self.dtype!r}")
        canonical_label(self.device)
        _require(
            self.max_context is None or self.max_context >= 2,
            f"max_context must be 2 or more, one token of prompt and one of answer, not {self.max_context}",
        )
        _require(
            self.num_threads is None or 1 <= self.num_threads <= MAX_THREADS,
            f"num_threads must be from 1 to {MAX_THREADS}, not {self.num_threads}",
        )
        _require(
            self.max_running is None or 1 <= self.max_running <= MAX_RUNNING,
            f"max_running must be from 1 to {MAX_RUNNING}, not {self.max_running}",
        )
        for name in ("cache_tokens", "prefill_tokens"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} must be 1 or more, not {value}")

    @property
    def num_slots(self) -> int:
        """Streams at once of an engine that batches."""
        return self.max_running or (256 if self._is_cuda else 16)

    @property
    def max_step_tokens(self) -> int:
        """Prompt tokens of the largest step of an engine that batches."""
        return self.prefill_tokens or (2048 if self._is_cuda else 512)

    @property
    def _is_cuda(self) -> bool:
        return self.device.startswith("cuda")


def canonical_label(label: str) -> str:
    """One spelling for each device, so that labels can be compared as strings: "cuda" is "cuda:0", "cpu:0" is "cpu".

    Raises `LoadError` for anything that is not a CPU or CUDA label.
    """
    match = _DEVICE.fullmatch(label)
    if match is None:
        raise LoadError(f"device must look like cpu or cuda:0, not {label!r}")
    kind, number = match[1], int(match[2] or 0)
    return "cpu" if (kind, number) == ("cpu", 0) else f"{kind}:{number}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise LoadError(message)
