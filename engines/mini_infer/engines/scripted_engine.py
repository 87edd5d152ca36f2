"""An engine without a model: forced text, delays and faults, for tests of servers and clients. Loads no torch.

The default script echoes the prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mini_infer.engines.api import EngineKind, FinishReason, PreparedRequest, StreamEvent
from mini_infer.engines.errors import MiniInferError, StreamFailed
from mini_infer.engines.owner import OwnedEngine
from mini_infer.engines.scripted_answer import Answer
from mini_infer.engines.scripted_text import END, ScriptedText


class Gate:
    """Lets tokens through one by one, or all. A stream held by it keeps its slot; its engine goes on with the rest."""

    def __init__(self, num_allowed: int = 0) -> None:
        self._lock = threading.Lock()
        self._num_allowed: float = num_allowed
        self._watchers: list[Callable[[], None]] = []

    def allow(self, num_tokens: int = 1) -> None:
        """Lets so many more tokens through."""
        self._add(num_tokens)

    def open(self) -> None:
        """Lets all tokens through from now on."""
        self._add(float("inf"))

    @property
    def is_open(self) -> bool:
        """Whether a token could pass now."""
        return self._num_allowed >= 1

    def take(self) -> bool:
        """Passes one token through; False where none may pass."""
        with self._lock:
            passes = self.is_open
            self._num_allowed -= passes
            return passes

    def watch(self, wake: Callable[[], None]) -> None:
        """Has ``wake`` called whenever tokens are let through."""
        with self._lock:
            self._watchers.append(wake)

    def _add(self, num_tokens: float) -> None:
        with self._lock:
            self._num_allowed += num_tokens
            watchers = tuple(self._watchers)
        for wake in watchers:
            wake()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What one stream does. A token may be any bytes, half a character too; after the last comes `END`, for ever.

    ``fail_at`` and ``hang_at`` count tokens from 1: the fault comes in place of that token. An ``error`` that is a
    `StreamFailed` ends this stream alone, any other exception the engine. A hang ends only when the engine closes.
    """

    tokens: Sequence[str | bytes] = ()
    repeat: bool = False  # begin again after the last token
    prefill_s: float = 0.0  # before the first token; holds up the whole engine, as a prefill does
    step_s: float = 0.0  # before every token
    gate: Gate | None = None
    fail_at: int | None = None
    error: BaseException | None = None  # None is a `StreamFailed`
    hang_at: int | None = None

    def token(self, index: int) -> str | bytes:
        """The token at an index that counts from 0."""
        if self.repeat and self.tokens:
            return self.tokens[index % len(self.tokens)]
        return self.tokens[index] if index < len(self.tokens) else END


Scripts = Script | Mapping[str, Script] | Callable[[PreparedRequest], Script]
"""One script for all streams, one by prompt text, or one made for each request."""


