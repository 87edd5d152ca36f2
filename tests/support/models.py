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

ZOO holds these. PACKABLE holds many more, all that the packed forward is exact for; REFUSED what it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.tokenizers import CHAT_TEMPLATE, byte_level
from transformers import (
    AutoConfig,
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


def _config(model_type: str, **differences: Any) -> Callable[[], PretrainedConfig]:
    return lambda: AutoConfig.for_model(model_type, **{**_LLAMA_LIKE, **differences})


_GPT2_LIKE: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LATENT = {  # keys of 24, values of 16
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

PACKABLE: dict[str, Callable[[], PretrainedConfig]] = {
    **{name: build for name, build in ZOO.items() if name != "gemma2"},
    "cohere": _config("cohere", logit_scale=1.0),
    "cohere2": _config("cohere2", logit_scale=1.0, **_MIXED),
    "deepseek_v3": _config("deepseek_v3", **_LATENT),
    "ernie4_5": _config("ernie4_5"),
    "exaone4": _config("exaone4", **_MIXED),
    "gemma": _config("gemma", head_dim=16),
    "gemma3": _config("gemma3_text", head_dim=16, query_pre_attn_scalar=16, tie_word_embeddings=False, **_MIXED),
    "gemma2_capped": _config(
        "gemma2",
        head_dim=16,
        sliding_window=8,
        attn_logit_softcapping=4.0,
        attn_implementation="eager",
        tie_word_embeddings=False,
    ),
    "glm4": _config("glm4", head_dim=16),
    "gpt_bigcode": _config("gpt_bigcode", **_GPT2_LIKE),
    "gpt_neox": _config("gpt_neox"),
    "gpt_oss": _config(
        "gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_YARN, **_MIXED
    ),
    "granite": _config("granite"),
    "llama3_rope": _config(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "olmo2": _config("olmo2"),
    "olmo3": _config("olmo3", **_MIXED),
    "phi": _config("phi"),
    "phi3": _config("phi3", pad_token_id=0),
    "qwen2_moe": _config("qwen2_moe", shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3": _config("qwen3", head_dim=16),
    "qwen3_moe": _config("qwen3_moe", head_dim=16, **_EXPERTS),
    "smollm3": _config("smollm3", pad_token_id=0),
    "stablelm": _config("stablelm"),
    "starcoder2": _config("starcoder2", sliding_window=8),
    "yarn_rope": _config("qwen2", rope_parameters=_YARN),
}
"""Models whose packed forward equals their own on every version of transformers that is supported."""

PACKABLE_LATELY: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma2": gemma2,  # 5.17 attends by torch's SDPA and forgets the soft-cap of the scores
    "gptj": _config("gptj", **_GPT2_LIKE, rotary_dim=16),
}
"""The same, with newer versions of transformers only."""

REFUSED: dict[str, Callable[[], PretrainedConfig]] = {
    "bloom": _config("bloom", n_layer=2, n_head=4),
    "dynamic_rope": _config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}),
    "falcon": _config("falcon"),
    "falcon_alibi": _config("falcon", alibi=True),
    "llama4": _config(
        "llama4_text",
        head_dim=16,
        attention_chunk_size=8,
        num_local_experts=2,
        intermediate_size_mlp=128,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "longrope": _config(
        "phi3",
        pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    ),
    "mamba": _config("mamba", state_size=8),
    "minimax": _config("minimax", num_local_experts=4, block_size=16),
    "mpt": _config("mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=CONTEXT),
    "qwen3_next": _config(
        "qwen3_next",
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
        **_EXPERTS,
    ),
    "xglm": _config("xglm", d_model=64, ffn_dim=128, num_layers=2, attention_heads=4, pad_token_id=1),
}
"""Models that need more of attention than keys, values and a window."""


def build_model(name: str = "rand", seed: int = 0) -> PreTrainedModel:
    """A model of this file, float32, in evaluation mode; the same weights for the same seed."""
    config = {**PACKABLE, **PACKABLE_LATELY, **REFUSED}[name]()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
