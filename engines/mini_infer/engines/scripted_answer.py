"""One scripted answer in the making: from forced tokens to deltas and one end. Knows no thread."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable

from mini_infer.engines.answer_events import AnswerEvents
from mini_infer.engines.api import (
    FinishReason,
    PreparedRequest,
    Started,
    StreamEvent,
    TokenLogprob,
    TopLogprob,
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
        self.ended = False
        self._text, self._now_ns = text, now_ns
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        stop = request.stop
        self._stops = StopMatcher(stop.strings, include=stop.include_stop_string) if stop.strings else None
        self._admitted_ns = now_ns()
        self._events = AnswerEvents(request)
        self._events.admitted_ns = self._admitted_ns

    @property
    def num_tokens(self) -> int:
        """How many there are so far."""
        return self._events.num_tokens

    def started(self) -> Started:
        """The stream's first event."""
        return Started(self.request.key, self._admitted_ns)

    def push(self, piece: str | bytes) -> list[StreamEvent]:
        """Takes the next token. The last of the events is `Finished` where this token ends the answer."""
        now_ns, token_id = self._now_ns(), self._text.token_id(piece)
        logprob = self._logprob(token_id) if self.request.output.logprobs else None
        reason = self._events.count(token_id, logprob, now_ns)
        matched: int | str | None = token_id if reason in (FinishReason.EOS, FinishReason.STOP_TOKEN) else None
        text, stop_string = self._release(self._visible(token_id, reason), final=reason is not None)
        if stop_string is not None:
            reason, matched = FinishReason.STOP_STRING, stop_string
        events = self._delta(text, now_ns)
        return [*events, self._end(reason, matched)] if reason else events

    def finish(self, reason: FinishReason) -> list[StreamEvent]:
        """Ends the answer from outside, with the text that was held back."""
        return [*self._rest(), self._end(reason)]

    def fail(self, error: MiniInferError) -> list[StreamEvent]:
        """Ends the answer badly, with the text that was held back."""
        return [*self._rest(), self._end(error)]

    def _rest(self) -> list[StreamEvent]:
        text, _ = self._release(b"", final=True)
        return self._delta(text, self._now_ns())

    def _delta(self, text: str, now_ns: int) -> list[StreamEvent]:
        delta = self._events.delta(text, now_ns)
        return [] if delta is None else [delta]

    def _end(self, outcome: FinishReason | MiniInferError, matched: int | str | None = None) -> StreamEvent:
        self.ended = True
        return self._events.end(outcome, matched)

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

    def _logprob(self, token_id: int) -> TokenLogprob:
        others = (i for i in range(self.request.output.top_logprobs + 1) if i != token_id)
        top = [TopLogprob(token_id, self._text.token(token_id), 0.0)]
        top += [TopLogprob(i, self._text.token(i), _UNLIKELY) for i in others]
        num_top = self.request.output.top_logprobs
        return TokenLogprob(token_id, self._text.token(token_id), 0.0, tuple(top[:num_top]))
