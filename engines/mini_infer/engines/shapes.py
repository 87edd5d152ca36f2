"""Named shapes of real architectures, and random weights for them. Reads no checkpoint and no network.

The sizes are those of the published ``config.json`` of each model.
"""

from __future__ import annotations

import math
from zlib import crc32

import torch
from torch import nn
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from mini_infer.engines.config import SHAPES
from mini_infer.engines.errors import LoadError


def shape_config(name: str) -> PretrainedConfig:
    """The configuration of a named shape. Raises `LoadError` for an unknown name."""
    if name == "tiny":
        return _tiny()
    if name == "qwen2.5-0.5b":
        return _qwen2(151_936, hidden_size=896, intermediate_size=4864, layers=24, heads=14, kv_heads=2, tied=True)
    if name == "qwen2.5-7b":
        return _qwen2(152_064, hidden_size=3584, intermediate_size=18_944, layers=28, heads=28, kv_heads=4)
    if name == "qwen2.5-72b":
        return _qwen2(152_064, hidden_size=8192, intermediate_size=29_568, layers=80, heads=64, kv_heads=8)
    if name == "llama-3.1-8b":
        return _llama31()
    raise LoadError(f"no shape is called {name!r}: with load_format dummy, model is one of {', '.join(SHAPES)}")


def randomise_weights(model: nn.Module, seed: int = 0) -> None:
    """Fills every parameter in place, on its own device, with numbers that depend on ``seed`` and its name only.

    A linear weight [out, in] is normal with standard deviation gain / sqrt(in), which keeps activations near 1 at
    any size. The gains are such that attention has preferences and the next token depends on the prompt: with the
    customary 0.02 the logits are almost flat, and tests of batching pass for the wrong reason.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomise(name, parameter, seed)


def _randomise(name: str, parameter: nn.Parameter, seed: int) -> None:
    generator = torch.Generator(parameter.device).manual_seed(crc32(f"{seed}/{name}".encode()))
    if name.endswith("bias"):
        parameter.normal_(0.0, 0.1, generator=generator)
    elif parameter.dim() == 1:  # the scale of a norm
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, 2.0 / math.sqrt(parameter.shape[-1]), generator=generator)


def _tiny() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        dtype=torch.float32,
    )


def _qwen2(
    vocab_size: int,
    *,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    tied: bool = False,
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        use_sliding_window=False,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )


def _llama31() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
