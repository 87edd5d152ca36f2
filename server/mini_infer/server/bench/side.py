"""What is compared: a side answers prompts and tells when each token came. Knows no engine and no statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from mini_infer.server.bench.prompts import Prompt

LOAD_TIMEOUT_S = 1800.0
ROUND_TIMEOUT_S = 900.0
"""The longest that a side may take for one round."""


class BenchError(Exception):
    """There is nothing to compare. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One round of one side, as its caller sees it. Instants are nanoseconds of `time.monotonic_ns()`."""

    begin_ns: int
    token_ns: tuple[tuple[int, ...], ...]  # of each stream: when each of its tokens came

    @property
    def tokens_per_s(self) -> float:
        """All tokens, from the beginning to the last one."""
        return _rate(sum(map(len, self.token_ns)), self._end_ns - self.begin_ns)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """The tokens that come after every stream has its first; None where there are none."""
        all_began_ns = max(stream[0] for stream in self.token_ns)
        num_tokens = sum(at_ns > all_began_ns for stream in self.token_ns for at_ns in stream)
        return _rate(num_tokens, self._end_ns - all_began_ns) if num_tokens else None

    @property
    def ttft_s(self) -> float:
        """Median over the streams of the time to the first token."""
        return median(stream[0] - self.begin_ns for stream in self.token_ns) / 1e9

    @property
    def _end_ns(self) -> int:
        return max(stream[-1] for stream in self.token_ns)


class Side(Protocol):
    """Something that answers."""

    @property
    def name(self) -> str:
        """One word for tables."""

    def run(self, prompts: Sequence[Prompt], num_new_tokens: int) -> Run:
        """Answers all prompts at once, greedily, each with exactly so many tokens. Raises `BenchError`."""


def finished_run(name: str, begin_ns: int, token_ns: Sequence[Sequence[int]], num_new_tokens: int) -> Run:
    """The record of a round. Raises `BenchError` where a stream did not get all its tokens."""
    for stream in token_ns:
        if len(stream) != num_new_tokens:
            raise BenchError(f"{name} made {len(stream)} tokens in place of {num_new_tokens}")
    return Run(begin_ns=begin_ns, token_ns=tuple(map(tuple, token_ns)))


def _rate(num_tokens: int, span_ns: int) -> float:
    return num_tokens * 1e9 / span_ns
