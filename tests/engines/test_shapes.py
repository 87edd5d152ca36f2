"""Named shapes have the published sizes; their weights are repeatable and their tokenizer covers every id."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PretrainedConfig

from mini_infer.engines.errors import LoadError
from mini_infer.engines.shapes import SHAPES, randomise_weights, shape_config
from mini_infer.engines.synthetic_tokenizer import MIN_VOCAB_SIZE, SPECIAL_TOKENS, synthetic_tokenizer

TOKENIZER = synthetic_tokenizer(2048)


def build(config: PretrainedConfig, device: str) -> torch.nn.Module:
    with torch.device(device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


# Parameter counts as the safetensors index of each published model gives them (tied weights once).
@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-72b", 72_706_203_648),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_sizes_are_the_published_ones(name: str, num_parameters: int) -> None:
    model = build(shape_config(name), "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "head_dim", "context", "theta", "tied"),
    [
        ("qwen2.5-0.5b", 14, 2, 64, 32_768, 1e6, True),
        ("qwen2.5-7b", 28, 4, 128, 32_768, 1e6, False),
        ("qwen2.5-72b", 64, 8, 128, 32_768, 1e6, False),
        ("llama-3.1-8b", 32, 8, 128, 131_072, 5e5, False),
    ],
)
def test_layout_is_the_published_one(
    name: str, heads: int, kv_heads: int, head_dim: int, context: int, theta: float, tied: bool
) -> None:
    config = shape_config(name)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert config.hidden_size // config.num_attention_heads == head_dim
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (context, tied)
    assert config.rope_parameters["rope_theta"] == theta
    assert config.dtype == torch.bfloat16


def test_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LoadError, match=r"'huge'.*tiny, qwen2\.5-0\.5b"):
        shape_config("huge")
    assert all(shape_config(name).vocab_size >= MIN_VOCAB_SIZE for name in SHAPES)


def test_weights_depend_on_the_seed_and_the_name_only() -> None:
    first, second, other = (build(shape_config("tiny"), "cpu") for _ in range(3))
    for model, seed in ((first, 3), (second, 3), (other, 4)):
        torch.manual_seed(seed * 100 + id(model) % 100)  # the process's own generator plays no part
        randomise_weights(model, seed)
    same, different = (
        [torch.equal(a, b) for a, b in zip(first.parameters(), model.parameters(), strict=True)]
        for model in (second, other)
    )
    assert all(same)
    assert not all(different)


@given(st.text())
def test_every_text_survives_the_way_to_ids_and_back(text: str) -> None:
    ids = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.backend_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, 512, 2048, 128_256, 152_064])
def test_every_id_has_a_piece_of_its_own(vocab_size: int) -> None:
    tokenizer = synthetic_tokenizer(vocab_size)
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))
    assert len(tokenizer) == vocab_size
    assert tokenizer.eos_token_id is not None
    words = [tokenizer.decode([token_id]) for token_id in range(MIN_VOCAB_SIZE, vocab_size, 997)]
    assert len(set(words)) == len(words)
    assert all(word.isprintable() and word.startswith(" ") for word in words)
    assert [tokenizer.decode([256 + index]) for index in range(3)] == list(SPECIAL_TOKENS)


def test_a_made_up_word_is_its_own_id() -> None:
    text = TOKENIZER.decode([300, 1000, 2047])
    assert TOKENIZER.encode(text) == [300, 1000, 2047]


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 259"):
        synthetic_tokenizer(258)
