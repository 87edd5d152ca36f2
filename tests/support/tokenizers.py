"""The tokenizer zoo: small real tokenizers, built offline in milliseconds. Knows no model.

byte_level          BYTE: id == byte value, no merges, so an emoji is 4 tokens. 256 <|endoftext|> (eos),
                    257 <|im_start|>, 258 <|im_end|>. No BOS, no pad.
byte_level_bpe      the same alphabet with merges trained on TEXTS, as GPT-2, Llama 3 and Qwen have.
sentencepiece_like  SP: metaspace, byte fallback, a decoder that strips one leading space, BOS, as Llama 2 and Mistral
                    have. 0 <unk>, 1 <s> (bos), 2 </s> (eos), 3..258 <0x00>..<0xFF>.
big_token           BIGTOK: BYTE whose token BIG_TOKEN_ID is BIG_TOKEN_TEXT, about 2 KB.
word_level          words joined by spaces, no decoder. 0 <unk>, 1 </s> (eos).
slow_byte_level     BYTE without a Rust backend, as some remote-code models have.
slow_sentencepiece  SP without a Rust backend.

All take ``chat_template``; CHAT_TEMPLATE is a ChatML one that fits BYTE, byte_level_bpe and BIGTOK.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BIG_TOKEN_ID = 259
BIG_TOKEN_TEXT = "All work and no play makes a long token. " * 50
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = (
    "Dear Sam, I hope.\n    indented\n\n\tdef f(x):\n        return x  # done , right ? yes .",
    "The quick brown fox jumps over the lazy dog; it isn't 3.14 or 2,718!",
    "大語言模型逐字輸出、不留空格。你好、世界。",
    "こんにちは世界、すべてのひらがながながれる。",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "안녕하세요 세계, 한글도 흐릅니다.",
    "Ünïcödé: naïve café, Grüße, Привет, γειά, שלום, مرحبا",
)


def byte_level(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    return _byte_level({}, [], chat_template)


def byte_level_bpe(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    scratch = Tokenizer(models.BPE())
    scratch.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    scratch.train_from_iterator(
        TEXTS * 2, trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    )
    merges = [tuple(merge) for merge in _model_state(scratch)["merges"]]
    learned = {left + right: 259 + rank for rank, (left, right) in enumerate(dict.fromkeys(merges))}
    return _byte_level(learned, merges, chat_template)


def big_token(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    letters = _byte_letters()
    token = "".join(letters[byte] for byte in BIG_TOKEN_TEXT.encode())
    return _byte_level({token: BIG_TOKEN_ID}, [], chat_template)


def sentencepiece_like(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    vocab, merges = _sentencepiece_vocab()
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=chat_template,
    )


def word_level(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    words = ["<unk>", "</s>", *dict.fromkeys(" ".join(TEXTS).split())]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", chat_template=chat_template
    )


def slow_byte_level(chat_template: str | None = None) -> PreTrainedTokenizer:
    return SlowByteLevel(eos_token=MARKERS[0], additional_special_tokens=MARKERS[1:], chat_template=chat_template)


def slow_sentencepiece(chat_template: str | None = None) -> PreTrainedTokenizer:
    return SlowSentencePiece(unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=chat_template)


ZOO: dict[str, Callable[..., PreTrainedTokenizerBase]] = {
    build.__name__: build
    for build in (
        byte_level,
        byte_level_bpe,
        big_token,
        sentencepiece_like,
        word_level,
        slow_byte_level,
        slow_sentencepiece,
    )
}


class SlowByteLevel(PreTrainedTokenizer):
    """Ids 0..255 are bytes; a byte's token is the letter with that code point."""

    vocab_size = 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(range(256)[index])  # IndexError for an id it does not know, as such tokenizers have

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        pieces = (token.encode("latin-1" if len(token) == 1 else "utf-8") for token in tokens)
        return b"".join(pieces).decode("utf-8", errors="replace")


class SlowSentencePiece(PreTrainedTokenizer):
    """The vocabulary of `sentencepiece_like`, letter by letter, decoded as sentencepiece itself does."""

    def __init__(self, **kwargs: Any) -> None:
        self._ids, _ = _sentencepiece_vocab()
        self._tokens = list(self._ids)
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._ids | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [
            piece
            for letter in "▁" + text.replace(" ", "▁")
            for piece in ([letter] if letter in self._ids else [f"<0x{byte:02X}>" for byte in letter.encode()])
        ]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        pieces = (
            bytes.fromhex(token[3:5])
            if len(token) == 6 and token.startswith("<0x")
            else token.replace("▁", " ").encode()
            for token in tokens
        )
        return b"".join(pieces).decode("utf-8", errors="replace").removeprefix(" ")


def _byte_level(
    learned: dict[str, int], merges: list[tuple[str, str]], chat_template: str | None
) -> PreTrainedTokenizerFast:
    vocab = {letter: byte for byte, letter in _byte_letters().items()}
    vocab |= {marker: 256 + index for index, marker in enumerate(MARKERS)} | learned
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=MARKERS[0], chat_template=chat_template)


def _byte_letters() -> dict[int, str]:
    """GPT-2's table (openai/gpt-2, encoder.py): printable bytes stand for themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


def _sentencepiece_vocab() -> tuple[dict[str, int], list[tuple[str, str]]]:
    scratch = Tokenizer(models.BPE())
    scratch.pre_tokenizer = pre_tokenizers.Metaspace()
    lines = [
        line for text in TEXTS for line in text.replace("\t", "").split("\n")
    ]  # both are byte tokens, as in Llama 2
    scratch.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=240, show_progress=False))
    state = _model_state(scratch)
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = first + sorted(state["vocab"], key=state["vocab"].__getitem__)
    return {token: index for index, token in enumerate(tokens)}, [tuple(merge) for merge in state["merges"]]


def _model_state(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["model"]
