from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.engines.block_pool import BlockPool


def cached(pool: BlockPool, *digests: bytes) -> list[int]:
    """Blocks that are published under ``digests`` and referenced by nobody, used in one sequence."""
    blocks = pool.allocate(len(digests))
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    pool.check()
    return blocks


def found(pool: BlockPool, *digests: bytes) -> list[int]:
    """What can be found, without keeping it."""
    blocks = pool.match(digests)
    pool.release(blocks)
    return blocks


def test_all_blocks_but_the_first_are_handed_out_once():
    pool = BlockPool(5, 16)
    assert pool.capacity == pool.num_free == 4
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) == [4]
    assert pool.num_free == 0
    pool.check()


def test_a_pool_of_nothing_but_the_first_block_is_empty():
    pool = BlockPool(1, 16)
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    assert pool.match([b"a"]) == []
    pool.check()


def test_too_large_an_allocation_changes_nothing():
    pool = BlockPool(4, 16)
    cached(pool, b"a", b"b")
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert len(found(pool, b"a", b"b")) == 2
    pool.check()


def test_released_blocks_are_handed_out_again_in_ascending_order():
    pool = BlockPool(5, 16)
    pool.release(pool.allocate(4))
    assert pool.allocate(4) == [1, 2, 3, 4]


def test_a_block_is_free_when_its_last_reference_is_released():
    pool = BlockPool(3, 16)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    assert pool.match([b"a"]) == pool.match([b"a"]) == [block]
    for num_free in (1, 1, 2):
        pool.release([block])
        assert pool.num_free == num_free
        pool.check()


def test_the_longest_known_beginning_is_matched():
    pool = BlockPool(9, 16)
    blocks = cached(pool, b"a", b"b", b"c")
    assert found(pool, b"a", b"b", b"c", b"d") == blocks
    assert found(pool, b"a", b"b", b"x", b"c") == blocks[:2]
    assert found(pool, b"x", b"a") == []
    assert found(pool) == []


def test_what_is_not_published_cannot_be_found_again():
    pool = BlockPool(3, 16)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.release([first, second])
    assert found(pool, b"a", b"b") == [first]


def test_of_two_blocks_of_one_digest_the_older_is_found_and_the_other_is_simply_free():
    pool = BlockPool(3, 16)
    older, newer = pool.allocate(2)
    pool.publish(older, b"a")
    pool.publish(newer, b"a")
    pool.release([newer])
    pool.check()
    assert pool.match([b"a"]) == [older]
    assert pool.allocate(1) == [newer]


def test_cached_blocks_are_evicted_only_when_no_free_one_is_left():
    pool = BlockPool(5, 16)
    cached(pool, b"a", b"b")
    pool.allocate(2)
    assert len(found(pool, b"a", b"b")) == 2
    pool.allocate(1)
    assert len(found(pool, b"a", b"b")) == 1
    pool.check()


def test_the_least_recently_used_are_evicted_first_and_of_one_sequence_the_last_blocks():
    pool = BlockPool(7, 16)
    cached(pool, b"old 1", b"old 2")
    cached(pool, b"new 1", b"new 2")
    found(pool, b"old 1")  # used again, the most recent now
    pool.allocate(2)  # the free ones
    for evicted in (b"old 2", b"new 2", b"new 1", b"old 1"):
        assert len(found_each(pool, b"old 1", b"old 2", b"new 1", b"new 2")) == pool.num_free
        pool.allocate(1)
        assert evicted not in found_each(pool, b"old 1", b"old 2", b"new 1", b"new 2")
        pool.check()


def found_each(pool: BlockPool, *digests: bytes) -> list[bytes]:
    """Which of ``digests`` can be found, without using them."""
    return [digest for digest in digests if digest in pool._block_of]


def test_a_matched_block_is_not_evicted():
    pool = BlockPool(3, 16)
    first, second = cached(pool, b"a", b"b")
    assert pool.match([b"a"]) == [first]
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [second]
    assert found(pool, b"a", b"b") == [first]


def test_an_evicted_block_can_be_published_anew():
    pool = BlockPool(2, 16)
    (block,) = cached(pool, b"a")
    assert pool.allocate(1) == [block]
    pool.publish(block, b"b")
    pool.release([block])
    assert found(pool, b"a") == []
    assert found(pool, b"b") == [block]
    pool.check()


def test_check_notices_a_block_that_was_released_twice():
    pool = BlockPool(3, 16)
    (block,) = pool.allocate(1)
    pool.release([block])
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.check()


def test_check_notices_a_block_that_is_lost():
    pool = BlockPool(3, 16)
    pool._free.pop()
    with pytest.raises(AssertionError):
        pool.check()


def test_check_notices_a_digest_that_names_a_free_block():
    pool = BlockPool(3, 16)
    pool.publish(1, b"a")
    with pytest.raises(AssertionError):
        pool.check()


operations = st.one_of(
    st.tuples(st.just("allocate"), st.integers(0, 4)),
    st.tuples(st.just("release"), st.integers(0, 99)),
    st.tuples(st.just("publish"), st.text("ab", min_size=1, max_size=3)),
    st.tuples(st.just("match"), st.text("ab", min_size=1, max_size=4)),
)


@given(num_blocks=st.integers(1, 7), steps=st.lists(operations, max_size=40))
def test_it_agrees_with_plain_counting_whatever_is_done(num_blocks, steps):
    pool = BlockPool(num_blocks, 16)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}  # the digest that each block was published under, if it was free for it
    for what, argument in steps:
        before = pool.num_free
        if what == "allocate":
            blocks = pool.allocate(argument)
            assert (blocks is None) == (argument > before)
            for block in blocks or []:
                assert block not in [each for holder in held for each in holder]
                content.pop(block, None)
            held += [blocks] if blocks else []
        elif what == "release" and held:
            pool.release(held.pop(argument % len(held)))
        elif what == "publish" and held and held[-1][-1] not in content and argument.encode() not in content.values():
            content[held[-1][-1]] = argument.encode()
            pool.publish(held[-1][-1], argument.encode())
        elif what == "match":
            digests = [argument[:end].encode() for end in range(1, len(argument) + 1)]
            blocks = pool.match(digests)
            assert [content[block] for block in blocks] == digests[: len(blocks)]
            assert len(blocks) == len(digests) or digests[len(blocks)] not in content.values()
            held += [blocks] if blocks else []
        pool.check()
        counts = Counter(block for blocks in held for block in blocks)
        assert 0 not in counts
        assert pool.num_free == pool.capacity - len(counts)
