"""When a refused stream should try again, from how fast others left the queue. Knows only instants."""

from __future__ import annotations

from collections import deque

_WINDOW = 32  # newest departures that count
_FIRST_GUESS_S = 1.0  # before any departure was seen
_SHORTEST_S, _LONGEST_S = 0.1, 60.0


class Pace:
    """The rate at which streams leave a queue."""

    def __init__(self, now_ns: int) -> None:
        self._left_ns: deque[int] = deque([now_ns], maxlen=_WINDOW + 1)
        self._num_refused = 0  # since the newest departure

    def left(self, now_ns: int) -> None:
        """A stream has left the queue."""
        self._left_ns.append(now_ns)
        self._num_refused = 0

    def retry_after_s(self, now_ns: int) -> float:
        """Seconds, 0.1 to 60, until a place is likely for one more refused stream.

        Each refused stream is sent to stand behind those refused before it, so that they do not all come back
        at the same moment.
        """
        self._num_refused += 1
        num_left = len(self._left_ns) - 1
        gap_s = (now_ns - self._left_ns[0]) / 1e9 / num_left if num_left else _FIRST_GUESS_S
        return min(max(gap_s * self._num_refused, _SHORTEST_S), _LONGEST_S)
