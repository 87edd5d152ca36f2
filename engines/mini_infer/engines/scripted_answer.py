"""One scripted answer in the making: from forced tokens to deltas and one end. Knows no thread."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable
from dataclasses import replace

from mini_infer.engines.api import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    PreparedRequest,
    Started,
    StreamEvent,
    StreamTimes,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from mini_infer.engines.errors import MiniInferError
from mini_infer.engines.scripted_text import END_ID, ScriptedText
from mini_infer.engines.stop_strings import StopMatcher

_UNLIKELY = -100.0


class Answer:
    """Turns the tokens of one stream into its events. Forced tokens have probability 1, so logprob 0."""

    def __init__(
        self, request: PreparedRequest, text: ScriptedText, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.request = request
        self.num_tokens = 0
        self.ended = False
        self._text, self._now_ns = text, now_ns
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        stop = request.stop
        self._stops = StopMatcher(stop.strings, include=stop.include_stop_string) if stop.strings else None
        self._ids: list[int] = []  # since the delta before
        self._sent_delta = False
        self._times = StreamTimes(admitted_ns=now_ns())

    def started(self) -> Started:
        """The stream's first event."""
        return Started(self.request.key, self._times.admitted_ns or 0)

    def push(self, piece: str | bytes) -> list[StreamEvent]:
        """Takes the next token. The last of the events is `Finished` where this token ends the answer."""
        token_id = self._text.token_id(piece)
        self._stamp()
        self._ids.append(token_id)
        matched: int | str | None
        reason, matched = self._end_of(token_id)
        text, stop_string = self._release(self._visible(token_id, reason), final=reason is not None)
        if stop_string is not None:
            reason, matched = FinishReason.STOP_STRING, stop_string
        events = self._delta(text)
        return [*events, self._finished(reason, matched)] if reason else events

    def finish(self, reason: FinishReason) -> list[StreamEvent]:
        """Ends the answer from outside, with the text that was held back."""
        return [*self._rest(), self._finished(reason, None)]

    def fail(self, error: MiniInferError) -> list[StreamEvent]:
        """Ends the answer badly, with the text that was held back."""
        self.ended = True
        return [*self._rest(), Failed(self.request.key, error, self._times)]

    def _rest(self) -> list[StreamEvent]:
        text, _ = self._release(b"", final=True)
        return self._delta(text) if text else []

    def _stamp(self) -> None:
        now_ns, times = self._now_ns(), self._times
        gap_ns = now_ns - times.last_token_ns if times.last_token_ns is not None else 0
        self.num_tokens += 1
        self._times = replace(
            times,
            first_token_ns=times.first_token_ns if times.first_token_ns is not None else now_ns,
            last_token_ns=now_ns,
            max_gap_ns=max(times.max_gap_ns, gap_ns),
            num_tokens=self.num_tokens,
        )

    def _end_of(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        stop = self.request.stop
        if self.num_tokens >= stop.min_new_tokens:
            if token_id in self.request.eos_token_ids:
                return FinishReason.EOS, token_id
            if token_id in stop.token_ids:
                return FinishReason.STOP_TOKEN, token_id
        return (self.request.limit_reason if self.num_tokens == stop.max_new_tokens else None), None

    def _visible(self, token_id: int, reason: FinishReason | None) -> bytes:
        hidden = token_id == END_ID and self.request.output.skip_special_tokens
        cut = reason is FinishReason.STOP_TOKEN and not self.request.stop.include_stop_string
        return b"" if hidden or cut else self._text.token(token_id)

    def _release(self, piece: bytes, *, final: bool) -> tuple[str, str | None]:
        """Text that can go out now, and the stop string that was found."""
        text = self._utf8.decode(piece, final)
        if self._stops is None:
            return text, None
        text = self._stops.feed(text, counts=self.num_tokens >= self.request.stop.min_new_tokens)
        if final and self._stops.matched is None:
            text += self._stops.flush()
        return text, self._stops.matched

    def _delta(self, text: str) -> list[StreamEvent]:
        if not text and not (self.request.output.every_token and self._ids):
            return []
        times = self._times
        if text and times.first_text_ns is None:
            self._times = replace(times, first_text_ns=self._now_ns())
        ids, self._ids = tuple(self._ids), []
        first_ns = None if self._sent_delta else times.first_token_ns
        self._sent_delta = True
        logprobs = tuple(self._logprob(token_id) for token_id in ids) if self.request.output.logprobs else ()
        return [Delta(self.request.key, text, ids, self.num_tokens, times.last_token_ns or 0, logprobs, first_ns)]

    def _logprob(self, token_id: int) -> TokenLogprob:
        others = (i for i in range(self.request.output.top_logprobs + 1) if i != token_id)
        top = [TopLogprob(token_id, self._text.token(token_id), 0.0)]
        top += [TopLogprob(i, self._text.token(i), _UNLIKELY) for i in others]
        num_top = self.request.output.top_logprobs
        return TokenLogprob(token_id, self._text.token(token_id), 0.0, tuple(top[:num_top]))

    def _finished(self, reason: FinishReason, matched: int | str | None) -> Finished:
        self.ended = True
        usage = Usage(len(self.request.prompt_ids), self.num_tokens)
        return Finished(self.request.key, reason, usage, self._times, matched, self.request.sampling.seed)
