"""When to try a call again, and how long to wait before. Knows errors and clocks, no channel.

All repeating is done here and none by gRPC's own retry policy, because measured on grpcio 1.85 that one
(1) cannot be told to repeat RESOURCE_EXHAUSTED only on the server's word: it then repeats without pushback too;
(2) waits for a pushback longer than the deadline, and so turns QUEUE_FULL into a bare DEADLINE_EXCEEDED; and
(3) stops at the header, so a second layer was needed anyway, and the two would multiply.

Repeating is safe: no method changes anything on the server but what it is asked to cancel. It happens only where no
token came, so no text is ever delivered twice and no engine does the same work twice to the end.
"""

from __future__ import annotations

import random
import time

from mini_infer.client.errors import (
    DeadlineExceeded,
    MiniInferError,
    Overloaded,
    QueueFull,
    QueueTimeout,
    SlowReader,
    Unavailable,
)

FIRST_BACKOFF_S = 0.1
"""Where the server names no time: this, doubled with each attempt."""

MAX_WAIT_S = 30.0
"""A server that wants us to stay away for longer is obeyed by giving up."""

LONGEST_TIMEOUT_S = 100 * 365 * 24 * 3600.0
"""Beyond it, as with infinity, there is none: gRPC's clock would overflow, and the call be over before it began."""


class Retries:
    """The attempts of one call. ``timeout_s`` spans all of them and the waits between.

    Without ``may_queue`` the caller wants to start at once or be refused, so a queue's refusal is final.
    """

    def __init__(self, max_attempts: int, timeout_s: float | None, *, may_queue: bool = True) -> None:
        self._max_attempts = max_attempts
        self._may_queue = may_queue
        self._num_failed = 0
        self._begin_s = time.monotonic()
        self._deadline_s: float | None = None
        if timeout_s is not None and not timeout_s > LONGEST_TIMEOUT_S:
            self._deadline_s = self._begin_s + timeout_s

    @property
    def num_attempts(self) -> int:
        """With the one that runs."""
        return self._num_failed + 1

    def elapsed_s(self) -> float:
        """Since the first attempt began."""
        return time.monotonic() - self._begin_s

    def remaining_s(self) -> float | None:
        """What is left of the timeout, above 0; None without one. Raises `DeadlineExceeded` where nothing is."""
        left_s = self._left_s()
        if left_s is not None and left_s <= 0:  # gRPC may let a call with no time at all succeed
            raise DeadlineExceeded("no time was left for the call")
        return left_s

    def wait_s(self, error: MiniInferError) -> float:
        """How long to wait before the next attempt. Raises ``error`` itself where there is none."""
        self._num_failed += 1
        error.num_attempts = self._num_failed
        if self._num_failed >= self._max_attempts or not can_retry(error):
            raise error
        if not self._may_queue and isinstance(error, QueueFull | QueueTimeout):
            raise error
        wait_s = error.retry_after_s if error.retry_after_s is not None else self._backoff_s()
        wait_s *= random.uniform(1.0, 1.2)  # noqa: S311  # spreads callers that were refused together
        left_s = self._left_s()
        if wait_s > MAX_WAIT_S or (left_s is not None and wait_s >= left_s):
            raise error
        return wait_s

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()

    def _backoff_s(self) -> float:
        return float(FIRST_BACKOFF_S * 2 ** (self._num_failed - 1))


def can_retry(error: MiniInferError) -> bool:
    """Whether a new attempt may help and cannot hurt. An overloaded server is tried again only where it said when."""
    if error.generated_tokens or (error.retry_after_s is not None and error.retry_after_s < 0):
        return False
    if isinstance(error, Overloaded):
        return error.retry_after_s is not None and not isinstance(error, SlowReader)
    return isinstance(error, Unavailable)
