"""Puts together what an `LLMEngine` drives: a guarded model, its cache, runner and scheduler. Runs no stream."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from mini_infer.engines.block_pool import BlockPool
from mini_infer.engines.cache_size import num_cache_blocks
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.guard import pack
from mini_infer.engines.kv_cache import KVCache, bytes_per_token
from mini_infer.engines.model import LoadedModel
from mini_infer.engines.prompt import PromptPreparer
from mini_infer.engines.runner import Runner
from mini_infer.engines.scheduler import Scheduler
from mini_infer.engines.stage import Stage

_log = logging.getLogger(__name__)

DECODING_SHARE = 4
"""While others decode, a prefill step is this many times smaller, so that their next token does not wait as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How steps are made; what suits the device, unless a test wants otherwise. No answer depends on it."""

    block_size: int = 32  # tokens in a cache block
    run_ahead: bool = False  # launch the next step before the last one is collected
    decode_buckets: tuple[int, ...] = ()  # sizes that decode steps are padded to

    @classmethod
    def of(cls, device: torch.device) -> Tuning:
        """A CPU is busy while a step is launched: nothing is gained by launching ahead, nor by steps of few sizes."""
        if device.type == "cpu":
            return cls()
        return cls(run_ahead=True, decode_buckets=(1, 2, 4, 8, 12, 16, *range(24, 64, 8), *range(64, 257, 16)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What an engine's owner thread drives, and what its callers ask."""

    runner: Runner
    scheduler: Scheduler
    text: PromptPreparer
    tokenizer: PreTrainedTokenizerBase


def assemble(config: EngineConfig, loaded: LoadedModel, tuning: Tuning) -> Assembly:
    """Builds all parts on the model's device. Raises `NotExact` for a model that the packed path would get wrong."""
    stage = pack(loaded.model)
    max_context = loaded.text.info.context_length
    step_tokens = min(config.max_step_tokens, max_context - 1)
    num_blocks = num_cache_blocks(
        loaded.device,
        asked=config.cache_tokens,
        block_size=tuning.block_size,
        bytes_per_token=bytes_per_token(stage.shapes, loaded.model.dtype),
        step_bytes=_step_bytes(stage, loaded, step_tokens),
        max_running=config.num_slots,
        max_context=max_context,
    )
    text = _limited(loaded, num_blocks * tuning.block_size)
    cache = KVCache(stage.shapes, num_blocks + 1, tuning.block_size, loaded.model.dtype, loaded.device)
    stage.bind(cache)
    runner = Runner(
        [stage],
        cache,
        max_running=config.num_slots,
        max_context=text.info.context_length,
        max_step_tokens=step_tokens,
        decode_buckets=tuning.decode_buckets,
    )
    scheduler = Scheduler(
        BlockPool(num_blocks + 1, tuning.block_size),
        max_running=config.num_slots,
        prefill_tokens=step_tokens,
        decoding_prefill_tokens=max(1, step_tokens // DECODING_SHARE),
        prefix_cache=config.prefix_cache,
    )
    _log.info(
        "%s: cache of %d tokens in blocks of %d, up to %d streams, prefill steps of %d tokens",
        config.model,
        num_blocks * tuning.block_size,
        tuning.block_size,
        config.num_slots,
        step_tokens,
    )
    return Assembly(runner=runner, scheduler=scheduler, text=text, tokenizer=loaded.tokenizer)


def _limited(loaded: LoadedModel, cache_tokens: int) -> PromptPreparer:
    """The model's text side, with a context that the cache can hold, so that no stream can outgrow it."""
    info = loaded.text.info
    if info.context_length <= cache_tokens:
        return loaded.text
    _log.warning("%s: context of %d tokens, since the cache holds no more", info.source, cache_tokens)
    return PromptPreparer(tokenizer=loaded.tokenizer, info=replace(info, context_length=cache_tokens))


def _step_bytes(stage: Stage, loaded: LoadedModel, step_tokens: int) -> int:
    """Memory that the largest step takes for itself, measured on CUDA by running one over a cache of nothing."""
    if loaded.device.type != "cuda":
        return 0
    cache = KVCache(stage.shapes, 1, step_tokens + 1, loaded.model.dtype, loaded.device)
    stage.bind(cache)
    runner = Runner([stage], cache, max_running=1, max_context=step_tokens + 1, max_step_tokens=step_tokens)
    before = torch.cuda.memory_allocated(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    runner.try_out(step_tokens)
    return torch.cuda.max_memory_allocated(loaded.device) - before
