"""When a refused stream should try again, from how fast others leave the queue. Knows only instants."""

from __future__ import annotations

from collections import deque

_WINDOW = 32  # newest departures that count
_FIRST_GUESS_S = 1.0  # before any departure was seen
_SHORTEST_S, _LONGEST_S = 0.1, 60.0


class Pace:
    """The rate at which streams leave a queue while somebody waits in it; times when nobody waits tell nothing."""

    def __init__(self) -> None:
        self._instants_ns: deque[int] = deque(maxlen=_WINDOW + 1)  # when the queue began to fill, then departures
        self._num_refused = 0  # since the newest departure

    def begin(self, now_ns: int) -> None:
        """A stream has entered the empty queue."""
        self._instants_ns.clear()
        self._instants_ns.append(now_ns)

    def left(self, now_ns: int) -> None:
        """A stream has left the queue."""
        self._instants_ns.append(now_ns)
        self._num_refused = 0

    def retry_after_s(self, now_ns: int) -> float:
        """Seconds, 0.1 to 60, until a place is likely for one more refused stream.

        Each refused stream is sent to stand behind those refused before it, so that they do not all come back
        at the same moment.
        """
        self._num_refused += 1
        return min(max(self._gap_s(now_ns) * self._num_refused, _SHORTEST_S), _LONGEST_S)

    def _gap_s(self, now_ns: int) -> float:
        """Mean span between two departures, the one that is being waited for included."""
        if not self._instants_ns:
            return _FIRST_GUESS_S
        span_s = (now_ns - self._instants_ns[0]) / 1e9
        num_left = len(self._instants_ns) - 1
        return span_s / num_left if num_left else max(span_s, _FIRST_GUESS_S)
