"""Which streams an engine holds: who waits, who runs, who was cancelled. Knows no thread's work and sends nothing.

Everything is under one short lock, inside which no other is taken. ``held`` is the ledger: it names every accepted
stream that has had no final event. An event passes only for a stream in it, and a final event takes the stream out, so
that no race can give a stream two ends or none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from mini_infer.engines.api import Event, Failed, Finished, FinishReason, PreparedRequest, Started, StateChanged
from mini_infer.engines.errors import MiniInferError

Interruption = FinishReason | MiniInferError
"""What ends a stream from outside: CANCELLED, or the error that it fails with."""


class Inbox:
    """The streams of one engine that runs up to ``max_running`` at once. Shut until `open`, and for good after `shut`.

    Safe from any thread; `rest`, `wait` and `take` are the owner thread's.
    """

    def __init__(self, max_running: int) -> None:
        self.held: set[str] = set()
        self.running: set[str] = set()
        self.cancelled: set[str] = set()
        self._max_running = max_running
        self._waiting: deque[PreparedRequest] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self._is_open = self._is_shut = self._is_worked = False

    def open(self) -> None:
        """Takes streams from now on."""
        with self._changed:
            self._is_open = not self._is_shut

    def shut(self) -> None:
        """Takes no more streams, and wakes the owner."""
        with self._changed:
            self._is_open, self._is_shut = False, True
        self.wake()

    def put(self, request: PreparedRequest) -> bool:
        """Takes a stream; False where it takes none. Raises `ValueError` for a key that is held."""
        with self._changed:
            if request.key in self.held:
                raise ValueError(f"stream {request.key} is already here")
            if not self._is_open:
                return False
            self.held.add(request.key)
            self._waiting.append(request)
        self.wake()
        return True

    def claim(self) -> bool:
        """Whether the caller must set the owner to work: once for every time that it went to rest."""
        with self._changed:
            claimed = bool(self.held) and not self._is_worked
            self._is_worked = self._is_worked or claimed
            return claimed

    def rest(self) -> bool:
        """Whether the owner may rest, since no stream is held; the next one must then set it to work again."""
        with self._changed:
            self._is_worked = bool(self.held)
            return not self._is_worked

    def cancel(self, key: str) -> None:
        """Marks a stream, if it is held."""
        with self._changed:
            if key not in self.held:
                return
            self.cancelled.add(key)
        self.wake()

    def wake(self) -> None:
        """Lets the owner look again."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def wait(self, next_step_ns: Callable[[], int | None]) -> None:
        """Sleeps until a stream can be taken, someone calls `wake`, or an instant comes that matters to a stream.

        ``next_step_ns`` says when running streams want a step: 0 is now, None is not by themselves.
        """
        with self._changed:
            if (until_ns := self._wanted_ns(next_step_ns())) != 0:
                timeout_s = None if until_ns is None else max(0.0, (until_ns - time.monotonic_ns()) / 1e9)
                self._changed.wait_for(lambda: self._woken, timeout_s)
            self._woken = False

    def _wanted_ns(self, step_ns: int | None) -> int | None:
        if self._waiting and len(self.running) < self._max_running:
            return 0
        instants = [step_ns, *(request.deadline_ns for request in self._waiting)]
        return min((at_ns for at_ns in instants if at_ns is not None), default=None)

    def take(self) -> list[PreparedRequest]:
        """The waiting streams, oldest first, for which there are slots.

        A slot is free when its stream's end has passed, from whichever thread. The engine may still hold what is left
        of that stream then; so it takes first, and then clears away what it was told of before those ends passed.
        """
        with self._changed:
            num_free = self._max_running - len(self.running)
            return [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]

    def remove_waiting(
        self, why: Callable[[PreparedRequest], Interruption | None]
    ) -> list[tuple[PreparedRequest, Interruption]]:
        """Takes out the waiting streams for which ``why`` names an interruption, and returns both."""
        with self._changed:
            removed = [(request, found) for request in self._waiting if (found := why(request)) is not None]
            for request, _ in removed:
                self._waiting.remove(request)
        return removed

    def pass_on(self, events: Sequence[Event]) -> list[Event]:
        """Drops events of streams that have ended, and notes who runs and who ends; an end wakes the owner."""
        passed: list[Event] = []
        with self._changed:
            for event in events:
                if isinstance(event, StateChanged):
                    passed.append(event)
                elif event.key in self.held:
                    passed.append(event)
                    self._note(event)
        return passed

    def _note(self, event: Event) -> None:
        if isinstance(event, Started):
            self.running.add(event.key)
        elif isinstance(event, Finished | Failed):
            for keys in (self.held, self.running, self.cancelled):
                keys.discard(event.key)
            self._wake()  # a slot is free, and the owner may rest if it was the last stream

    def owe(self, events: Sequence[Event]) -> None:
        """Takes back final events that nobody heard of: their streams are still owed one. Wakes the owner."""
        with self._changed:
            self.held.update(event.key for event in events if isinstance(event, Finished | Failed))
            self._wake()

    def owed(self) -> list[str]:
        """The keys of all streams that have had no final event; none of them waits any more."""
        with self._changed:
            self._waiting.clear()
            return sorted(self.held)
