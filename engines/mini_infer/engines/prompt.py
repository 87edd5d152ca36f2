"""Requests to token ids, checked against one model and with every default filled in. Runs no model."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from mini_infer.engines.api import (
    ChatMessage,
    FinishReason,
    ModelInfo,
    PreparedRequest,
    Request,
    Sampling,
    StopConditions,
)
from mini_infer.engines.chat_template import ChatEncoder
from mini_infer.engines.errors import InvalidRequest
from mini_infer.engines.generation_defaults import overlay

DEFAULT_MAX_NEW_TOKENS = 512


class PromptPreparer:
    """Text to ids and back for one model: the `TextModel` of every engine that has a tokenizer.

    Safe from any thread. It talks to the Rust tokenizer directly: calls through Hugging Face's Python class set its
    padding and truncation each time, which fails with "Already borrowed" where another thread is encoding.
    """

    def __init__(self, *, tokenizer: PreTrainedTokenizerBase, info: ModelInfo) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._chat = ChatEncoder(tokenizer, partial(self._encode, add_special_tokens=False))
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = threading.Lock()  # for tokenizers without a Rust form
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = tokenizer.split_special_tokens

    @property
    def info(self) -> ModelInfo:
        """What callers may know of the model."""
        return self._info

    def prepare(self, request: Request) -> PreparedRequest:
        """Tokenizes and checks a request. Raises `InvalidRequest`, or `StreamFailed` where a template breaks."""
        self._check_ids("stop.token_ids", request.stop.token_ids)
        self._check_ids("sampling.logit_bias", request.sampling.logit_bias)
        field, prompt_ids = self._prompt_ids(request)
        context_left = self._info.context_length - len(prompt_ids)
        if context_left < 1:
            raise InvalidRequest(
                field,
                f"the prompt has {len(prompt_ids)} tokens, and the context of {self._info.context_length} tokens "
                "must hold it and at least one more",
                "PROMPT_TOO_LONG",
            )
        stop, limit_reason = _fit_stop(request.stop, context_left)
        return PreparedRequest(
            key=request.key,
            prompt_ids=prompt_ids,
            sampling=_with_seed(overlay(request.sampling, self._info.default_sampling)),
            stop=stop,
            eos_token_ids=frozenset() if stop.ignore_eos else frozenset(self._info.eos_token_ids),
            limit_reason=limit_reason,
            output=request.output,
            deadline_ns=request.deadline_ns,
        )

    def tokenize(self, text: str | tuple[ChatMessage, ...]) -> tuple[int, ...]:
        """Ids of a text or a conversation, as `prepare` would make them. Raises `InvalidRequest`."""
        return self._encode(text) if isinstance(text, str) else self._chat.encode(text)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Raises `InvalidRequest` for ids outside the vocabulary.

        Ids that the model has and the tokenizer does not (padded vocabularies) have no text.
        """
        self._check_ids("token_ids", token_ids)
        if self._backend is not None:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        with self._lock:
            text = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _prompt_ids(self, request: Request) -> tuple[str, tuple[int, ...]]:
        """The field that the prompt came from, and its ids, all within the vocabulary and at least one."""
        if request.chat is not None:
            field, ids = "chat", self._chat.encode(request.chat)
        elif request.prompt_token_ids is not None:
            field, ids = "prompt_token_ids.ids", request.prompt_token_ids
        else:
            field, ids = "prompt", self._encode(request.prompt or "")
        if not ids:
            raise InvalidRequest(field, "gives no token, and this model's tokenizer adds none of its own")
        self._check_ids(field, ids)
        return field, ids

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text; control tokens written in it are control tokens."""
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        with self._lock:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check_ids(self, field: str, ids: Iterable[int]) -> None:
        size = self._info.vocab_size
        bad = next((token_id for token_id in ids if not 0 <= token_id < size), None)
        if bad is not None:
            raise InvalidRequest(field, f"token id {bad} is outside the model's vocabulary, 0 to {size - 1}")


def _fit_stop(asked: StopConditions, context_left: int) -> tuple[StopConditions, FinishReason]:
    """Stop conditions with a limit that the context can hold, and what running into that limit means."""
    wanted = DEFAULT_MAX_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    if asked.min_new_tokens > wanted:
        raise InvalidRequest(
            "stop.min_new_tokens", f"must be at most max_new_tokens, {wanted}, not {asked.min_new_tokens}"
        )
    limit = min(wanted, context_left)
    stop = replace(asked, max_new_tokens=limit, min_new_tokens=min(asked.min_new_tokens, limit))
    return stop, FinishReason.CONTEXT_LENGTH if limit < wanted else FinishReason.MAX_NEW_TOKENS


def _with_seed(sampling: Sampling) -> Sampling:
    """A seed for sampling, drawn where none was given; none for greedy decoding, which needs none."""
    if not sampling.temperature:
        return replace(sampling, seed=None)
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(63))
