"""How events leave an engine: past the inbox's ledger and out, whichever of its threads they come from.

Threading. What passes the ledger is emitted before anything else passes it, under one lock, so that no stream hears
anything after its end. The outbox is the owner thread's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from mini_infer.engines.api import Emit, Event
from mini_infer.engines.errors import one_line
from mini_infer.engines.inbox import Inbox

_log = logging.getLogger(__name__)


class EmitFailed(Exception):
    """Events were not taken. Whoever emits cannot go on: nobody would hear of it."""


class Delivery:
    """Keeps a step's events until `flush`, and hands events over. ``failure`` is the first one that was not taken."""

    def __init__(self, engine_id: str, inbox: Inbox) -> None:
        self.failure: EmitFailed | None = None
        self._engine_id, self._inbox = engine_id, inbox
        self._emit: Emit = _nowhere
        self._outbox: list[Event] = []
        self._turn = threading.Lock()

    def open(self, emit: Emit) -> None:
        """Says where events go."""
        self._emit = emit

    def post(self, *events: Event) -> None:
        """Keeps events for the next `flush`."""
        self._outbox.extend(events)

    def flush(self) -> None:
        """Hands over what was kept. Raises `EmitFailed`."""
        self.pass_on(self._empty())

    def flush_last(self) -> None:
        """As `flush`, for one who ends all the same where nobody takes the events."""
        self.pass_last(self._empty())

    def _empty(self) -> list[Event]:
        events, self._outbox = self._outbox, []
        return events

    def pass_on(self, events: Sequence[Event]) -> None:
        """Hands over what the ledger lets pass, from any thread. Raises `EmitFailed`, and its ends are owed again."""
        if not events:
            return  # without waiting for a turn
        with self._turn:
            passed = self._inbox.pass_on(events)
            try:
                if passed:
                    self._emit(passed)
            except BaseException as error:
                self.failure = self.failure or EmitFailed(one_line(error, named=True))
                self._inbox.owe(passed)
                raise self.failure from error

    def pass_last(self, events: Sequence[Event]) -> None:
        """As `pass_on`, for one who ends all the same where nobody takes the events."""
        try:
            self.pass_on(events)
        except EmitFailed:
            self._log_loss()

    def refuse(self, event: Event) -> None:
        """Hands over the end of a stream that was never in the ledger. Takes no turn: the caller may be in an emit."""
        try:
            self._emit([event])
        except Exception:  # noqa: BLE001  # the edge: it is logged
            self._log_loss()

    def _log_loss(self) -> None:
        _log.exception("engine %s: nobody took its last events", self._engine_id)


def _nowhere(events: Sequence[Event]) -> None:
    """Where events go before `open`: there are none."""
