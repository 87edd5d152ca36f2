"""Tiny random models of several architectures, whose greedy text depends on the prompt. All fp32, offline, in ms."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

VOCAB, CONTEXT = 384, 256
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    ),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=8),
    "gemma2": lambda: Gemma2Config(**_COMMON, sliding_window=8, head_dim=16, query_pre_attn_scalar=16),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    ),
}


def tiny(architecture: str, *, std: float = 0.3, seed: int = 0) -> PreTrainedModel:
    """Weights spread wider than the stock 0.02, with which the logits are almost flat."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
    model.tie_weights()
    return model.eval().requires_grad_(False)
