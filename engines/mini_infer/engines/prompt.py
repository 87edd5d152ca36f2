"""Text to token ids and back with one model's tokenizer. Decides no limits and no defaults, and runs no model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from mini_infer.engines.api import ChatMessage, ModelInfo, PreparedRequest, Request
from mini_infer.engines.chat_template import ChatEncoder
from mini_infer.engines.preparation import check_ids, prepare_request


class PromptPreparer:
    """Text to ids and back for one model: the `TextModel` of every engine that has a tokenizer.

    Safe from any thread. It talks to the Rust tokenizer directly: calls through Hugging Face's Python class set its
    padding and truncation each time, which fails with "Already borrowed" where another thread is encoding. It is asked
    for batches of one: only those let other threads run meanwhile, and a mebibyte of text takes a second.
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
        return prepare_request(request, self.tokenize, self._info)

    def tokenize(self, text: str | tuple[ChatMessage, ...]) -> tuple[int, ...]:
        """Ids of a text or a conversation, as `prepare` would make them. Raises `InvalidRequest`."""
        return self._encode(text) if isinstance(text, str) else self._chat.encode(text)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Raises `InvalidRequest` for ids outside the vocabulary.

        Ids that the model has and the tokenizer does not (padded vocabularies) have no text.
        """
        check_ids("token_ids", token_ids, self._info)
        if self._backend is not None:
            return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
        with self._lock:
            text = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text; control tokens written in it are control tokens."""
        if self._backend is not None:
            return tuple(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        with self._lock:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
