"""The tokenizer that a GGUF file describes, rebuilt exactly or refused. Reads no weights.

A GGUF file holds pieces and merges but only the *name* of how text is split before merging. Guessing that wrong gives
a model that runs and reads badly, so a name that is not in the table here is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mini_infer.engines.errors import LoadError

_ADVICE = "put the model's own tokenizer.json and tokenizer_config.json beside it"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types, as in gguf.TokenType
# How each name splits, from the tokenizer.json of a model that llama.cpp's converter gives that name to.
_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_REGEX = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Builds the tokenizer of a GGUF file. Raises `LoadError` where it cannot be the same as the source's."""
    fields = _read_fields(path)
    kind, split = fields.get("model"), str(fields.get("pre"))
    if kind != "gpt2":
        raise LoadError(f"{path} has a tokenizer of type {kind!r}, which cannot be rebuilt exactly: {_ADVICE}")
    tokens: list[str] = fields["tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("merges", [])]
    types = fields["token_type"]
    # Unused ids fill a vocabulary up to a round number; the source's tokenizer does not know them.
    vocab = {token: token_id for token_id, token in enumerate(tokens) if types[token_id] != _UNUSED}
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=_REGEX.get(split) == _LLAMA3_SPLIT))
    backend.pre_tokenizer = _pre_tokenizer(path, split)
    if _REGEX.get(split) == _QWEN2_SPLIT:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for special, kind_of_token in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, kind in zip(tokens, types, strict=True) if kind == kind_of_token]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    if fields.get("add_bos_token") and "bos_token_id" in fields:
        bos = tokens[fields["bos_token_id"]]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, fields["bos_token_id"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{
            f"{name}_token": tokens[fields[f"{key}_token_id"]]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if f"{key}_token_id" in fields
        },
    )


def check_same_vocabulary(path: Path, tokenizer: Any) -> None:
    """Raises `LoadError` where a tokenizer from beside a GGUF file gives a piece another id than the file does."""
    vocab = tokenizer.get_vocab()
    for token_id, token in enumerate(_read_fields(path)["tokens"]):
        if vocab.get(token, token_id) != token_id:
            raise LoadError(
                f"the tokenizer beside {path} is another model's: {token!r} has id {vocab[token]}, not {token_id}"
            )


def _pre_tokenizer(path: Path, split: str) -> pre_tokenizers.PreTokenizer:
    if split == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split in _DIGITS:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if split in _REGEX:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_REGEX[split]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise LoadError(f"{path} splits text in the way called {split!r}, which is not known here: {_ADVICE}")


def _read_fields(path: Path) -> dict[str, Any]:
    """What the file says under "tokenizer.": names without that prefix and without "ggml."."""
    try:
        from gguf import GGUFReader  # here, because it is needed for nothing else
    except ImportError as error:
        raise LoadError(f"reading {path} needs the package gguf: install it with `pip install gguf`") from error
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader raises what numpy and struct raise on bytes that make no sense
        raise LoadError(f"{path} is damaged or no GGUF file: {error}") from error
    fields = {
        key.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("tokenizer.")
    }
    if not {"model", "tokens", "token_type"} <= fields.keys():
        raise LoadError(f"{path} holds no tokenizer")
    return fields
