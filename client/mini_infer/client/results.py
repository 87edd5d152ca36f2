"""What callers get back: plain frozen dataclasses. Durations are float seconds of the server's monotonic clock.

Words such as finish reasons are the lower-case ends of the proto's enum names ("stop_string" for
FINISH_REASON_STOP_STRING), so that a newer server's new word is no error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRef:
    """Which engine served a generation, and why that one."""

    engine_id: str
    kind: str  # generate, replica, pipeline or scripted
    devices: tuple[str, ...]
    placement_reason: str  # only_engine, pinned, session, least_loaded, round_robin or pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The generation left the queue and holds a slot of an engine."""

    engine: EngineRef
    queue_s: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """One alternative to a token; ``token`` is its own bytes, the logarithm is natural."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token with its log-probability before any sampling setting, and its alternatives, best first."""

    token_id: int
    token: bytes
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Where the time to the first token went: time_to_first_token_s = tokenize_s + queue_s + prefill_s."""

    tokenize_s: float
    queue_s: float
    prefill_s: float
    time_to_first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of an answer."""

    text: str
    token_ids: tuple[int, ...]  # empty unless asked for with output_token_ids
    num_tokens: int  # in this piece
    cumulative_tokens: int  # this piece's included
    logprobs: tuple[TokenLogprob, ...]  # empty unless asked for with logprobs
    offset_s: float  # from arrival of the request to the newest token of this piece
    first_token: FirstToken | None  # in the first delta only


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time of a generation went; None where that point was not reached."""

    arrival_time: datetime  # wall clock of the server, in UTC
    tokenize_s: float | None
    queue_s: float | None
    prefill_s: float | None
    time_to_first_token_s: float | None  # tokenize_s + queue_s + prefill_s
    time_to_first_text_s: float | None
    decode_s: float | None
    total_s: float | None
    mean_inter_token_s: float | None
    max_inter_token_s: float | None
    tokens_per_second: float  # of the tokens after the first; 0 below two tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A whole answer and how it ended."""

    request_id: str  # the server's own
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str  # eos, stop_string, stop_token, max_new_tokens, context_length or cancelled
    matched: int | str | None  # the token id or the stop string that ended it
    usage: Usage
    timing: Timing
    engine: EngineRef
    seed: int | None  # None for greedy decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A tokenized text."""

    token_ids: tuple[int, ...]
    context_length: int  # the most tokens that the model takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """What a cancellation found."""

    cancelled: tuple[str, ...]  # the server's ids
    not_found: tuple[str, ...]  # the ids and labels that matched nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A served model."""

    name: str
    source: str
    context_length: int
    vocab_size: int
    dtype: str
    has_chat_template: bool
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, object]  # by the names of SamplingParams
    engine_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine as it was when asked."""

    engine_id: str
    kind: str
    devices: tuple[str, ...]
    model: str
    state: str  # loading, warming_up, ready, draining or failed
    failure: str
    num_running: int
    num_waiting: int
    max_running: int
    generated_tokens: int
    since_last_token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server is."""

    version: str
    library_versions: Mapping[str, str]
    start_time: datetime
    max_message_bytes: int
    max_prompt_bytes: int
    max_queue: int
