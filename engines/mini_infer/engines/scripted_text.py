"""The text half of the scripted engine: a codec whose ids are bytes, one end token and whole words. No tokenizer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence

from mini_infer.engines.api import ChatMessage, ModelInfo, PreparedRequest, Request, Sampling
from mini_infer.engines.errors import InvalidRequest
from mini_infer.engines.preparation import BUILT_IN_SAMPLING, check_ids, prepare_request

END = "<|end|>"
"""The text of the end token, the only special token."""

END_ID = 256
_WORD = re.compile(r"\s*\S+|\s+")


class ScriptedText:
    """An `api.TextModel` without a model.

    Ids 0 to 255 are single bytes, 256 is `END`; every word, or with ``unit="character"`` every character, gets the
    next id the first time it is seen. Engines of one model share one object, so that their ids agree.
    ``prepare_s`` is how long `prepare` takes.
    """

    def __init__(
        self,
        *,
        context_length: int = 4096,
        vocab_size: int = 1 << 20,
        unit: str = "word",
        has_chat_template: bool = True,
        default_sampling: Sampling = BUILT_IN_SAMPLING,
        prepare_s: float = 0.0,
    ) -> None:
        self._unit, self._prepare_s = unit, prepare_s
        self._lock = threading.Lock()
        self._tokens: list[bytes] = [*(bytes([value]) for value in range(END_ID)), END.encode()]
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens)}
        self._info = ModelInfo(
            source="scripted",
            context_length=context_length,
            vocab_size=vocab_size,
            dtype="none",
            eos_token_ids=(END_ID,),
            has_chat_template=has_chat_template,
            default_sampling=default_sampling,
        )

    @property
    def info(self) -> ModelInfo:
        """What callers may know of it."""
        return self._info

    def prepare(self, request: Request) -> PreparedRequest:
        """Tokenizes and checks a request. Raises `InvalidRequest`."""
        time.sleep(self._prepare_s)
        return prepare_request(request, self.tokenize, self._info)

    def tokenize(self, text: str | tuple[ChatMessage, ...]) -> tuple[int, ...]:
        """Ids of a text or a conversation. Raises `InvalidRequest`."""
        if not isinstance(text, str):
            if not self._info.has_chat_template:
                raise InvalidRequest("chat", "the model has no chat template", reason="NO_CHAT_TEMPLATE")
            text = "".join(f"{message.role}: {message.content}\n" for message in text) + "assistant:"
        pieces = list(text) if self._unit == "character" else _WORD.findall(text)
        return tuple(self.token_id(piece) for piece in pieces)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Raises `InvalidRequest` for ids outside the vocabulary."""
        check_ids("token_ids", token_ids, self._info)
        kept = (i for i in token_ids if not (skip_special_tokens and i == END_ID))
        return b"".join(self.token(i) for i in kept).decode("utf-8", "replace")

    def token_id(self, piece: str | bytes) -> int:
        """The id of one token; a new one for a token not seen before."""
        token = piece.encode("utf-8", "replace") if isinstance(piece, str) else piece
        with self._lock:
            if token not in self._ids:
                self._ids[token] = len(self._tokens)
                self._tokens.append(token)
            return self._ids[token]

    def token(self, token_id: int) -> bytes:
        """The bytes of one token; an id that nothing has yet reads as its number."""
        return self._tokens[token_id] if token_id < len(self._tokens) else f"<{token_id}>".encode()
