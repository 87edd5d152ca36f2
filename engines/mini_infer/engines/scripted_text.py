"""The text half of the scripted engine: a codec whose ids are bytes, one end token and whole words. No tokenizer."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import fields, replace

from mini_infer.engines.api import ChatMessage, FinishReason, ModelInfo, PreparedRequest, Request, Sampling
from mini_infer.engines.errors import InvalidRequest

END = "<|end|>"
"""The text of the end token, the only special token."""

END_ID = 256
DEFAULT_MAX_NEW_TOKENS = 512
GREEDY = Sampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
)
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
        default_sampling: Sampling = GREEDY,
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
        field, ids = self._prompt(request)
        num_left = self._info.context_length - len(ids)
        if num_left < 1:
            limit = self._info.context_length - 1
            raise InvalidRequest(field, f"has {len(ids)} tokens; at most {limit} fit", reason="PROMPT_TOO_LONG")
        asked = request.stop.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        self._check(request, asked)
        return PreparedRequest(
            key=request.key,
            prompt_ids=ids,
            sampling=self._sampling(request.sampling),
            stop=replace(request.stop, max_new_tokens=min(asked, num_left)),
            eos_token_ids=frozenset() if request.stop.ignore_eos else frozenset(self._info.eos_token_ids),
            limit_reason=FinishReason.CONTEXT_LENGTH if asked > num_left else FinishReason.MAX_NEW_TOKENS,
            output=request.output,
            deadline_ns=request.deadline_ns,
        )

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
        self._check_ids("token_ids", token_ids)
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

    def _prompt(self, request: Request) -> tuple[str, tuple[int, ...]]:
        if request.prompt_token_ids is not None:
            self._check_ids("prompt_token_ids.ids", request.prompt_token_ids)
            field, ids = "prompt_token_ids.ids", request.prompt_token_ids
        elif request.chat is not None:
            field, ids = "chat", self.tokenize(request.chat)
        else:
            field, ids = "prompt", self.tokenize(request.prompt or "")
        if not ids:
            raise InvalidRequest(field, "must hold at least one token")
        return field, ids

    def _check(self, request: Request, max_new_tokens: int) -> None:
        self._check_ids("stop.token_ids", request.stop.token_ids)
        self._check_ids("sampling.logit_bias", tuple(request.sampling.logit_bias))
        if request.stop.min_new_tokens > max_new_tokens:
            raise InvalidRequest("stop.min_new_tokens", f"must be at most max_new_tokens, {max_new_tokens}")

    def _check_ids(self, field: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._info.vocab_size:
                raise InvalidRequest(field, f"must be from 0 to {self._info.vocab_size - 1}, not {token_id}")

    def _sampling(self, asked: Sampling) -> Sampling:
        said = {f.name: v for f in fields(Sampling) if (v := getattr(asked, f.name)) not in (None, {})}
        sampling = replace(self._info.default_sampling, **said)
        if not sampling.temperature:
            return replace(sampling, seed=None)
        return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(64))
