"""Tokenize and detokenize calls of one model, off the event loop. Knows nothing of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mini_infer.engines.api import ChatMessage, ModelInfo, TextModel
from mini_infer.engines.errors import Draining, QueueFull

MAX_TEXT_CALLS = 64
"""Calls that may wait for the one thread that serves them; each may hold a mebibyte of text."""

_T = TypeVar("_T")


class TextThread:
    """One thread for all text calls, so that a flood of them does not hold up the tokenizing of streams."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mini-infer-text")
        self._num_calls = 0
        self._closed = False

    async def run(self, call: Callable[[], _T]) -> _T:
        """Runs a blocking call there. Raises `QueueFull` or `Draining` before it, or what the call raises."""
        if self._closed:
            raise Draining("the server is stopping")
        if self._num_calls >= MAX_TEXT_CALLS:
            raise QueueFull(f"{self._num_calls} tokenize and detokenize calls wait already")
        self._num_calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        finally:
            self._num_calls -= 1

    def close(self) -> None:
        """Takes no more. Calls under way go on: cancelling them would raise CancelledError at their callers."""
        self._closed = True
        self._thread.shutdown(wait=False)


class ModelText:
    """A model's tokenizer for coroutines."""

    def __init__(self, text: TextModel, thread: TextThread) -> None:
        self._text = text
        self._thread = thread

    @property
    def info(self) -> ModelInfo:
        """What callers may know of the model."""
        return self._text.info

    async def tokenize(self, text: str | tuple[ChatMessage, ...]) -> tuple[int, ...]:
        """As `TextModel.tokenize`. Raises `QueueFull` or `Draining` besides."""
        return await self._thread.run(lambda: self._text.tokenize(text))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """As `TextModel.detokenize`. Raises `QueueFull` or `Draining` besides."""
        return await self._thread.run(lambda: self._text.detokenize(token_ids, skip_special_tokens=skip_special_tokens))
