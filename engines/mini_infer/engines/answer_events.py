"""What one answer tells: its tokens counted and stamped, its deltas and its one end. Knows no tokenizer, no thread."""

from __future__ import annotations

from mini_infer.engines.api import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    PreparedRequest,
    StreamTimes,
    TokenLogprob,
    Usage,
)
from mini_infer.engines.errors import MiniInferError


class AnswerEvents:
    """Keeps the books of one answer and words its events; whoever makes the text says when."""

    def __init__(self, request: PreparedRequest) -> None:
        self.admitted_ns: int | None = None
        """When the engine took the stream; the engine's to set."""
        self.num_cached_prompt_tokens = 0
        """Prompt tokens that the engine did not have to compute; the engine's to set."""
        self.num_tokens = 0
        self._request = request
        self._every_token = request.output.every_token
        self._has_told = False  # a delta
        # since the delta before
        self._new_ids: list[int] = []
        self._new_logprobs: list[TokenLogprob] = []
        # of the whole answer
        self._first_token_ns: int | None = None
        self._first_text_ns: int | None = None
        self._last_token_ns: int | None = None
        self._max_gap_ns = 0

    def count(self, token_id: int, logprob: TokenLogprob | None, at_ns: int) -> FinishReason | None:
        """Takes a token, and says why the answer ends with it; None where it goes on, as far as ids tell."""
        self.num_tokens += 1
        if self._last_token_ns is None:
            self._first_token_ns = at_ns
        elif at_ns - self._last_token_ns > self._max_gap_ns:
            self._max_gap_ns = at_ns - self._last_token_ns
        self._last_token_ns = at_ns
        self._new_ids.append(token_id)
        if logprob is not None:
            self._new_logprobs.append(logprob)
        return self._request.end_reason(token_id, self.num_tokens)

    @property
    def times(self) -> StreamTimes:
        """The stamps so far."""
        return StreamTimes(
            admitted_ns=self.admitted_ns,
            first_token_ns=self._first_token_ns,
            first_text_ns=self._first_text_ns,
            last_token_ns=self._last_token_ns,
            max_gap_ns=self._max_gap_ns,
            num_tokens=self.num_tokens,
        )

    def delta(self, text: str, at_ns: int) -> Delta | None:
        """All since the delta before, with text that is out at ``at_ns``; None where that is not worth one."""
        if not text and not (self._every_token and self._new_ids):
            return None
        if text and self._first_text_ns is None:
            self._first_text_ns = at_ns
        first_token_ns = None if self._has_told else self._first_token_ns
        self._has_told = True
        new_ids, new_logprobs = tuple(self._new_ids), tuple(self._new_logprobs)
        self._new_ids.clear()
        self._new_logprobs.clear()
        newest_ns = self._last_token_ns or at_ns  # text before any token is an echoed prompt's
        return Delta(self._request.key, text, new_ids, self.num_tokens, newest_ns, new_logprobs, first_token_ns)

    def end(self, outcome: FinishReason | MiniInferError, matched: int | str | None = None) -> Finished | Failed:
        """The last event."""
        if isinstance(outcome, MiniInferError):
            return Failed(self._request.key, outcome, self.times)
        usage = Usage(len(self._request.prompt_ids), self.num_tokens, self.num_cached_prompt_tokens)
        return Finished(self._request.key, outcome, usage, self.times, matched, self._request.sampling.seed)
