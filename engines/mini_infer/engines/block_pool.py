"""Which cache blocks are in use, by how many sequences, and which still hold a known beginning. Knows no tokens and no
tensors: a block is a number, and what it holds is a digest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``, of ``block_size`` tokens each. Block 0 is never handed out: padding writes there.

    Every block is free, referenced, or cached: published and referenced by nobody, so that it can be found again until
    its place is needed. Every operation takes constant time for each block that it is about.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.capacity = num_blocks - 1
        self.block_size = block_size
        self._num_references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack, lowest number on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """How many blocks can be allocated."""
        return len(self._free) + len(self._cached)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks with one reference each; None, and no change, where too few are left.

        Cached ones are evicted, the longest unused first, when no free one is left. The blocks are in ascending order:
        neighbours in the cache can be read without a gather.
        """
        if num_blocks > self.num_free:
            return None
        blocks = sorted(self._free.pop() if self._free else self._evict() for _ in range(num_blocks))
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Takes one reference from each. The last of them are evicted first: nobody finds them without the first."""
        for block in reversed(blocks):
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                if block in self._digest_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Lets a referenced block be found; its content is whole and stays. Of two equal ones the first is kept."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest beginning of ``digests`` that can be found, each with one reference more."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._num_references[block] += 1
            self._cached.pop(block, None)
            blocks.append(block)
        return blocks

    def check(self) -> None:
        """Raises `AssertionError` where the balance is broken. Takes time for every block: for tests."""
        referenced = [block for block, num in enumerate(self._num_references) if num]
        everyone = sorted([*self._free, *self._cached, *referenced])
        assert everyone == list(range(1, self.capacity + 1)), f"not every block is in exactly one place: {everyone}"
        assert min(self._num_references) == 0, f"released too often: {self._num_references}"
        assert self._digest_of == {block: digest for digest, block in self._block_of.items()}, "a digest is astray"
        assert len(self._digest_of) == len(self._block_of), "two digests name one block"
        assert self._digest_of.keys().isdisjoint(self._free), "a free block can be found"
        assert self._digest_of.keys() >= self._cached.keys(), "a cached block cannot be found"
