"""What single tokens stand for, before their neighbours make text of them. Knows tokenizers, no stream.

Two schemes cover nearly all causal language models, and both give a token bytes of its own:

* byte-level BPE (GPT-2, Llama 3, Qwen): every letter of a token is a byte, by GPT-2's table;
* sentencepiece-like (Llama 2, Mistral, Gemma): "▁" is a space, ``<0xE4>`` is one byte (byte fallback), and the
  decoder strips spaces from the start of the whole text.

They are read off the tokenizer's own decoder. Any other tokenizer has no scheme here and is asked for text instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mini_infer.engines.api import TokenLogprob, TopLogprob


@dataclass(frozen=True, slots=True)
class Scheme:
    """How tokens turn into text: byte-level, or by replacing, byte fallback, joining and stripping."""

    byte_level: bool
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: int = 0  # spaces taken off the start of the whole text, at most


def scheme_of(tokenizer: PreTrainedTokenizerBase) -> Scheme | None:
    """Reads the scheme off a fast tokenizer's decoder; ``None`` where it is none of the two."""
    decoder = tokenizer.backend_tokenizer.decoder if _decodes_in_rust(tokenizer) else None
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Scheme(byte_level=True)
    return _sentencepiece_scheme(steps)


def _decodes_in_rust(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the backend alone decides the text: some models' classes change it afterwards, in Python."""
    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    return kind._decode is PreTrainedTokenizerFast._decode and kind.decode is PreTrainedTokenizerFast.decode


def _sentencepiece_scheme(steps: list[dict[str, Any]]) -> Scheme | None:
    """Takes Replace*, ByteFallback?, Fuse, Strip?, in this order, as the models' authors all have it."""
    rest = list(steps)
    replace: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replace.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    rest = rest[byte_fallback:]
    if not rest or rest.pop(0)["type"] != "Fuse":
        return None
    strip_left = 0
    if rest and rest[0]["type"] == "Strip" and rest[0]["content"] == " " and rest[0]["stop"] == 0:
        strip_left = rest.pop(0)["start"]
    return None if rest else Scheme(False, tuple(replace), byte_fallback, strip_left)


class TokenTable:
    """Looks up single tokens of one tokenizer. Cheap to make (once per stream is fine), safe from any thread.

    ``skip_special_tokens``: special tokens then stand for nothing, as in the tokenizer's own decode.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.scheme = scheme_of(tokenizer)
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._decodes_in_rust = _decodes_in_rust(tokenizer)
        self._num_tokens = len(tokenizer)
        self._skipped, self._added = self._special_tokens()
        self._byte_of_letter = {letter: byte for byte, letter in enumerate(_byte_letters())}

    def _special_tokens(self) -> tuple[frozenset[str], frozenset[int]]:
        """The texts of tokens to skip, and the ids of all added tokens."""
        if self._backend is None:
            return frozenset(self.tokenizer.all_special_tokens), frozenset(self.tokenizer.added_tokens_decoder)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token.content for token in added.values() if token.special), frozenset(added)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary has it; ``None`` where the id is unknown or skipped."""
        if not 0 <= token_id < 1 << 32:
            return None
        token: str | None = None
        if self._backend is not None:
            token = self._backend.id_to_token(token_id)
        elif token_id < self._num_tokens or token_id in self._added:
            token = str(self.tokenizer.convert_ids_to_tokens(token_id))
        return None if self.skip_special_tokens and token in self._skipped else token

    def piece(self, token_id: int) -> str | bytes | None:
        """What the token stands for: bytes where it may be part of a character, else text; ``None`` for nothing."""
        token = self.token(token_id)
        if token is None or self.scheme is None:
            return token
        if self.scheme.byte_level:
            return self._bytes_of_letters(token)
        for old, new in self.scheme.replace:
            token = token.replace(old, new)
        if self.scheme.byte_fallback and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                return token
        return token

    def _bytes_of_letters(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of_letter[letter] for letter in token])
        except KeyError:  # an added token, kept as it was written
            return token.encode()

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """The token's own bytes; those of an answer's tokens joined are its text as UTF-8.

        ``first``: of the first token that stands for anything, whose leading space a sentencepiece-like decoder
        strips. Without a scheme a token's bytes are the text that it adds, so a lone part of a character is U+FFFD.
        """
        piece = self.piece(token_id)
        if piece is None:
            return b""
        if self.scheme is None:
            return self._added_text(token_id, first).encode()
        own = piece if isinstance(piece, bytes) else piece.encode()
        if first:
            own = own[min(self.scheme.strip_left, len(own) - len(own.lstrip(b" "))) :]
        return own

    def logprob(self, token_id: int, logprob: float, top: Iterable[tuple[int, float]] = ()) -> TokenLogprob:
        """A chosen token's entry; ``top`` has the ids and log-probabilities of its alternatives, best first."""
        rivals = tuple(TopLogprob(rival_id, self.token_bytes(rival_id), value) for rival_id, value in top)
        return TokenLogprob(token_id, self.token_bytes(token_id), logprob, rivals)

    def _added_text(self, token_id: int, first: bool) -> str:
        """The text of one token: alone if it is the first, else what it adds after itself."""
        alone = self.decode([token_id])
        return alone if first else self.decode([token_id, token_id]).removeprefix(alone)

    def decode(self, token_ids: list[int]) -> str:
        """The tokenizer's own full decode, spaces untouched."""
        skip = self.skip_special_tokens
        if self._backend is not None and self._decodes_in_rust:
            return self._backend.decode(token_ids, skip_special_tokens=skip)
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte (openai/gpt-2, encoder.py): printable ones stay, others move to U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
