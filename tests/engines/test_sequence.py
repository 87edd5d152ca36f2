import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.engines.api import FinishReason, OutputOptions, PreparedRequest, Sampling, StopConditions
from mini_infer.engines.batch import Row
from mini_infer.engines.sequence import Sequence


def sequence_of(*prompt_ids: int, max_new_tokens: int = 4, block_size: int = 4) -> Sequence:
    request = PreparedRequest(
        key="a",
        prompt_ids=prompt_ids,
        sampling=Sampling(),
        stop=StopConditions(max_new_tokens=max_new_tokens),
        eos_token_ids=frozenset(),
        limit_reason=FinishReason.MAX_NEW_TOKENS,
        output=OutputOptions(),
    )
    return Sequence(request, block_size)


def a_row() -> Row:
    return Row(key="a", slot=0, start=0, num_tokens=1, samples=True, blocks=[])


def digests(token_ids: list[int], block_size: int = 4) -> list[bytes]:
    sequence = sequence_of(*token_ids, block_size=block_size)
    return [sequence.block_digest(index) for index in range(len(token_ids) // block_size)]


def test_a_new_one_has_its_prompt_to_feed():
    sequence = sequence_of(5, 6, 7)
    assert sequence.token_ids == [5, 6, 7]
    assert (sequence.num_tokens, sequence.num_left, sequence.num_pending) == (3, 3, 0)
    assert (sequence.num_prompt_tokens, sequence.num_answer_tokens) == (3, 0)


def test_a_pending_token_counts_but_for_the_known_answer():
    sequence = sequence_of(5, 6, 7)
    sequence.num_computed = 3
    sequence.pending.append(a_row())
    assert (sequence.num_tokens, sequence.num_left, sequence.num_pending) == (4, 1, 1)
    assert sequence.num_answer_tokens == 0
    sequence.pending.popleft()
    sequence.token_ids.append(8)
    assert (sequence.num_tokens, sequence.num_left, sequence.num_pending) == (4, 1, 0)
    assert sequence.num_answer_tokens == 1


def test_it_wants_tokens_until_its_limit_is_known_or_pending():
    sequence = sequence_of(5, 6, 7, max_new_tokens=2)
    assert sequence.wants_token
    sequence.token_ids.append(8)
    assert sequence.wants_token
    sequence.pending.append(a_row())
    assert not sequence.wants_token


@pytest.mark.parametrize(("max_new_tokens", "num_positions"), [(1, 3), (2, 4), (9, 11)])
def test_the_last_token_of_the_answer_needs_no_place_in_the_cache(max_new_tokens, num_positions):
    assert sequence_of(5, 6, 7, max_new_tokens=max_new_tokens).max_positions == num_positions


def test_the_prompt_of_the_request_is_not_touched():
    sequence = sequence_of(5, 6)
    sequence.token_ids.append(7)
    assert sequence.request.prompt_ids == (5, 6)


def test_two_of_one_request_are_not_the_same():
    assert sequence_of(5) != sequence_of(5)


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_only_full_blocks_have_a_digest(num_tokens):
    sequence = sequence_of(*range(num_tokens))
    for index in range(num_tokens // 4):
        assert len(sequence.block_digest(index)) == 16
    with pytest.raises(AssertionError, match="is not full"):
        sequence.block_digest(num_tokens // 4)


def test_a_block_that_becomes_full_has_the_digest_of_the_same_tokens_in_a_prompt():
    sequence = sequence_of(1, 2, 3, 4, 5, 6, 7)
    sequence.block_digest(0)
    sequence.token_ids.append(8)
    assert [sequence.block_digest(index) for index in range(2)] == digests([1, 2, 3, 4, 5, 6, 7, 8])


def test_a_digest_is_made_once():
    sequence = sequence_of(1, 2, 3, 4)
    assert sequence.block_digest(0) is sequence.block_digest(0)


def test_equal_blocks_after_different_beginnings_differ():
    assert digests([1, 1, 1, 1, 7, 7, 7, 7])[1] != digests([2, 2, 2, 2, 7, 7, 7, 7])[1]
    assert len(set(digests([7] * 40))) == 10


def test_large_token_ids_are_told_apart():
    assert digests([2**31 + 1] * 4) != digests([1] * 4)


@given(
    first=st.lists(st.integers(0, 2), max_size=12),
    second=st.lists(st.integers(0, 2), max_size=12),
    block_size=st.integers(1, 4),
)
def test_digests_are_equal_exactly_as_far_as_the_tokens_are(first, second, block_size):
    for index, (one, other) in enumerate(zip(digests(first, block_size), digests(second, block_size), strict=False)):
        end = (index + 1) * block_size
        assert (one == other) == (first[:end] == second[:end])
