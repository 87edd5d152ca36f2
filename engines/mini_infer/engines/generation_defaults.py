"""What a checkpoint's own files say of its limits, its end tokens and its sampling. Decides nothing per request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from mini_infer.engines.api import Sampling
from mini_infer.engines.errors import LoadError
from mini_infer.engines.preparation import BUILT_IN_SAMPLING, overlay

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")


def context_length(config: PretrainedConfig, max_context: int | None) -> int:
    """The most tokens, prompt and answer together. Raises `LoadError` where ``max_context`` asks for too much."""
    text_config = config.get_text_config()
    own = next((value for key in _CONTEXT_KEYS if isinstance(value := getattr(text_config, key, None), int)), None)
    if own is None and max_context is None:
        raise LoadError("the model's config.json names no context length: set max_context")
    if own is not None and max_context is not None and max_context > own:
        raise LoadError(f"max_context is {max_context}, but the model's own context is {own} tokens")
    return max_context or own or 0


def eos_token_ids(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, generation: GenerationConfig
) -> frozenset[int]:
    """Every id that ends an answer: tokenizer, config and generation_config each know some of them."""
    said = (
        tokenizer.eos_token_id,
        getattr(config, "eos_token_id", None),
        getattr(config.get_text_config(), "eos_token_id", None),
        generation.eos_token_id,
    )
    return frozenset(token_id for value in said for token_id in _as_ids(value) if token_id >= 0)


def default_sampling(operator: Sampling, generation: GenerationConfig) -> Sampling:
    """Defaults for what a request leaves open: operator, then the model's generation_config, then built-in."""
    return overlay(operator, overlay(_of_model(generation), BUILT_IN_SAMPLING))


def _of_model(generation: GenerationConfig) -> Sampling:
    """What the file says, and only that: Hugging Face's silent top_k of 50 is not taken over."""
    penalty = _number(generation.repetition_penalty)
    if not generation.do_sample:
        return Sampling(repetition_penalty=penalty)
    temperature = _number(generation.temperature)
    top_k = generation.top_k
    return Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=_number(generation.top_p),
        top_k=None if top_k is None else max(int(top_k), 0),  # some files write -1 for off
        min_p=_number(generation.min_p),
        repetition_penalty=penalty,
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(token_id) for token_id in value)
