"""GGUF files: the same ids and logits as the model that they were made from, or a refusal."""

from __future__ import annotations

import json
import os
import random
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from support.models import rand
from support.tokenizers import CHAT_TEMPLATE, TEXTS, byte_level_bpe, sentencepiece_like
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from mini_infer.engines.api import ChatMessage
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.errors import LoadError
from mini_infer.engines.model import LoadedModel, load_model
from mini_infer.engines.shapes import randomise_weights

VOCAB_SIZE = 640
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def rotate(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp keeps the two halves of each rotary head interleaved (its convert_hf_to_gguf.py, `permute`)."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@cache
def model(rounded: bool = False) -> PreTrainedModel:
    """The source; ``rounded``: with weights in float16 and back, as the file has them."""
    config = rand()
    config.vocab_size = VOCAB_SIZE
    built: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    randomise_weights(built)
    for parameter in built.parameters() if rounded else ():
        parameter.data = parameter.data.half().float()
    return built.eval()


def write_gguf(
    path: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    architecture: str = "llama",
    split: str | None = "gpt-2",
    kind: str = "gpt2",
    bos_token_id: int | None = None,
) -> Path:
    config = model().config
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, tokenizer, config.vocab_size, split, kind, bos_token_id)
    add_weights(writer, model())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(
    writer: GGUFWriter,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    split: str | None,
    kind: str,
    bos_token_id: int | None,
) -> None:
    by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids) | {
        token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    writer.add_tokenizer_model(kind)
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list([by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)])
    writer.add_token_types(
        [
            TokenType.CONTROL if token_id in special else TokenType.NORMAL if token_id in by_id else TokenType.UNUSED
            for token_id in range(vocab_size)
        ]
    )
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    if merges:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if bos_token_id is not None:
        writer.add_bos_token_id(bos_token_id)
        writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_weights(writer: GGUFWriter, model: PreTrainedModel) -> None:
    for name, tensor in model.state_dict().items():
        if "q_proj" in name:
            tensor = rotate(tensor, model.config.num_attention_heads)
        if "k_proj" in name:
            tensor = rotate(tensor, model.config.num_key_value_heads)
        is_vector = tensor.dim() == 1
        writer.add_tensor(
            gguf_name(name),
            tensor.numpy() if is_vector else tensor.numpy().astype(np.float16),
            raw_dtype=GGMLQuantizationType.F32 if is_vector else GGMLQuantizationType.F16,
        )


def load(path: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(path)))


def many_texts() -> list[str]:
    """200 strings: whole ones, and slices and mixtures of them."""
    draw = random.Random(0)
    texts = [
        *TEXTS,
        "",
        " ",
        "  x",
        "\n\n",
        "2024-01-02 1234567",
        "<|im_end|>",
        "👋🏽👨‍👩‍👧",
        "it's we're I'LL",
        "\t\tx\r\n",
    ]
    pool = "\n".join(texts)
    while len(texts) < 200:
        start = draw.randrange(len(pool))
        texts.append(pool[start : start + draw.randrange(1, 60)])
    return texts


# How real models with each name split text, written as their tokenizer.json has it.
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def source_of(split: str) -> PreTrainedTokenizerFast:
    source = byte_level_bpe(CHAT_TEMPLATE)
    backend = source.backend_tokenizer
    if split == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if split in ("llama-bpe", "qwen2"):
        pattern = Regex(LLAMA3 if split == "llama-bpe" else QWEN2)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), BYTES])
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    return source


@pytest.mark.floor
@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_same_ids_and_logits_as_the_source(split: str, tmp_path: Path) -> None:
    source = source_of(split)
    loaded = load(write_gguf(tmp_path / "rand.gguf", source, split=split))
    texts = many_texts()
    assert len(texts) == 200
    for text in texts:
        assert loaded.text.tokenize(text) == tuple(source.backend_tokenizer.encode(text).ids), text
    assert set(loaded.text.info.eos_token_ids) == {source.eos_token_id}
    assert (loaded.text.info.context_length, loaded.text.info.vocab_size) == (128, VOCAB_SIZE)
    ids = torch.tensor([loaded.text.tokenize((ChatMessage("user", "Hello"),))])
    with torch.no_grad():
        difference = (loaded.model(ids).logits - model(rounded=True)(ids).logits).abs().max()
    assert difference < 1e-4
    assert loaded.text.detokenize([VOCAB_SIZE - 1, *loaded.text.tokenize("x")]) == "x"


def test_begin_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    loaded = load(write_gguf(tmp_path / "rand.gguf", source_of("gpt-2"), bos_token_id=257))
    assert loaded.tokenizer.bos_token_id == 257
    assert loaded.text.tokenize("A") == (257, *source_of("gpt-2").encode("A"))
    assert loaded.text.tokenize("") == (257,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"architecture": "made-up"}, "made-up"),
        ({"split": "made-up"}, "splits text in the way called 'made-up'"),
        ({"split": None}, "splits text in the way called 'None'"),
        ({"kind": "llama"}, "has a tokenizer of type 'llama', which cannot be rebuilt exactly"),
    ],
)
def test_what_cannot_be_the_same_is_refused(options: dict[str, str], expected: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "rand.gguf", source_of("gpt-2"), **options)  # type: ignore[arg-type]
    with pytest.raises(LoadError) as caught:
        load(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_sources_own_tokenizer_beside_the_file_is_used(tmp_path: Path) -> None:
    source = source_of("gpt-2")
    source.save_pretrained(tmp_path)
    loaded = load(write_gguf(tmp_path / "rand.gguf", source, split="made-up"))
    assert loaded.text.tokenize(TEXTS[0]) == tuple(source.encode(TEXTS[0]))


def test_another_models_tokenizer_beside_the_file_is_refused(tmp_path: Path) -> None:
    sentencepiece_like().save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="is another model's"):
        load(write_gguf(tmp_path / "rand.gguf", source_of("gpt-2")))


@pytest.mark.parametrize("keep", [0, 3, 2000, -1024])
def test_damaged_files_are_refused_by_name(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "rand.gguf", source_of("gpt-2"))
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with pytest.raises(LoadError, match=r"rand\.gguf") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_the_package_that_reads_them_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "rand.gguf", source_of("gpt-2"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(LoadError, match="gguf"):
        load(path)
