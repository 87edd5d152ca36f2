"""Token ids in, one at a time; whole characters out. Knows neither stops nor streams.

Why not tokenizers' own DecodeStream: after valid bytes it raises "Invalid prefix" where a byte-fallback run turns out
invalid, and it decodes all it holds at every step, so a run of invalid bytes costs quadratic time.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from mini_infer.engines.token_bytes import TokenTable

MAX_HELD_RUN_BYTES = 24
"""A longer byte-fallback run is not held back to its end. The family emoji, of 7 code points, has 25 bytes."""

MAX_HELD_TOKENS = 64
"""Without a scheme: text that is not whole after so many tokens goes out as it is."""

REPLACEMENT = "\ufffd"


class _Text(Protocol):
    def step(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextDecoder:
    """Decodes one stream. Text of all steps and of `flush` joined == ``tokenizer.decode(all ids)``, spaces untouched.

    ``step(token_id) -> str`` takes the next id and gives the text that is certain now, often "". Unknown ids
    add nothing. ``flush() -> str`` gives the rest, once. The one exception to equality: in a byte-fallback run of more
    than `MAX_HELD_RUN_BYTES` of whole characters that ends in a broken one, the tokenizer's decode turns the whole run
    into U+FFFD; here the whole characters stay.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> None:
        self.table = TokenTable(tokenizer, skip_special_tokens=skip_special_tokens)
        text: _Text
        if self.table.scheme is None:
            text = _WindowText(self.table)
        elif self.table.scheme.byte_level:
            text = _ByteLevelText(self.table)
        else:
            text = _SentencePieceText(self.table, self.table.scheme.strip_left)
        self.step = text.step
        self.flush = text.flush


class _Pieces(dict[int, str | bytes | None]):
    """`TokenTable.piece`, remembered."""

    def __init__(self, table: TokenTable) -> None:
        self._piece = table.piece

    def __missing__(self, token_id: int) -> str | bytes | None:
        piece = self[token_id] = self._piece(token_id)
        return piece


class _ByteLevelText:
    """All tokens are bytes of one long UTF-8 text; what is broken is replaced as the WHATWG Encoding Standard says."""

    def __init__(self, table: TokenTable) -> None:
        self._pieces = _Pieces(table)
        self._held = b""

    def step(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not piece:
            return ""
        piece = self._held + piece  # type: ignore[operator]  # always bytes here
        text, num_used = utf_8_decode(piece, "replace", False)
        self._held = piece[num_used:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class _SentencePieceText:
    """Text, broken by runs of byte tokens. One broken character makes each byte of its whole run a U+FFFD."""

    def __init__(self, table: TokenTable, strip_left: int) -> None:
        self._pieces = _Pieces(table)
        self._strip_left = strip_left
        self._begin_text()

    def _begin_text(self) -> None:
        self._in_run = False
        self._is_broken = False
        self._held = b""  # bytes of the run
        self._max_held = MAX_HELD_RUN_BYTES

    def _end_run(self) -> str:
        """The held rest of the run: all whole, or all replaced."""
        held = self._held
        self._begin_text()
        try:
            return held.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(held)

    def step(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            piece = self._step_run(piece)
        elif self._in_run:
            piece = self._end_run() + piece
        return self._strip(piece) if self._strip_left else piece

    def _step_run(self, byte: bytes) -> str:
        if self._is_broken:
            return REPLACEMENT
        self._in_run = True
        self._held += byte
        try:
            text, num_used = utf_8_decode(self._held, "strict", False)
        except UnicodeDecodeError:
            num_broken, self._held, self._is_broken = len(self._held), b"", True
            return REPLACEMENT * num_broken
        if num_used <= self._max_held:
            return ""
        self._held, self._max_held = self._held[num_used:], 0  # trusted from here on
        return text

    def flush(self) -> str:
        text = self._end_run()
        return self._strip(text) if self._strip_left else text

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
                break
            text, self._strip_left = text[1:], self._strip_left - 1
        return text


class _WindowText:
    """Text of any tokenizer: decodes the last few ids with and without the new one, and takes the difference.

    The window begins with the ids of the text before, as context, so that decoders which treat the first token
    differently see none. (The prefix and read offsets of vLLM's and TGI's detokenizers.)
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._ids: list[int] = []
        self._num_read = 0  # ids of the window whose text is out
        self._prefix = ""  # their text

    def step(self, token_id: int) -> str:
        if self._table.token(token_id) is None:
            return ""
        self._ids.append(token_id)
        text = self._table.decode(self._ids)
        is_whole = len(text) > len(self._prefix) and not text.endswith(REPLACEMENT)
        return self._take(text) if is_whole or len(self._ids) - self._num_read >= MAX_HELD_TOKENS else ""

    def _take(self, text: str) -> str:
        new_text = text[len(self._prefix) :]
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        self._prefix = self._table.decode(self._ids)
        return new_text

    def flush(self) -> str:
        return self._take(self._table.decode(self._ids))
