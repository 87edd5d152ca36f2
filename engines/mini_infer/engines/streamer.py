"""One stream's way from token ids to text and its one final event. Knows no model and no engine.

Per token: decode, look for what ends the stream, stamp, hand out. The one who generates asks `finished` and stops.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerBase, TextIteratorStreamer

from mini_infer.engines.answer_events import AnswerEvents
from mini_infer.engines.api import (
    FinishReason,
    OutputOptions,
    PreparedRequest,
    Sampling,
    StopConditions,
    StreamEvent,
    TokenLogprob,
)
from mini_infer.engines.batch import Choice
from mini_infer.engines.errors import MiniInferError, StreamFailed
from mini_infer.engines.stop_strings import StopMatcher
from mini_infer.engines.text_decoder import TextDecoder


class TokenStreamer(TextIteratorStreamer):
    """A `TextIteratorStreamer` whose cost per token stays flat, whose text is exact, and which can end in an error.

    Ids come in by `put` (from ``model.generate``: the prompt first) or by `push`. Text goes out to one reader: whoever
    iterates, in any thread, or ``sink``, which gets `Delta` events and exactly one `Finished` or `Failed`.

    Alone it is a drop-in for `TextIteratorStreamer`. With a ``request`` it also ends the stream by the request's own
    conditions, and leaves the prompt out; ``skip_special_tokens`` is then the request's. Safe from any thread;
    ``sink`` is called under the stream's lock and must neither block nor raise.

    Args:
        tokenizer: decodes the ids.
        skip_prompt: whether the first `put` is left out of the text.
        timeout: seconds that a reader waits for more text before it gets `queue.Empty`; ``None`` waits on.
        skip_special_tokens: whether special tokens stay out of the text.
        clean_up_tokenization_spaces: accepted so that callers may say False; text that is out cannot be cleaned.
        request: what to answer; needed for a sink.
        sink: takes events as they happen, instead of a reader.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_prompt: bool = False,
        timeout: float | None = None,
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
        request: PreparedRequest | None = None,
        sink: Callable[[StreamEvent], None] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if clean_up_tokenization_spaces:
            raise ValueError("clean_up_tokenization_spaces would change text that was streamed already")
        if sink is not None and request is None:
            raise ValueError("a sink needs a request: events carry its key")
        self._is_alone = request is None
        request = request or _no_request(skip_special_tokens)
        stop, output = request.stop, request.output
        super().__init__(
            tokenizer, skip_prompt or not self._is_alone, timeout, skip_special_tokens=output.skip_special_tokens
        )
        # Text, and at the end None or an error. A put costs a tenth of what it does in the base's Queue.
        self.text_queue: SimpleQueue[str | MiniInferError | None] = SimpleQueue()  # type: ignore[assignment]
        self.answer = AnswerEvents(request)
        """Stamps and counts so far."""
        self.finished = False
        """Whether no more ids are wanted."""
        self._stop, self._output = stop, output
        self._sink = sink
        self._clock = clock
        self._lock = threading.RLock()
        self._decoder = TextDecoder(tokenizer, skip_special_tokens=output.skip_special_tokens)
        self._matcher = StopMatcher(stop.strings, include=stop.include_stop_string) if stop.strings else None
        self._has_first_bytes = False
        self._is_broken = False

    # --- ids in -------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> None:
        """Takes ids from ``model.generate``: a tensor or array of shape [1, n] or [n]; first of all the prompt.

        Raises `ValueError` for more than one row, after failing the stream: one streamer is one stream.
        """
        ids = value.tolist()
        if not isinstance(ids, list):
            ids = [ids]
        if ids and isinstance(ids[0], list):
            if len(ids) > 1:
                message = f"one streamer serves one stream, not a batch of {len(ids)}"
                self.fail(StreamFailed(message))
                raise ValueError(message)
            ids = ids[0]
        if self.next_tokens_are_prompt:
            self.next_tokens_are_prompt = False
            if not self.skip_prompt:
                self._echo(ids)
            return
        for token_id in ids:
            self.push(token_id)

    def push(self, token_id: int, logprob: TokenLogprob | None = None, *, at_ns: int | None = None) -> None:
        """Takes one generated id, sampled at ``at_ns`` or now. Once the stream is finished, ids are ignored."""
        with self._lock:
            if self.finished:
                return
            try:
                self._push(token_id, logprob, self._clock() if at_ns is None else at_ns)
            except BaseException:  # from a tokenizer; it is not to be asked again when the stream is failed for it
                self._is_broken = True
                raise

    def push_choice(self, choice: Choice, *, at_ns: int | None = None) -> None:
        """Takes one chosen token as `push` does, with its log-probabilities; an error fails the stream."""
        if choice.error is not None:
            self.fail(StreamFailed(choice.error))
        elif choice.logprob is None:
            self.push(choice.token_id, at_ns=at_ns)
        else:
            entry = self._decoder.table.logprob(choice.token_id, choice.logprob, choice.top)
            self.push(choice.token_id, entry, at_ns=at_ns)

    def _push(self, token_id: int, logprob: TokenLogprob | None, at_ns: int) -> None:
        if logprob is not None and not self._has_first_bytes:
            logprob = self._first_logprob(logprob)
        reason = self.answer.count(token_id, logprob, at_ns)
        if reason is FinishReason.EOS or reason is FinishReason.STOP_TOKEN:
            self._close_at_token(token_id, at_ns, reason)
            return
        text = self._decoder.step(token_id)
        if self._matcher is not None:
            text = self._matcher.feed(text, counts=self.answer.num_tokens >= self._stop.min_new_tokens)
            if self._matcher.matched is not None:
                self._close(text, at_ns, FinishReason.STOP_STRING)
                return
        if reason is not None:
            self._close(text, at_ns, reason)
        else:
            self._deliver(text, at_ns)

    def _first_logprob(self, logprob: TokenLogprob) -> TokenLogprob:
        """The first token's bytes as they are in the text: without the space that its decoder strips."""
        table = self._decoder.table
        if table.token(logprob.token_id) is None:
            return logprob
        self._has_first_bytes = True
        first = table.token_bytes(logprob.token_id, first=True)
        return replace(logprob, token=first) if logprob.token == b" " + first else logprob

    def _echo(self, prompt_ids: list[int]) -> None:
        with self._lock:
            text = "" if self.finished else "".join(map(self._decoder.step, prompt_ids))
            if text:
                self.text_queue.put(text)

    # --- the end --------------------------------------------------------------------------------------------------

    def finish(self, reason: FinishReason) -> None:
        """Ends the stream well for a reason from outside, such as CANCELLED. Ignored once it has ended."""
        with self._lock:
            if not self.finished:
                self._close("", self._clock(), reason)

    def fail(self, error: MiniInferError) -> None:
        """Ends the stream badly: hands out text held back, then the error. Ignored once the stream has ended."""
        with self._lock:
            if not self.finished:
                self._close("", self._clock(), error)

    def end(self) -> None:
        """Called by ``model.generate`` when it returns. Ignored once the stream has ended.

        An answer to a request must have ended by then, for one of the reasons there are; if not, it fails.
        """
        with self._lock:
            if not self.finished:
                error = StreamFailed("generation stopped before the answer was complete")
                self._close("", self._clock(), FinishReason.MAX_NEW_TOKENS if self._is_alone else error)

    def _close_at_token(self, token_id: int, now_ns: int, reason: FinishReason) -> None:
        """Ends the stream at an end or stop token, whose text is shown only where that was asked for."""
        is_eos = reason is FinishReason.EOS
        is_shown = not self._output.skip_special_tokens if is_eos else self._stop.include_stop_string
        text = self._rest(self.answer.num_tokens - 1)
        if is_shown and (self._matcher is None or self._matcher.matched is None):
            text += self._decoder.step(token_id) + self._decoder.flush()
        self._close(text, now_ns, reason, matched=token_id)

    def _rest(self, num_tokens: int) -> str:
        """All text that was held back; a stop string in it still counts, from ``min_new_tokens`` on."""
        text = "" if self._is_broken else self._decoder.flush()
        if self._matcher is None:
            return text
        return self._matcher.feed(text, counts=num_tokens >= self._stop.min_new_tokens) + self._matcher.flush()

    def _close(
        self, text: str, now_ns: int, outcome: FinishReason | MiniInferError, *, matched: int | None = None
    ) -> None:
        self.finished = True
        try:
            self._deliver(text + self._rest(self.answer.num_tokens), now_ns)
        finally:  # whatever a tokenizer does, whoever waits hears of the end
            self._hand_out_end(outcome, matched)

    # --- text and events out ----------------------------------------------------------------------------------------

    def _deliver(self, text: str, now_ns: int) -> None:
        delta = self.answer.delta(text, now_ns)
        if delta is None:
            return
        if self._sink is not None:
            self._sink(delta)
        elif text:
            self.text_queue.put(text)

    def _hand_out_end(self, outcome: FinishReason | MiniInferError, matched: int | str | None) -> None:
        if self._matcher is not None and self._matcher.matched and not isinstance(outcome, MiniInferError):
            outcome, matched = FinishReason.STOP_STRING, self._matcher.matched
        if self._sink is not None:
            self._sink(self.answer.end(outcome, matched))
        else:
            self.text_queue.put(outcome if isinstance(outcome, MiniInferError) else None)

    def __next__(self) -> str:
        """The next text. Raises the stream's error, or `queue.Empty` after ``timeout`` seconds without any."""
        if self._sink is not None:
            raise TypeError("this stream's text goes to its sink")
        text = self.text_queue.get(timeout=self.timeout)
        if isinstance(text, str):
            return text
        self.text_queue.put(text)  # for whoever asks once more
        if text is None:
            raise StopIteration
        raise text


def _no_request(skip_special_tokens: bool) -> PreparedRequest:
    """What a streamer answers that stands alone: nothing ends it but its caller."""
    return PreparedRequest(
        key="",
        prompt_ids=(),
        sampling=Sampling(),
        stop=StopConditions(),
        eos_token_ids=frozenset(),
        limit_reason=FinishReason.MAX_NEW_TOKENS,
        output=OutputOptions(skip_special_tokens=skip_special_tokens),
    )
