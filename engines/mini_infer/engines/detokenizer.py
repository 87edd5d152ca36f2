"""The one thread that turns the tokens of an engine's streams into text and events. Knows no model and no step.

Threading. Public methods enqueue and return; the owner thread calls them, in the order of what happened, after it has
emitted a stream's `Started`. What is queued is worked off in tasks of an executor of one thread: a task starts when
there is work and ends when there is none, so that a process whose owner forgot `close` can exit. Streamers belong to
that thread; `emit`, `on_ended` and `on_broken` are called from it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from transformers import PreTrainedTokenizerBase

from mini_infer.engines.api import Emit, Event, Failed, FinishReason, PreparedRequest, StreamEvent, StreamTimes
from mini_infer.engines.batch import Choice
from mini_infer.engines.errors import MiniInferError, StreamFailed, one_line
from mini_infer.engines.streamer import TokenStreamer

_log = logging.getLogger(__name__)


class Detokenizer:
    """Gives every stream its deltas and its one end, all that waits in one ``emit`` per round.

    Args:
        name: of the engine; goes into the thread's name and the log.
        tokenizer: of all streams. What it raises ends the stream that asked, with `StreamFailed`.
        emit: takes the events of a round. Once it has raised, ``error`` says what, and all later work is dropped.
        on_ended: takes the keys of the streams that ended by themselves in a round, before their ends are emitted: the
            engine has heard of an end by the time that the stream's key and slot are free again.
        on_broken: called once, after ``emit`` has raised.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        emit: Emit,
        on_ended: Callable[[Sequence[str]], None],
        on_broken: Callable[[], None],
    ) -> None:
        self.error: BaseException | None = None
        self._name, self._tokenizer = name, tokenizer
        self._emit, self._on_ended, self._on_broken = emit, on_ended, on_broken
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-text")
        self._changed = threading.Condition()
        self._waiting: list[Callable[[], None]] = []
        self._is_working = self._is_closed = False
        # the thread's own
        self._streamers: dict[str, TokenStreamer] = {}
        self._events: list[Event] = []  # of this round
        self._ended: list[str] = []  # in this round, by themselves

    # --- from the owner thread ------------------------------------------------------------------------------------

    def begin(self, request: PreparedRequest, admitted_ns: int, num_cached_prompt_tokens: int) -> None:
        """Takes a stream, whose `Started` is out."""
        self._enqueue(partial(self._begin, request, admitted_ns, num_cached_prompt_tokens))

    def push(self, tokens: Sequence[tuple[str, Choice]], at_ns: int) -> None:
        """Takes the tokens of one step, all sampled at ``at_ns``; the caller changes ``tokens`` no more.

        A choice with an error ends its stream with `StreamFailed`. Tokens of streams that have ended are ignored.
        """
        self._enqueue(partial(self._push, tokens, at_ns))

    def finish(self, key: str, reason: FinishReason) -> None:
        """Ends a stream well for a reason from outside; ignored once it has ended."""
        self._enqueue(partial(self._end, key, reason))

    def fail(self, key: str, error: MiniInferError) -> None:
        """Ends a stream badly; ignored once it has ended."""
        self._enqueue(partial(self._end, key, error))

    def fail_all(self, error: MiniInferError) -> None:
        """Ends every stream badly."""
        self._enqueue(partial(self._end_all, error))

    def close(self, timeout_s: float) -> bool:
        """Takes no more work, finishes what waits and joins the thread. Idempotent.

        False where that takes longer than ``timeout_s``: the thread is left behind with its work.
        """
        with self._changed:
            self._is_closed = True
            is_drained = self._changed.wait_for(lambda: not self._is_working, timeout_s)
        self._executor.shutdown(wait=is_drained)
        return is_drained

    def _enqueue(self, task: Callable[[], None]) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._waiting.append(task)
            if self._is_working:
                return
            self._is_working = True
        try:
            self._executor.submit(self._work)
        except RuntimeError:  # the process exits and starts no more tasks; its last streams get their text all the same
            self._work()

    # --- on its thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Rounds until nothing waits. The edge: whatever breaks a round is kept, and reported once."""
        try:
            while tasks := self._take():
                self._round(tasks)
        except BaseException as error:  # noqa: BLE001
            self._break(error)

    def _take(self) -> list[Callable[[], None]]:
        with self._changed:
            tasks, self._waiting = self._waiting, []
            if not tasks:
                self._rest()
            return tasks

    def _rest(self) -> None:
        self._is_working = False
        self._changed.notify_all()

    def _round(self, tasks: Sequence[Callable[[], None]]) -> None:
        for task in tasks:
            task()
        events, self._events = self._events, []
        ended, self._ended = self._ended, []
        if ended:
            self._on_ended(ended)
        if events:
            self._emit(events)

    def _break(self, error: BaseException) -> None:
        _log.error("engine %s: its texts reach nobody: %s", self._name, one_line(error), exc_info=error)
        self._streamers.clear()
        with self._changed:
            self.error, self._is_closed = error, True
            self._waiting.clear()
            self._rest()
        self._on_broken()

    def _begin(self, request: PreparedRequest, admitted_ns: int, num_cached_prompt_tokens: int) -> None:
        try:
            streamer = TokenStreamer(self._tokenizer, request=request, sink=self._post)
        except Exception as error:  # noqa: BLE001  # a tokenizer's own code raises anything; it ends one stream
            self._post(Failed(request.key, self._as_failure(request.key, error), StreamTimes(admitted_ns)))
            self._ended.append(request.key)
            return
        streamer.answer.admitted_ns = admitted_ns
        streamer.answer.num_cached_prompt_tokens = num_cached_prompt_tokens
        self._streamers[request.key] = streamer

    def _post(self, event: StreamEvent) -> None:
        self._events.append(event)

    def _push(self, tokens: Sequence[tuple[str, Choice]], at_ns: int) -> None:
        for key, choice in tokens:
            streamer = self._streamers.get(key)
            if streamer is None:
                continue
            try:
                streamer.push_choice(choice, at_ns=at_ns)
            except Exception as error:  # noqa: BLE001  # as above
                self._end(key, self._as_failure(key, error))
            if streamer.finished:
                self._streamers.pop(key, None)
                self._ended.append(key)

    def _end(self, key: str, outcome: FinishReason | MiniInferError) -> None:
        streamer = self._streamers.pop(key, None)
        if streamer is None:
            return
        try:
            if isinstance(outcome, FinishReason):
                streamer.finish(outcome)
            else:
                streamer.fail(outcome)
        except Exception:  # noqa: BLE001  # as above; the end is out all the same
            _log.exception("engine %s: stream %s: text held back was lost", self._name, key)

    def _end_all(self, error: MiniInferError) -> None:
        for key in list(self._streamers):
            self._end(key, error)

    def _as_failure(self, key: str, error: Exception) -> StreamFailed:
        _log.error("engine %s: stream %s: the tokenizer broke", self._name, key, exc_info=error)
        return StreamFailed(f"no text could be made of the answer: {one_line(error)}")
