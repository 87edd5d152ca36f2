"""One request in flight: its tokens, its place in the cache, and how far both have come. Decides nothing."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

from mini_infer.engines.api import PreparedRequest
from mini_infer.engines.batch import Row

_DIGEST_BYTES = 16


@dataclass(slots=True, eq=False)
class Sequence:
    """The counts run ahead of the known tokens: a launched step's token counts before anyone knows which one it is."""

    request: PreparedRequest
    block_size: int
    token_ids: list[int] = field(init=False)  # the prompt, and the answer as far as it is known
    pending: deque[Row] = field(default_factory=deque)  # launched rows whose choice is not known yet, oldest first
    num_computed: int = 0  # positions whose keys and values are in the cache, or will be after the launched steps
    blocks: list[int] = field(default_factory=list)  # of the cache, in order
    slot: int | None = None  # None while it waits
    num_admissions: int = 0  # more than 1 after a preemption
    num_cached_prompt_tokens: int = 0  # found in the cache at the first admission
    num_published: int = 0  # of its first blocks, those that need no publishing any more
    max_new_tokens: int = field(init=False)
    _digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.request.stop.max_new_tokens is not None, "a prepared request has its limit"
        self.max_new_tokens = self.request.stop.max_new_tokens
        self.token_ids = list(self.request.prompt_ids)

    @property
    def key(self) -> str:
        """The request's key."""
        return self.request.key

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_answer_tokens(self) -> int:
        """Known tokens of the answer."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that launched steps choose and that are not known yet."""
        return len(self.pending)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, known or pending."""
        return len(self.token_ids) + len(self.pending)

    @property
    def num_left(self) -> int:
        """Tokens that are still to be fed."""
        return len(self.token_ids) + len(self.pending) - self.num_computed

    @property
    def max_positions(self) -> int:
        """The most positions that it can need in the cache: nothing follows the answer's last token, so not its own."""
        return len(self.request.prompt_ids) + self.max_new_tokens - 1

    @property
    def wants_token(self) -> bool:
        """Whether the answer may become longer than what is known or pending."""
        return len(self.token_ids) + len(self.pending) <= self.max_positions

    def block_digest(self, index: int) -> bytes:
        """Names the known tokens from the beginning to the end of block ``index``, which must be full."""
        while len(self._digests) <= index:
            start = len(self._digests) * self.block_size
            token_ids = self.token_ids[start : start + self.block_size]
            assert len(token_ids) == self.block_size, f"block {index} is not full"
            before = self._digests[-1] if self._digests else b""
            content = before + array("q", token_ids).tobytes()
            self._digests.append(blake2b(content, digest_size=_DIGEST_BYTES).digest())
        return self._digests[index]
