"""Keeps control tokens that a user typed apart from those that a chat template wrote. Knows no template, no model.

A tokenizer sees one text and turns every "<|im_end|>" in it into the control token, whoever wrote it. Here typed ones
are masked before the template runs and put back after it, and the text goes through a copy of the tokenizer in which
the control tokens are called by unguessable names. Only what the template wrote is translated to those names; so one
pass over the whole text gives exactly the usual ids, but typed markers fall to ordinary pieces.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

_PRIVATE = 0xF0000  # plane 15, private use: no filter of a template changes such characters
_PRIVATE_INDEX = 0x100000  # plane 16, private use: the index of a control token


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Texts that mean more than they say.

    ``written`` are added tokens without the flag "special" that the chat template writes: some models mark the roles
    with such. A model's answer may hold them too ("<think>"), and templates look for them there, so they stay as they
    are in what the assistant said.
    """

    special: tuple[str, ...]
    written: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, template: str) -> ControlTokens:
        """Those of a tokenizer and the source of its template."""
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special and token.content.strip()}
        written = {token.content for token in added if token.content in template and _is_markup(token.content)}
        return cls(tuple(sorted(special)), tuple(sorted(written - special)))

    def pattern(self, role: str) -> re.Pattern[str]:
        """Finds those that a message of this role must not hold as such."""
        return _any_of(self.special if role == "assistant" else self.special + self.written)


class ControlTokenGuard:
    """Masks typed control tokens, and encodes a text in which they were masked. Safe from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: ControlTokens) -> None:
        """Builds the renamed copy. Raises `ValueError` where there can be none that gives the same ids."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("this tokenizer cannot treat it as plain text")
        texts = tokens.special + tokens.written
        self._typed = _any_of(texts)
        self._names = _Names(texts)
        self._masks = _Names(texts)
        self._tokenizer = _renamed(backend, self._names.of)

    def mask(self, text: str, typed: re.Pattern[str]) -> str:
        """A text with what ``typed`` finds in it hidden, to be given to a template."""
        return self._masks.hide(text, typed)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a template's output, in which what was masked is ordinary text."""
        unmasked = self._masks.reveal(self._names.hide(text, self._typed))
        return tuple(self._tokenizer.encode_batch_fast([unmasked], add_special_tokens=False)[0].ids)


class _Names:
    """One unguessable name for each token: a prefix drawn at random, and the token's index."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        prefix = "".join(chr(_PRIVATE + secrets.randbelow(0xFFFE)) for _ in range(8))
        self.of = {token: prefix + chr(_PRIVATE_INDEX + index) for index, token in enumerate(tokens)}
        self._hidden = {name: token for token, name in self.of.items()}
        self._name = re.compile(re.escape(prefix) + ".", re.DOTALL)

    def hide(self, text: str, typed: re.Pattern[str]) -> str:
        return typed.sub(lambda match: self.of[match[0]], text)

    def reveal(self, text: str) -> str:
        return self._name.sub(lambda match: self._hidden[match[0]], text)


def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Finds any of the texts as tokenizers find added tokens: leftmost, then longest."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _is_markup(text: str) -> bool:
    """Whether a text looks like a mark and not like a word or a run of spaces, which are added tokens too."""
    return bool(text.strip()) and not text[0].isalnum() and not text[-1].isalnum()


def _renamed(backend: Tokenizer, names: dict[str, str]) -> Tokenizer:
    """A copy of a tokenizer in which some added tokens have other names and the same ids."""
    state = json.loads(backend.to_str())
    state.update(truncation=None, padding=None, post_processor=None)
    for token in state["added_tokens"]:
        if token["content"] in names:
            # Not normalized: the names are matched on the raw text.
            token.update(content=names[token["content"]], normalized=False)
    _rename_pieces(state["model"], lambda piece: names.get(piece, piece))
    try:
        copy = Tokenizer.from_str(json.dumps(state))
    except Exception as error:  # the Rust library raises this and nothing narrower
        raise ValueError("the tokenizer cannot be copied with other names for its control tokens") from error
    for token, name in names.items():
        if copy.token_to_id(name) != backend.token_to_id(token):
            raise ValueError(f"the tokenizer cannot be copied with another name for {token!r}")
    if copy.get_vocab_size() != backend.get_vocab_size():
        raise ValueError("the tokenizer cannot be copied with other names for its control tokens")
    return copy


def _rename_pieces(model: dict[str, Any], rename: Callable[[str], str]) -> None:
    """Renames pieces of a tokenizer's model, so that no merge and no search makes a control token of plain text."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {rename(piece): token_id for piece, token_id in vocab.items()}
    else:  # Unigram: pairs of piece and score
        model["vocab"] = [[rename(piece), score] for piece, score in vocab]
    if model.get("unk_token"):
        model["unk_token"] = rename(model["unk_token"])
    if "merges" in model:
        pairs = (merge if isinstance(merge, list) else merge.split(" ", 1) for merge in model["merges"])
        model["merges"] = [[left, right] for left, right in pairs if rename(left + right) == left + right]
