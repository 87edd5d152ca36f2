"""What passes between servicer and dispatcher: plain, picklable dataclasses. Knows neither gRPC nor asyncio."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mini_infer.engines.api import EngineKind, Request, StreamTimes


class PlacementReason(StrEnum):
    """Why an engine was chosen."""

    ONLY_ENGINE = "only_engine"
    PINNED = "pinned"
    SESSION = "session"
    LEAST_LOADED = "least_loaded"
    ROUND_ROBIN = "round_robin"
    PACK = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One generation call, its fields checked. Instants are monotonic nanoseconds."""

    request: Request  # its key is the server's own id
    caller: str  # who may cancel it; today the peer's address without its port
    arrival_ns: int
    model: str = ""  # empty: the only one
    label: str = ""  # the caller's own request_id; not unique
    engine_id: str | None = None  # pin
    engine_kind: EngineKind | None = None  # pin
    session_id: str = ""
    max_queue_ns: int | None = None  # longest wait for a slot, from arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedBy:
    """Which engine serves a stream, and why that one."""

    engine_id: str
    kind: EngineKind
    devices: tuple[str, ...]
    reason: PlacementReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where a stream's time went: instants of one monotonic clock in, spans in nanoseconds out.

    Every span is a difference of two of the same instants, so tokenize + queue + prefill is exactly the time to
    first token. A span whose end was not reached is None.
    """

    arrival_ns: int
    tokenized_ns: int | None = None
    times: StreamTimes = StreamTimes()
    ended_ns: int | None = None

    @property
    def tokenize_ns(self) -> int | None:
        """From arrival to the end of tokenizing and checking."""
        return _span(self.arrival_ns, self.tokenized_ns)

    @property
    def queue_ns(self) -> int | None:
        """From there until an engine began the prompt."""
        return _span(self.tokenized_ns, self.times.admitted_ns)

    @property
    def prefill_ns(self) -> int | None:
        """From there until the first token was sampled."""
        return _span(self.times.admitted_ns, self.times.first_token_ns)

    @property
    def time_to_first_token_ns(self) -> int | None:
        """From arrival until the first token was sampled."""
        return _span(self.arrival_ns, self.times.first_token_ns)

    @property
    def time_to_first_text_ns(self) -> int | None:
        """From arrival until the first text was ready."""
        return _span(self.arrival_ns, self.times.first_text_ns)

    @property
    def decode_ns(self) -> int | None:
        """From the first token to the last."""
        return _span(self.times.first_token_ns, self.times.last_token_ns)

    @property
    def total_ns(self) -> int | None:
        """From arrival to the end."""
        return _span(self.arrival_ns, self.ended_ns)

    @property
    def mean_inter_token_ns(self) -> int | None:
        """Mean span between two tokens; None below two tokens."""
        gaps = self.times.num_tokens - 1
        return self.decode_ns // gaps if gaps > 0 and self.decode_ns is not None else None

    @property
    def max_inter_token_ns(self) -> int | None:
        """Longest span between two tokens; None below two tokens."""
        return self.times.max_gap_ns if self.times.num_tokens > 1 else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first per second of decode; 0 below two tokens."""
        return (
            (self.times.num_tokens - 1) * 1e9 / self.decode_ns if self.times.num_tokens > 1 and self.decode_ns else 0.0
        )


def _span(start_ns: int | None, end_ns: int | None) -> int | None:
    return None if start_ns is None or end_ns is None else end_ns - start_ns
