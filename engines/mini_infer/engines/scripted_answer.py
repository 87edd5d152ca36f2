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
        self._held = ""  # decoded, but perhaps the beginning of a stop string
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
        self._held += self._utf8.decode(self._visible(token_id, reason), final=reason is not None)
        text, stop_string = self._release(final=reason is not None)
        if stop_string is not None:
            reason, matched = FinishReason.STOP_STRING, stop_string
        events = self._delta(text)
        return [*events, self._finished(reason, matched)] if reason else events

    def finish(self, reason: FinishReason) -> list[StreamEvent]:
        """Ends the answer from outside, with the text that was held back."""
        self._held += self._utf8.decode(b"", final=True)
        text, self._held = self._held, ""
        return [*(self._delta(text) if text else []), self._finished(reason, None)]

    def fail(self, error: MiniInferError) -> list[StreamEvent]:
        """Ends the answer badly, with the text that was held back."""
        text, self._held = self._held, ""
        self.ended = True
        return [*(self._delta(text) if text else []), Failed(self.request.key, error, self._times)]

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
        if self.num_tokens > stop.min_new_tokens:
            if token_id in self.request.eos_token_ids:
                return FinishReason.EOS, token_id
            if token_id in stop.token_ids:
                return FinishReason.STOP_TOKEN, token_id
        return (self.request.limit_reason if self.num_tokens == stop.max_new_tokens else None), None

    def _visible(self, token_id: int, reason: FinishReason | None) -> bytes:
        hidden = token_id == END_ID and self.request.output.skip_special_tokens
        cut = reason is FinishReason.STOP_TOKEN and not self.request.stop.include_stop_string
        return b"" if hidden or cut else self._text.token(token_id)

    def _release(self, *, final: bool) -> tuple[str, str | None]:
        """Text that can go out now, and the stop string that was found."""
        stop = self.request.stop
        strings = stop.strings if self.num_tokens > stop.min_new_tokens else ()
        hits = [(at, string) for string in strings if (at := self._held.find(string)) >= 0]
        if hits:
            at, string = min(hits, key=lambda hit: hit[0])
            text = self._held[: at + len(string) if stop.include_stop_string else at]
            self._held = ""
            return text, string
        num_kept = 0 if final else max((_overlap(self._held, string) for string in strings), default=0)
        cut = len(self._held) - num_kept
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

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


def _overlap(text: str, string: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
