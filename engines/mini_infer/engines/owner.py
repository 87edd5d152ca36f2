"""The owner thread: one executor thread holds all state of one engine. Knows no model, no tokenizer and no torch.

Threading. Everything below "on the owner thread" runs on that thread alone, and so do the subclass's methods.
Everyone else speaks to it through the inbox: `submit` adds a stream, `cancel` marks one, `close` ends all. The thread
works in tasks of its executor: one to load, one for every time that there are streams, one to close. In between it
rests in the executor, so that a process whose owner forgot `close` can exit.

Events are handed over once per step, and only those that the inbox's ledger lets pass. A subclass may leave a stream's
events after `Started` to a second thread, which hands them over by `_pass_on`: the ledger decides for both, and no two
hand-overs overlap. Events that nobody takes end the engine, on this thread, whichever of the two found it out.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from mini_infer.engines.api import (
    EngineKind,
    EngineStats,
    Event,
    Failed,
    Finished,
    FinishReason,
    PreparedRequest,
    StreamEvent,
    StreamTimes,
    Usage,
)
from mini_infer.engines.delivery import EmitFailed
from mini_infer.engines.errors import DeadlineExceeded, EngineFailed, MiniInferError, NoReadyEngine
from mini_infer.engines.inbox import Interruption
from mini_infer.engines.life_cycle import LifeCycle


class OwnedEngine(LifeCycle):
    """An `api.Engine` on one owner thread; subclasses say how to load, warm up and step.

    ``_load``, ``_warm_up`` and ``_step`` may raise: a `LoadError` or anything else, and the engine is FAILED.
    """

    def __init__(self, engine_id: str, kind: EngineKind, devices: tuple[str, ...], max_running: int) -> None:
        super().__init__(engine_id, kind, devices, max_running)
        self._generated_tokens = 0
        self._last_step_ns: int | None = None

    # --- what a subclass says, on the owner thread ----------------------------------------------------------------

    @abstractmethod
    def _step(self) -> None:
        """Admits what waits and there is room for, and makes the next token of all that run."""

    def _settle(self) -> None:  # some keep nothing of a stream beyond its end
        """Lets go of what is left of streams that have ended, before it rests."""

    def _next_step_ns(self) -> int | None:
        """When running streams want a step: 0 is now, None is not before the inbox wakes it. Under the lock."""
        return None

    # --- from any thread ------------------------------------------------------------------------------------------

    def submit(self, request: PreparedRequest) -> None:
        """Takes a stream, or emits its `Failed` from the caller's thread. Raises `ValueError` for a key in use."""
        if self._inbox.put(request):
            self._set_to_work()
        else:
            self._delivery.refuse(Failed(request.key, self._refusal(), StreamTimes()))

    def cancel(self, key: str) -> None:
        """Ends a stream within one step; a key that it does not hold is ignored."""
        self._inbox.cancel(key)

    def stats(self) -> EngineStats:
        """Its load now."""
        return EngineStats(
            num_running=len(self._inbox.running),
            generated_tokens=self._generated_tokens,
            last_step_ns=self._last_step_ns,
        )

    def _refusal(self) -> MiniInferError:
        if self._closing.is_set():
            return self._closed()
        if self._error is not None:
            return EngineFailed(f"engine {self._engine_id} has failed: {self._error.message}")
        return NoReadyEngine(f"engine {self._engine_id} is still {self._state.value.replace('_', ' ')}")

    def _set_to_work(self) -> None:
        """Gives the owner its task, where it rests and a stream is held."""
        if self._inbox.claim():
            with suppress(RuntimeError):  # closed since: then `close` gives the stream its end
                self._executor.submit(self._guard, self._work)

    def _pass_on(self, events: Sequence[Event]) -> None:
        """Hands over events at once, from any thread. Raises `EmitFailed`; the owner then ends the engine."""
        try:
            self._delivery.pass_on(events)
        except EmitFailed:
            self._set_to_work()  # it may have gone to rest when the last of these ends had passed
            raise

    # --- on the owner thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Steps until no stream is left."""
        while not self._inbox.rest():
            self._inbox.wait(self._next_step_ns)
            if self._closing.is_set():
                return
            if self._delivery.failure is not None:  # another thread's
                raise self._delivery.failure
            self._sweep()
            self._step()
            self._flush()
        self._settle()

    def _interruption(self, request: PreparedRequest) -> Interruption | None:
        """What ends a stream from outside: CANCELLED, or the error that it fails with."""
        if request.key in self._inbox.cancelled:
            return FinishReason.CANCELLED
        if self._closing.is_set():
            return self._closed()
        if request.deadline_ns is not None and time.monotonic_ns() >= request.deadline_ns:
            return DeadlineExceeded("the deadline passed before the answer was complete")
        return None

    def _sweep(self) -> None:
        """Ends the waiting streams that were cancelled or whose deadline passed."""
        ended = self._inbox.remove_waiting(self._interruption)
        self._post(*(unstarted_end(request, why) for request, why in ended))

    def _end_step(self, num_tokens: int) -> None:
        """Closes a step: counts it, ends waiting streams that must, and hands over what happened."""
        self._generated_tokens += num_tokens
        self._last_step_ns = time.monotonic_ns()
        self._sweep()
        self._flush()

    def _post(self, *events: Event) -> None:
        """Keeps events for the end of the step."""
        self._delivery.post(*events)

    def _flush(self) -> None:
        """Hands over what was posted. Raises `EmitFailed`."""
        self._delivery.flush()


def unstarted_end(request: PreparedRequest, why: Interruption) -> StreamEvent:
    """The end of a stream that never held a slot."""
    if isinstance(why, MiniInferError):
        return Failed(request.key, why, StreamTimes())
    return Finished(request.key, why, Usage(len(request.prompt_ids), 0), StreamTimes(), seed=request.sampling.seed)
