"""The model zoo: tiny random models of real architectures, and folders to load them from.

Weights are spread widely, so that different prompts give different greedy text: with the customary small ones the
logits are almost flat, and tests of batching pass for the wrong reason.

rand         RAND: Llama, 2 layers, hidden 64, vocabulary 384, context 128, head of its own.
rand_tied    the same with the head tied to the embedding.
gpt2, opt    learned absolute positions.
mistral      sliding window of 8.
gemma2       window of 8 on every other layer, soft-capped logits.
mixtral      4 experts, 2 at a time.
qwen2        biases in the projections of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.tokenizers import CHAT_TEMPLATE, byte_level
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from mini_infer.engines.shapes import randomise_weights

VOCAB_SIZE = 384
CONTEXT = 128
_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}


def rand() -> PretrainedConfig:
    return LlamaConfig(**_LLAMA_LIKE, tie_word_embeddings=False)


def rand_tied() -> PretrainedConfig:
    return LlamaConfig(**_LLAMA_LIKE, tie_word_embeddings=True)


def gpt2() -> PretrainedConfig:
    return GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=None, eos_token_id=256
    )


def opt() -> PretrainedConfig:
    return OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=64,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=1,
    )


def mistral() -> PretrainedConfig:
    return MistralConfig(**_LLAMA_LIKE, sliding_window=8)


def gemma2() -> PretrainedConfig:
    return Gemma2Config(**_LLAMA_LIKE, head_dim=16, sliding_window=8, tie_word_embeddings=False)


def mixtral() -> PretrainedConfig:
    return MixtralConfig(**_LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2)


def qwen2() -> PretrainedConfig:
    return Qwen2Config(**_LLAMA_LIKE)


ZOO: dict[str, Callable[[], PretrainedConfig]] = {
    build.__name__: build for build in (rand, rand_tied, gpt2, opt, mistral, gemma2, mixtral, qwen2)
}


def build_model(name: str = "rand", seed: int = 0) -> PreTrainedModel:
    """A model of the zoo, float32, in evaluation mode; the same weights for the same seed."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(ZOO[name](), dtype=torch.float32)
    randomise_weights(model, seed)
    return model.eval()


def save_model(
    folder: Path,
    model: PreTrainedModel | str = "rand",
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_shard_size: str = "1GB",
) -> Path:
    """Writes a model (or one of the zoo, by name) and its tokenizer, BYTE with a ChatML template by default."""
    built = build_model(model) if isinstance(model, str) else model
    built.save_pretrained(folder, max_shard_size=max_shard_size)
    (tokenizer or byte_level(CHAT_TEMPLATE)).save_pretrained(folder)
    return folder
