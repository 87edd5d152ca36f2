"""Plans the steps of continuous batching: who is admitted, fed and preempted. Knows counts and blocks; no tensors, no
clock, no thread.

Running ahead. A step may be planned before the tokens of the steps before it are known (`apply`). Planning works on
counts alone, and whatever it gives away (blocks, slots) may still be used by launched steps: the device runs the steps
in order. Old comes before young everywhere: ``_running`` is in order of arrival, everyone in it came before
everyone in ``_waiting``, and a preempted sequence, always the youngest that runs, goes to the front of those that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mini_infer.engines.api import PreparedRequest
from mini_infer.engines.batch import Admitted, Batch, Choice, Row
from mini_infer.engines.block_pool import BlockPool
from mini_infer.engines.sequence import Sequence


class Scheduler:
    """All sequences of one engine. One thread's own."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_running: int,
        prefill_tokens: int,
        decoding_prefill_tokens: int,
        prefix_cache: bool = True,
    ) -> None:
        assert min(max_running, prefill_tokens, decoding_prefill_tokens) >= 1, "a limit of 0 lets nobody go on"
        self._pool = pool
        self._prefill_tokens, self._decoding_prefill_tokens = prefill_tokens, decoding_prefill_tokens
        self._prefix_cache = prefix_cache
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._prefilling: Sequence | None = None  # the one of them that has not been fed all it had when it came in
        self._free_slots = list(range(max_running - 1, -1, -1))  # a stack, lowest number on top
        self._was_decode = True
        self._is_full = False  # whether the first that waits found too few blocks, and none has come back since

    @property
    def sequences(self) -> Iterable[Sequence]:
        """Everyone here, waiting or running."""
        return self._sequences.values()

    @property
    def num_sequences(self) -> int:
        """How many are here."""
        return len(self._sequences)

    @property
    def num_running(self) -> int:
        """How many have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many have none."""
        return len(self._waiting)

    def get(self, key: str) -> Sequence | None:
        """The sequence of a request that is here."""
        return self._sequences.get(key)

    def add(self, request: PreparedRequest) -> None:
        """Lets a request wait for its turn. Raises `ValueError` for a key that is here, or where it can never fit."""
        if request.key in self._sequences:
            raise ValueError(f"stream {request.key} is already here")
        sequence = Sequence(request, self._pool.block_size)
        if self._num_blocks(sequence.max_positions) > self._pool.capacity:
            raise ValueError(f"stream {request.key} may need more tokens than the cache holds")
        self._sequences[request.key] = sequence
        self._waiting.append(sequence)

    def remove(self, key: str) -> None:
        """Forgets a sequence; its slot and its blocks are free at once. An unknown key is ignored."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        if sequence.slot is None:
            self._waiting.remove(sequence)
            self._is_full = False  # the next one may need less
        else:
            self._running.remove(sequence)
            self._release(sequence, sequence.slot)

    # --- before a step --------------------------------------------------------------------------------------------

    def plan(self) -> Batch | None:
        """The next step: prompts and answers take turns. None where nothing can be done before the next `apply`."""
        if self._was_decode:
            batch = self._plan_prefill() or self._plan_decode()
        else:
            batch = self._plan_decode() or self._plan_prefill()
        if batch is not None:
            self._was_decode = batch.is_decode
        return batch

    def _plan_prefill(self) -> Batch | None:
        """Fills the budget in order of arrival. Whoever would get nothing of it is not admitted yet: meanwhile others
        may publish what it can share.
        """
        does_decode = any(sequence is not self._prefilling and sequence.wants_token for sequence in self._running)
        budget = self._decoding_prefill_tokens if does_decode else self._prefill_tokens
        admitted: list[Admitted] = []
        rows: list[Row] = []
        while budget and (sequence := self._prefilling or self._admit(admitted)) is not None:
            num_tokens = min(budget, sequence.num_left)
            budget -= num_tokens
            self._prefilling = sequence if num_tokens < sequence.num_left else None
            rows.append(_feed(sequence, num_tokens))
        return Batch(rows=tuple(rows), admitted=tuple(admitted)) if rows else None

    def _admit(self, admitted: list[Admitted]) -> Sequence | None:
        """Gives the first that waits its slot and its blocks, where both are there and all its tokens are known."""
        if self._is_full or not self._waiting or not self._free_slots or self._waiting[0].num_pending:
            return None
        sequence = self._waiting[0]
        if not self._allocate(sequence):
            self._is_full = True
            return None
        self._running.append(self._waiting.popleft())
        sequence.slot = self._free_slots.pop()
        sequence.num_admissions += 1
        if sequence.num_admissions == 1:
            sequence.num_cached_prompt_tokens = sequence.num_computed
        admitted.append(Admitted(slot=sequence.slot, request=sequence.request, token_ids=tuple(sequence.token_ids)))
        return sequence

    def _allocate(self, sequence: Sequence) -> bool:
        """Blocks for all tokens and one more, so that its first decode step preempts nobody; as many as can be shared.

        The last token is always fed, since its logits choose the next one. So the shared blocks end before it, and
        nobody ever writes into a shared block.
        """
        num_blocks = self._num_blocks(min(sequence.num_tokens + 1, sequence.max_positions))
        num_shareable = (sequence.num_tokens - 1) // self._pool.block_size if self._prefix_cache else 0
        shared = self._pool.match(map(sequence.block_digest, range(num_shareable)))
        own = self._pool.allocate(num_blocks - len(shared))
        if own is None:
            self._pool.release(shared)
            return False
        sequence.blocks = shared + own
        sequence.num_published = len(shared)
        sequence.num_computed = len(shared) * self._pool.block_size
        return True

    def _plan_decode(self) -> Batch | None:
        """One token for everyone whose prompt is fed and whose answer may go on."""
        rows = [
            _feed(sequence, 1)
            for sequence in self._running  # preemption takes the last of them away, never one that has its row
            if sequence.wants_token and sequence is not self._prefilling and self._make_room(sequence)
        ]
        return Batch(rows=tuple(rows), is_decode=True) if rows else None

    def _make_room(self, sequence: Sequence) -> bool:
        """Gets it a block where the next token needs one; False where there is none but by preempting itself."""
        while len(sequence.blocks) * self._pool.block_size < sequence.num_tokens:
            block = self._pool.allocate(1)
            if block is not None:
                sequence.blocks += block
            elif self._preempt_youngest() is sequence:
                return False
        return True

    def _preempt_youngest(self) -> Sequence:
        """Sends it back to wait. Its keys and values are computed again later; its tokens, also pending ones, count."""
        sequence = self._running.pop()
        assert sequence.slot is not None
        self._release(sequence, sequence.slot)
        self._waiting.appendleft(sequence)
        return sequence

    def _release(self, sequence: Sequence, slot: int) -> None:
        self._pool.release(sequence.blocks)
        self._free_slots.append(slot)
        sequence.blocks = []  # a new list: launched rows hold the old one
        sequence.slot, sequence.num_computed = None, 0
        self._is_full = False
        if self._prefilling is sequence:
            self._prefilling = None

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    # --- after a step ---------------------------------------------------------------------------------------------

    def apply(self, batch: Batch, choices: Iterable[Choice]) -> list[tuple[Sequence, Choice]]:
        """Takes in what a step chose, one choice for each sampling row, and returns those of sequences that are here.

        Ended ones, and those that got an error, are removed. Steps are applied in the order in which they were planned,
        each as a whole or in parts. A row that never will be is left out; then its sequence must be removed.
        """
        applied = []
        for row, choice in zip(batch.sampling_rows, choices, strict=True):
            sequence = self._sequences.get(row.key)
            if sequence is not None and _is_next(row, sequence):
                self._take(sequence, choice)
                applied.append((sequence, choice))
        return applied

    def _take(self, sequence: Sequence, choice: Choice) -> None:
        sequence.pending.popleft()
        if choice.error is not None:
            self.remove(sequence.key)
            return
        if sequence.slot is not None and self._prefix_cache:
            self._publish(sequence)
        sequence.token_ids.append(choice.token_id)
        if sequence.request.end_reason(choice.token_id, sequence.num_answer_tokens) is not None:
            self.remove(sequence.key)

    def _publish(self, sequence: Sequence) -> None:
        """Lets others find its full blocks. The step that has just chosen its next token has read all known ones, so
        their keys and values are in the cache, and are sound: with one that is no number there would be no token.
        """
        for index in range(sequence.num_published, len(sequence.token_ids) // self._pool.block_size):
            self._pool.publish(sequence.blocks[index], sequence.block_digest(index))
            sequence.num_published = index + 1


def _feed(sequence: Sequence, num_tokens: int) -> Row:
    """Its next row, which it counts as computed."""
    assert sequence.slot is not None
    samples = num_tokens == sequence.num_left
    row = Row(
        key=sequence.key,
        slot=sequence.slot,
        start=sequence.num_computed,
        num_tokens=num_tokens,
        samples=samples,
        blocks=sequence.blocks,
    )
    sequence.num_computed += num_tokens
    if samples:
        sequence.pending.append(row)
    return row


def _is_next(row: Row, sequence: Sequence) -> bool:
    """Whether its next token is this row's; not where the row was that of a removed sequence of the same key."""
    is_next = bool(sequence.pending) and sequence.pending[0] is row
    assert is_next or all(each is not row for each in sequence.pending), f"a step of stream {row.key} was left out"
    return is_next