class ScriptedEngine(OwnedEngine):
    """Plays scripts through the real owner thread: up to ``max_running`` streams get one token each in every step.

    ``load_gate`` holds the load until it is set; ``load_error`` ends it. ``num_steps``, ``num_prefills`` and
    ``peak_running`` count what was done.
    """

    def __init__(
        self,
        engine_id: str = "scripted/0",
        scripts: Scripts | None = None,
        *,
        text: ScriptedText | None = None,
        max_running: int = 1,
        kind: EngineKind = EngineKind.SCRIPTED,
        devices: tuple[str, ...] = ("cpu",),
        load_s: float = 0.0,
        load_gate: threading.Event | None = None,
        load_error: Exception | None = None,
    ) -> None:
        super().__init__(engine_id, kind, devices, max_running)
        self.num_steps = self.num_prefills = self.peak_running = 0
        self._scripted_text = text or ScriptedText()
        self._scripts: Scripts = scripts if scripts is not None else self._echo
        self._load_s, self._load_gate, self._load_error = load_s, load_gate, load_error
        self._streams: dict[str, _Stream] = {}

    def close(self) -> None:
        """Ends what it still holds and joins its thread; a load that waits for its gate goes on."""
        if self._load_gate is not None:
            self._load_gate.set()
        super().close()

    def _load(self) -> ScriptedText:
        self._closing.wait(self._load_s)
        if self._load_gate is not None:
            self._load_gate.wait()
        if self._load_error is not None:
            raise self._load_error
        return self._scripted_text

    def _warm_up(self) -> None:
        self._scripted_text.tokenize("Hello")

    def _step(self) -> None:
        self._admit(self._inbox.take())
        ready = [stream for stream in self._streams.values() if stream.is_ready]
        self._closing.wait(max((stream.script.step_s for stream in ready), default=0.0))
        interrupted = self._interrupt()
        moving = [stream for stream in ready if stream not in interrupted and stream.pass_gate()]
        self.num_steps += bool(moving)
        for stream in moving:
            self._advance(stream)
        self._end_step(len(moving))

    def _next_step_ns(self) -> int | None:
        if any(stream.is_ready or stream.key in self._inbox.cancelled for stream in self._streams.values()):
            return 0
        deadlines = (stream.answer.request.deadline_ns for stream in self._streams.values())
        return min((at_ns for at_ns in deadlines if at_ns is not None), default=None)

    def _abandon(self, error: MiniInferError) -> None:
        for stream in list(self._streams.values()):
            self._leave(stream, stream.answer.fail(error))

    def _admit(self, requests: Sequence[PreparedRequest]) -> None:
        admitted = [_Stream(Answer(request, self._scripted_text), self._script_for(request)) for request in requests]
        for stream in admitted:
            self._streams[stream.key] = stream
            if stream.script.gate is not None:
                stream.script.gate.watch(self._inbox.wake)
            self._post(stream.answer.started())
        self._flush()
        self.num_prefills += len(admitted)
        self.peak_running = max(self.peak_running, len(self._streams))
        self._closing.wait(sum(stream.script.prefill_s for stream in admitted))

    def _interrupt(self) -> list[_Stream]:
        interrupted = []
        for stream in list(self._streams.values()):
            why = self._interruption(stream.answer.request)
            if why is not None:
                answer = stream.answer
                self._leave(stream, answer.finish(why) if isinstance(why, FinishReason) else answer.fail(why))
                interrupted.append(stream)
        return interrupted

    def _advance(self, stream: _Stream) -> None:
        number = stream.answer.num_tokens + 1
        if number == stream.script.hang_at:
            self._closing.wait()
        elif number == stream.script.fail_at:
            error = stream.script.error or StreamFailed("the script says so")
            if not isinstance(error, StreamFailed):
                raise error
            self._leave(stream, stream.answer.fail(error))
        else:
            events = stream.answer.push(stream.script.token(number - 1))
            if stream.answer.ended:
                self._leave(stream, events)
            else:
                self._post(*events)

    def _leave(self, stream: _Stream, events: Sequence[StreamEvent]) -> None:
        del self._streams[stream.key]
        self._post(*events)

    def _script_for(self, request: PreparedRequest) -> Script:
        if isinstance(self._scripts, Script):
            return self._scripts
        if isinstance(self._scripts, Mapping):
            return self._scripts[self._scripted_text.detokenize(request.prompt_ids)]
        return self._scripts(request)

    def _echo(self, request: PreparedRequest) -> Script:
        return Script(tokens=[self._scripted_text.token(token_id) for token_id in request.prompt_ids])


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """A stream that holds a slot."""

    answer: Answer
    script: Script

    @property
    def key(self) -> str:
        return self.answer.request.key

    @property
    def is_ready(self) -> bool:
        return self.script.gate is None or self.script.gate.is_open

    def pass_gate(self) -> bool:
        """Whether it makes its next token now: of several at one gate, only as many as it lets through."""
        return self.script.gate is None or self.script.gate.take()
