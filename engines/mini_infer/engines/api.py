"""The words that all rooms share: requests, events, timing and the `Engine` protocol. Standard library only.

Every class here is a frozen dataclass of plain values, so that it can be pickled to another process.
Instants are integers, nanoseconds of `time.monotonic_ns()`, so that sums of spans are exact; names end in ``_ns``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from mini_infer.engines.errors import MiniInferError


class EngineKind(StrEnum):
    """What makes the tokens."""

    GENERATE = "generate"
    REPLICA = "replica"
    PIPELINE = "pipeline"
    SCRIPTED = "scripted"


class EngineState(StrEnum):
    """What an engine is doing."""

    LOADING = "loading"
    WARMING_UP = "warming_up"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why an answer ended. Errors are exceptions, never reasons."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"
    MAX_NEW_TOKENS = "max_new_tokens"
    CONTEXT_LENGTH = "context_length"
    CANCELLED = "cancelled"


# --- what is asked ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. ``None`` means: not said, use the next default in line."""

    temperature: float | None = None  # 0..100; 0 is greedy
    top_p: float | None = None  # (0, 1]
    top_k: int | None = None  # 0 is off
    min_p: float | None = None  # 0..1
    repetition_penalty: float | None = None  # (0, 100]; counts prompt and answer
    presence_penalty: float | None = None  # -2..2; counts the answer only
    frequency_penalty: float | None = None  # -2..2; counts the answer only
    seed: int | None = None  # unsigned 64 bits
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> -100..100

    @property
    def is_greedy(self) -> bool:
        """Whether only the most probable token can be chosen. Where several tie, that is the one with the lowest id."""
        return not self.temperature or self.top_k == 1 or (self.min_p or 0.0) >= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """When to stop."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What to hand back besides text."""

    token_ids: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special_tokens: bool = True

    @property
    def every_token(self) -> bool:
        """Whether each token is worth a delta, even one that completes no text."""
        return self.token_ids or self.logprobs


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a caller asks for. Exactly one of ``prompt``, ``prompt_token_ids`` and ``chat`` is set."""

    key: str  # unique in the server's life; the only key of a stream
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    chat: tuple[ChatMessage, ...] | None = None
    sampling: Sampling = Sampling()
    stop: StopConditions = StopConditions()
    output: OutputOptions = OutputOptions()
    deadline_ns: int | None = None  # monotonic; the engine stops the stream there


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request after tokenizing and checking against its model; every default is filled in."""

    key: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling  # no field is None but seed, which is None for greedy decoding only
    stop: StopConditions  # max_new_tokens is set
    eos_token_ids: frozenset[int]  # empty under ignore_eos
    limit_reason: FinishReason  # MAX_NEW_TOKENS or CONTEXT_LENGTH: what running into max_new_tokens means
    output: OutputOptions
    deadline_ns: int | None = None

    def end_reason(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Why the answer ends with ``token_id``, its token number ``num_tokens``; None where it goes on.

        Stop strings are not looked at: only the text shows them.
        """
        if num_tokens >= self.stop.min_new_tokens:
            if token_id in self.eos_token_ids:
                return FinishReason.EOS
            if token_id in self.stop.token_ids:
                return FinishReason.STOP_TOKEN
        return self.limit_reason if num_tokens == self.stop.max_new_tokens else None


# --- what happens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative: its id, its own bytes, the natural logarithm of its probability."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A chosen token with its log-probability before any sampling setting, and its alternatives, best first."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """An engine's stamps of one stream; ``None`` where that point was not reached."""

    admitted_ns: int | None = None
    first_token_ns: int | None = None
    first_text_ns: int | None = None
    last_token_ns: int | None = None
    max_gap_ns: int = 0  # longest span between two tokens
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted; ``completion_tokens`` counts what was delivered, an end token included."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The stream holds a slot and its prompt begins."""

    key: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens since the delta before."""

    key: str
    text: str
    token_ids: tuple[int, ...]
    cumulative_tokens: int
    at_ns: int  # of the newest token
    logprobs: tuple[TokenLogprob, ...] = ()
    first_token_ns: int | None = None  # in the first delta only


@dataclass(frozen=True, slots=True)
class Finished:
    """The stream ended well. ``matched`` is the token id or the stop string that ended it."""

    key: str
    reason: FinishReason
    usage: Usage
    times: StreamTimes
    matched: int | str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The stream ended badly; what was generated before has been handed over as deltas."""

    key: str
    error: MiniInferError
    times: StreamTimes


@dataclass(frozen=True, slots=True)
class StateChanged:
    """An engine, not a stream, changed. ``error`` says why it FAILED."""

    engine_id: str
    state: EngineState
    error: MiniInferError | None = None


StreamEvent = Started | Delta | Finished | Failed
Event = StreamEvent | StateChanged

Emit = Callable[[Sequence[Event]], None]
"""How an engine hands over what happened. It must neither block nor raise.

It is called from the engine's own threads, one call at a time: from the owner thread once per step, and where a second
thread makes the text, from that one too. Two kinds of `Failed` come from other threads: that of a stream which `submit`
refuses, from the thread that called it and perhaps during another call; and those of streams left over at `close`.
"""


# --- who does it --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What callers may know of a loaded model."""

    source: str
    context_length: int  # tokens, prompt and answer together
    vocab_size: int  # ids that a request may use: 0..vocab_size - 1
    dtype: str
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    default_sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's load at this moment."""

    num_running: int
    generated_tokens: int
    last_step_ns: int | None  # the newest sign of life


class TextModel(Protocol):
    """Text to ids and back for one model. Blocking, safe from any thread, never called on an event loop."""

    @property
    def info(self) -> ModelInfo:
        """What callers may know of the model."""

    def prepare(self, request: Request) -> PreparedRequest:
        """Tokenizes and checks a request. Raises `InvalidRequest`, or `StreamFailed` where a template breaks."""

    def tokenize(self, text: str | tuple[ChatMessage, ...]) -> tuple[int, ...]:
        """Ids of a text or a conversation, as `prepare` would make them. Raises `InvalidRequest`."""

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Raises `InvalidRequest` for ids outside the vocabulary."""


class Engine(Protocol):
    """Makes tokens on a thread of its own.

    `start` returns at once; the engine then emits `StateChanged` events until READY (one real generation has
    worked) or FAILED (with a `LoadError`). A submitted stream gets `Started`, any number of `Delta`, and exactly one
    of `Finished` and `Failed`, whatever happens to the engine; then its slot is free. An engine that tries itself out
    after a broken step stays READY meanwhile, and the broken stream keeps its slot. FAILED is for good.
    All methods are safe from any thread and none blocks, but `close`.
    """

    @property
    def engine_id(self) -> str:
        """Unique in the server."""

    @property
    def kind(self) -> EngineKind:
        """What it is."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Its device labels, in the order of its stages."""

    @property
    def max_running(self) -> int:
        """The most streams that it runs at once."""

    @property
    def state(self) -> EngineState:
        """What it is doing now."""

    @property
    def text(self) -> TextModel:
        """Its model's tokenizer and limits. Raises `NoReadyEngine` before it is WARMING_UP."""

    def start(self, emit: Emit) -> None:
        """Begins to load on its own thread, and to emit. Raises `RuntimeError` the second time."""

    def submit(self, request: PreparedRequest) -> None:
        """Takes a stream; one that it cannot take (not READY, or closed) gets its `Failed` before this returns.

        Raises `ValueError` for the key of a stream that it holds.
        """

    def cancel(self, key: str) -> None:
        """Ends a stream within one step, with `Finished` CANCELLED; a key that it does not hold is ignored."""

    def stats(self) -> EngineStats:
        """Its load now."""

    def close(self) -> None:
        """Fails what it still holds, frees its device and joins its thread. Idempotent."""
