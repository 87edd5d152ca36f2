from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from mini_infer.engines.api import FinishReason, OutputOptions, PreparedRequest, Sampling, StopConditions
from mini_infer.engines.batch import Batch, Choice, Row
from mini_infer.engines.block_pool import BlockPool
from mini_infer.engines.scheduler import Scheduler
from mini_infer.engines.sequence import Sequence

BLOCK_SIZE = 4
EOS, OTHER = 0, 1
SHARED = tuple(range(100, 112))  # a beginning of three blocks


def request(
    key: str, num_tokens: int = 3, max_new_tokens: int = 4, *, beginning: Iterable[int] = (), min_new_tokens: int = 0
) -> PreparedRequest:
    """A prompt of ``num_tokens`` that only ``key`` has, after ``beginning``."""
    return PreparedRequest(
        key=key,
        prompt_ids=(*beginning, *(ord(key) * 1000 + index for index in range(num_tokens))),
        sampling=Sampling(),
        stop=StopConditions(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens),
        eos_token_ids=frozenset({EOS}),
        limit_reason=FinishReason.MAX_NEW_TOKENS,
        output=OutputOptions(),
    )


def scheduler_of(
    *requests: PreparedRequest,
    num_blocks: int = 99,
    max_running: int = 8,
    prefill_tokens: int = 99,
    decoding_prefill_tokens: int = 99,
    prefix_cache: bool = True,
) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(num_blocks + 1, BLOCK_SIZE)
    scheduler = Scheduler(
        pool,
        max_running=max_running,
        prefill_tokens=prefill_tokens,
        decoding_prefill_tokens=decoding_prefill_tokens,
        prefix_cache=prefix_cache,
    )
    for each in requests:
        scheduler.add(each)
    return scheduler, pool


def planned(scheduler: Scheduler) -> Batch:
    batch = scheduler.plan()
    assert batch is not None
    return batch


def apply(scheduler: Scheduler, batch: Batch, token_id: int = OTHER) -> list[str]:
    """Lets every sampling row choose ``token_id``; the keys whose token counts."""
    counted = scheduler.apply(batch, [Choice(token_id) for _ in batch.sampling_rows])
    return [sequence.key for sequence, _ in counted]


def step(scheduler: Scheduler, token_id: int = OTHER) -> Batch:
    batch = planned(scheduler)
    apply(scheduler, batch, token_id)
    return batch


def steps(scheduler: Scheduler) -> Iterator[Batch]:
    """Every step when it is planned, to the end."""
    while (batch := scheduler.plan()) is not None:
        yield batch
        apply(scheduler, batch)
    assert scheduler.num_sequences == 0


def run(scheduler: Scheduler) -> list[Batch]:
    """All steps to the end."""
    return list(steps(scheduler))


def here(scheduler: Scheduler, key: str) -> Sequence:
    sequence = scheduler.get(key)
    assert sequence is not None
    return sequence


def fed(batch: Batch) -> list[tuple[str, int, int, bool]]:
    return [(row.key, row.start, row.num_tokens, row.samples) for row in batch.rows]


def is_whole(pool: BlockPool) -> bool:
    pool.check()
    return pool.num_free == pool.capacity


# --- one after the other ------------------------------------------------------------------------------------------


def test_nobody_there_is_nothing_to_plan():
    scheduler, _ = scheduler_of()
    assert scheduler.plan() is None


def test_a_prompt_is_fed_and_then_every_token_but_the_last():
    scheduler, pool = scheduler_of(request("a", 3, max_new_tokens=3))
    batches = run(scheduler)
    assert [fed(batch) for batch in batches] == [[("a", 0, 3, True)], [("a", 3, 1, True)], [("a", 4, 1, True)]]
    assert [batch.is_decode for batch in batches] == [False, True, True]
    assert is_whole(pool)


def test_the_step_that_admits_says_what_the_slot_is_filled_with():
    scheduler, _ = scheduler_of(request("a"), request("b"))
    first, second = planned(scheduler).admitted
    assert (first.request.key, second.request.key) == ("a", "b")
    assert first.token_ids == first.request.prompt_ids
    assert {first.slot, second.slot} == {here(scheduler, "a").slot, here(scheduler, "b").slot}
    assert first.slot != second.slot
    assert planned(scheduler).admitted == ()


def test_a_row_holds_the_blocks_themselves_and_no_copy():
    scheduler, _ = scheduler_of(request("a"))
    assert planned(scheduler).rows[0].blocks is here(scheduler, "a").blocks


def test_a_long_prompt_is_fed_in_chunks_of_the_budget_and_only_the_last_one_samples():
    scheduler, _ = scheduler_of(request("a", 10), prefill_tokens=4)
    assert [fed(step(scheduler)) for _ in range(3)] == [
        [("a", 0, 4, False)],
        [("a", 4, 4, False)],
        [("a", 8, 2, True)],
    ]


def test_prompts_are_packed_up_to_the_budget_in_order_of_arrival():
    scheduler, _ = scheduler_of(request("a", 3), request("b", 6), request("c", 5), prefill_tokens=8)
    batch = step(scheduler)
    assert fed(batch) == [("a", 0, 3, True), ("b", 0, 5, False)]
    assert scheduler.num_waiting == 1  # nothing is left for it, so it is not admitted yet
    step(scheduler)
    assert fed(step(scheduler)) == [("b", 5, 1, True), ("c", 0, 5, True)]


def test_one_prompt_token_that_is_left_over_belongs_to_a_prefill_step():
    scheduler, _ = scheduler_of(request("a", 5), prefill_tokens=4)
    step(scheduler)
    batch = step(scheduler)
    assert fed(batch) == [("a", 4, 1, True)]
    assert not batch.is_decode


def test_prefill_steps_follow_one_another_while_nobody_decodes():
    scheduler, _ = scheduler_of(request("a", 9), prefill_tokens=3)
    assert [step(scheduler).is_decode for _ in range(4)] == [False, False, False, True]


def test_between_two_prefill_steps_everyone_who_can_decodes():
    scheduler, _ = scheduler_of(
        request("a", 3, max_new_tokens=9), request("b", 9), prefill_tokens=4, decoding_prefill_tokens=4
    )
    batches = [step(scheduler) for _ in range(7)]
    assert [batch.is_decode for batch in batches] == [False, True, False, True, False, True, True]
    assert fed(batches[3]) == [("a", 4, 1, True)]
    assert fed(batches[5]) == [("a", 5, 1, True), ("b", 9, 1, True)]


def test_prefill_steps_are_smaller_while_others_decode():
    scheduler, _ = scheduler_of(
        request("a", 8, max_new_tokens=4), request("b", 20), prefill_tokens=8, decoding_prefill_tokens=3
    )
    chunks = [sum(row.num_tokens for row in batch.rows) for batch in run(scheduler) if not batch.is_decode]
    assert chunks == [8, 3, 3, 8, 6]  # "a" ends after three decode steps; then it is whole steps for "b"


def test_it_ends_with_an_end_token():
    scheduler, pool = scheduler_of(request("a", max_new_tokens=9))
    step(scheduler)
    batch = planned(scheduler)
    assert apply(scheduler, batch, EOS) == ["a"]
    assert scheduler.get("a") is None
    assert is_whole(pool)


def test_an_end_token_before_the_fewest_tokens_ends_nothing():
    scheduler, _ = scheduler_of(request("a", max_new_tokens=9, min_new_tokens=3))
    for is_here in (True, True, False):
        step(scheduler, EOS)
        assert (scheduler.get("a") is not None) == is_here


def test_what_counts_is_returned_with_its_choice_in_the_order_of_the_rows():
    scheduler, _ = scheduler_of(request("a"), request("b"))
    batch = planned(scheduler)
    a, b = here(scheduler, "a"), here(scheduler, "b")
    choices = [Choice(7, logprob=-1.0), Choice(EOS)]
    assert scheduler.apply(batch, choices) == [(a, choices[0]), (b, choices[1])]
    assert a.token_ids == [*a.request.prompt_ids, 7]
    assert b.token_ids == [*b.request.prompt_ids, EOS]
    assert list(scheduler.sequences) == [a]


def test_an_error_ends_its_own_sequence():
    scheduler, pool = scheduler_of(request("a"), request("b"))
    batch = planned(scheduler)
    a, b = here(scheduler, "a"), here(scheduler, "b")
    counted = scheduler.apply(batch, [Choice(-1, error="no numbers"), Choice(OTHER)])
    assert [(sequence, choice.error) for sequence, choice in counted] == [(a, "no numbers"), (b, None)]
    assert a.num_answer_tokens == 0
    assert [row.key for row in step(scheduler).rows] == ["b"]
    pool.check()


def test_a_choice_too_many_or_too_few_is_an_error():
    scheduler, _ = scheduler_of(request("a"))
    with pytest.raises(ValueError, match="zip"):
        scheduler.apply(planned(scheduler), [])


def test_a_key_that_is_here_is_refused():
    scheduler, _ = scheduler_of(request("a"))
    with pytest.raises(ValueError, match="already here"):
        scheduler.add(request("a"))


# --- block edges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"),
    [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (7, 2), (8, 3), (9, 3)],
)
def test_a_prompt_comes_in_with_blocks_for_its_tokens_and_one_more(num_tokens, num_blocks):
    scheduler, _ = scheduler_of(request("a", num_tokens))
    assert len(planned(scheduler).rows[0].blocks) == num_blocks


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(3, 1), (4, 1), (5, 2)])
def test_no_block_is_taken_for_a_token_that_nothing_follows(num_tokens, num_blocks):
    scheduler, _ = scheduler_of(request("a", num_tokens, max_new_tokens=1), num_blocks=num_blocks)
    assert len(planned(scheduler).rows[0].blocks) == num_blocks


def test_a_decode_row_has_one_block_more_exactly_when_its_token_is_the_first_of_a_block():
    scheduler, _ = scheduler_of(request("a", 2, max_new_tokens=9))
    _, *batches = ((batch.rows[0].start, len(batch.rows[0].blocks)) for batch in steps(scheduler))
    assert batches == [(2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 2), (8, 3), (9, 3)]


@pytest.mark.parametrize(("num_tokens", "max_new_tokens"), [(1, 12), (6, 7), (11, 2), (12, 1)])
def test_what_fills_the_whole_pool_runs_alone_to_its_end(num_tokens, max_new_tokens):
    scheduler, pool = scheduler_of(request("a", num_tokens, max_new_tokens), request("b"), num_blocks=3)
    batches = run(scheduler)
    a = [row for batch in batches for row in batch.rows if row.key == "a"]
    assert sum(row.samples for row in a) == max_new_tokens
    assert [row.start for row in a[1:]] == list(range(num_tokens, 12))
    assert is_whole(pool)


@pytest.mark.parametrize(("num_tokens", "max_new_tokens"), [(1, 13), (12, 2), (13, 1)])
def test_what_can_never_fit_is_refused(num_tokens, max_new_tokens):
    scheduler, _ = scheduler_of(num_blocks=3)
    with pytest.raises(ValueError, match="more tokens than the cache holds"):
        scheduler.add(request("a", num_tokens, max_new_tokens))
    assert scheduler.num_sequences == 0


def test_an_empty_pool_refuses_everyone():
    scheduler, _ = scheduler_of(num_blocks=0)
    with pytest.raises(ValueError, match="more tokens than the cache holds"):
        scheduler.add(request("a", 1, 1))


# --- running ahead ------------------------------------------------------------------------------------------------


def test_steps_are_planned_before_the_tokens_of_those_before_are_known():
    scheduler, _ = scheduler_of(request("a", 3, max_new_tokens=3))
    batches = [planned(scheduler) for _ in range(3)]
    assert [fed(batch) for batch in batches] == [[("a", 0, 3, True)], [("a", 3, 1, True)], [("a", 4, 1, True)]]
    assert scheduler.plan() is None  # all its tokens are planned
    for batch in batches:
        assert apply(scheduler, batch) == ["a"]
    assert scheduler.num_sequences == 0


def test_a_row_that_was_planned_after_the_end_token_does_not_count():
    scheduler, pool = scheduler_of(request("a", max_new_tokens=9))
    first, second = planned(scheduler), planned(scheduler)
    assert apply(scheduler, first, EOS) == ["a"]
    assert apply(scheduler, second) == []
    assert is_whole(pool)


def test_one_that_is_only_waited_for_does_not_hold_up_prompts_nor_make_them_smaller():
    scheduler, _ = scheduler_of(
        request("a", 3, max_new_tokens=1), request("b", 8), prefill_tokens=3, decoding_prefill_tokens=1
    )
    assert fed(planned(scheduler)) == [("a", 0, 3, True)]
    assert fed(planned(scheduler)) == [("b", 0, 3, False)]


def test_a_step_is_applied_in_parts_where_it_was_run_in_parts():
    scheduler, _ = scheduler_of(request("a"), request("b"), request("c"))
    batch = planned(scheduler)
    assert apply(scheduler, replace(batch, rows=batch.rows[:1])) == ["a"]
    assert apply(scheduler, replace(batch, rows=batch.rows[2:])) == ["c"]
    scheduler.remove("b")  # its row could not be run
    assert [row.key for row in step(scheduler).rows] == ["a", "c"]


def test_a_step_that_is_left_out_is_noticed():
    scheduler, _ = scheduler_of(request("a"))
    planned(scheduler)
    with pytest.raises(AssertionError, match="left out"):
        apply(scheduler, planned(scheduler))


# --- admission ----------------------------------------------------------------------------------------------------


def test_no_more_run_than_there_are_slots():
    scheduler, _ = scheduler_of(*map(request, "abc"), max_running=2)
    assert [row.key for row in step(scheduler).rows] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_sequences) == (2, 1, 3)
    scheduler.remove("a")
    step(scheduler)
    assert [row.key for row in step(scheduler).rows] == ["c"]


def test_a_small_one_does_not_pass_a_large_one_that_waits_for_blocks():
    scheduler, _ = scheduler_of(request("a", 8), request("b", 8), request("c", 1), num_blocks=4)
    assert [row.key for row in step(scheduler).rows] == ["a"]
    assert scheduler.num_waiting == 2
    scheduler.remove("a")
    assert [row.key for row in step(scheduler).rows] == ["b", "c"]


def test_when_a_large_one_that_waits_is_removed_the_next_one_comes_in():
    scheduler, _ = scheduler_of(request("a", 8), request("b", 8), request("c", 1), num_blocks=4)
    step(scheduler)
    step(scheduler)
    scheduler.remove("b")
    assert [row.key for row in step(scheduler).rows] == ["c"]


def test_while_nothing_comes_back_the_first_that_waits_is_not_tried_again(monkeypatch):
    scheduler, pool = scheduler_of(request("a", 8, max_new_tokens=8), request("b", 12), num_blocks=4)
    matches = []
    monkeypatch.setattr(pool, "match", lambda digests: matches.append(digests) or [])
    for _ in range(6):
        step(scheduler)
    assert len(matches) == 2  # one for each of them


# --- preemption ---------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_comes_back_first_with_all_its_tokens():
    scheduler, pool = scheduler_of(request("a", 3, 6), request("b", 3, 6), num_blocks=2, prefix_cache=False)
    scheduler.add(request("c", 1, 1))
    batches = run(scheduler)
    decoders = ["".join(row.key for row in batch.rows) for batch in batches]
    assert decoders == ["ab", "ab", "a", "a", "a", "a", "b", "b", "b", "b", "c"]
    (again,) = batches[6].admitted
    assert again.token_ids == (*again.request.prompt_ids, OTHER, OTHER)
    assert fed(batches[6]) == [("b", 0, 5, True)]
    assert is_whole(pool)


def test_the_one_that_asks_is_preempted_where_it_is_the_youngest():
    scheduler, _ = scheduler_of(request("a", 4, 5), request("b", 3, 3), num_blocks=3, prefix_cache=False)
    assert [row.key for row in step(scheduler).rows] == ["a", "b"]
    step(scheduler)
    assert [row.key for row in step(scheduler).rows] == ["a"]
    assert here(scheduler, "b").slot is None
    assert here(scheduler, "b").blocks == []


def test_several_that_are_preempted_keep_their_order():
    requests = [request("a", 3, 14), request("b", 3, 9), request("c", 3, 9)]
    scheduler, _ = scheduler_of(*requests, num_blocks=4, prefix_cache=False)
    arrivals = [admitted.request.key for batch in run(scheduler) for admitted in batch.admitted]
    assert arrivals[:3] == ["a", "b", "c"]
    assert set(arrivals[3:]) == {"b", "c"}
    assert arrivals[3] == "b"


def test_a_pending_token_of_a_preempted_one_counts_and_it_waits_until_that_is_known():
    scheduler, _ = scheduler_of(request("a", 3, 6), request("b", 3, 6), num_blocks=2, prefix_cache=False)
    first, second = planned(scheduler), planned(scheduler)
    third = planned(scheduler)  # "a" needs a second block
    b = here(scheduler, "b")
    assert [row.key for row in third.rows] == ["a"]
    assert (b.slot, b.num_pending, b.num_computed) == (None, 2, 0)
    scheduler.remove("a")
    assert scheduler.plan() is None
    assert apply(scheduler, first, 7) == ["b"]
    assert scheduler.plan() is None
    assert apply(scheduler, second, 8) == ["b"]
    assert apply(scheduler, third) == []
    batch = planned(scheduler)
    assert batch.admitted[0].token_ids == (*b.request.prompt_ids, 7, 8)
    assert fed(batch) == [("b", 0, 5, True)]


def test_a_preempted_one_may_end_with_its_pending_token():
    scheduler, pool = scheduler_of(request("a", 3, 6), request("b", 3, 6), num_blocks=2)
    first, second, third = planned(scheduler), planned(scheduler), planned(scheduler)
    apply(scheduler, first)
    assert apply(scheduler, second, EOS) == ["a", "b"]
    assert apply(scheduler, third) == []
    assert scheduler.num_sequences == 0
    assert is_whole(pool)


def test_a_long_prompt_that_is_preempted_between_its_chunks_starts_again():
    scheduler, pool = scheduler_of(
        request("a", 3, 9), request("b", 11), num_blocks=4, prefill_tokens=5, decoding_prefill_tokens=1
    )
    step(scheduler)
    while here(scheduler, "b").slot is not None:
        step(scheduler)
    b = here(scheduler, "b")
    assert (b.num_admissions, b.num_computed, b.num_left) == (1, 0, 11)
    run(scheduler)
    assert b.num_admissions == 2
    assert b.num_answer_tokens == 4
    assert is_whole(pool)


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_a_long_one_among_many_small_newcomers_ends_within_its_own_steps(num_ahead):
    scheduler, pool = scheduler_of(request("a", 20, max_new_tokens=20), num_blocks=10, prefill_tokens=4)
    launched: list[Batch] = []
    num_steps = 0
    while scheduler.get("a") is not None:
        if num_steps:  # there is always a newcomer
            scheduler.add(request(chr(200 + num_steps), 3, 3))
        batch = scheduler.plan()
        launched += [batch] if batch else []
        if batch is None or len(launched) > num_ahead:
            apply(scheduler, launched.pop(0))
        num_steps += 1
    assert num_steps <= 5 + 2 * 19 + num_ahead  # its chunks, and before each decode step a prefill step of others
    pool.check()


def test_a_large_one_that_waits_comes_in_however_many_small_ones_come_after_it():
    scheduler, _ = scheduler_of(request("a", 3, 9), request("b", 3, 9), request("c", 16, 2), num_blocks=6)
    num_steps = 0
    while here(scheduler, "c").slot is None:
        scheduler.add(request(chr(200 + num_steps), 1, 2))
        step(scheduler)
        num_steps += 1
    assert num_steps <= 2 * 9 + 1  # until both of them have ended


# --- the prefix cache ---------------------------------------------------------------------------------------------


def cached_tokens(scheduler: Scheduler, key: str) -> int:
    return here(scheduler, key).num_cached_prompt_tokens


def warm(**limits: int | bool) -> tuple[Scheduler, BlockPool]:
    """A scheduler whose cache knows `SHARED`."""
    scheduler, pool = scheduler_of(request("a", 1, 1, beginning=SHARED), **limits)
    run(scheduler)
    return scheduler, pool


@pytest.mark.parametrize(
    ("num_shared", "num_own", "num_cached"),
    [
        (12, 1, 12),  # one token is left to feed
        (12, 0, 8),  # the last block would leave none
        (11, 5, 8),
        (8, 1, 8),
        (8, 0, 4),
        (7, 9, 4),
        (4, 1, 4),
        (4, 0, 0),
        (3, 1, 0),
        (0, 9, 0),
    ],
)
def test_a_prompt_shares_the_full_blocks_of_an_equal_beginning_and_feeds_at_least_a_token(
    num_shared, num_own, num_cached
):
    scheduler, pool = warm()
    scheduler.add(request("b", num_own, beginning=SHARED[:num_shared]))
    assert fed(planned(scheduler)) == [("b", num_cached, num_shared + num_own - num_cached, True)]
    assert cached_tokens(scheduler, "b") == num_cached
    pool.check()


def test_sharers_read_the_same_blocks_and_write_into_their_own():
    scheduler, pool = warm()
    scheduler.add(request("b", 2, beginning=SHARED))
    scheduler.add(request("c", 2, beginning=SHARED))
    b, c = planned(scheduler).rows
    assert b.blocks[:3] == c.blocks[:3]
    assert set(b.blocks[3:]).isdisjoint(c.blocks)
    pool.check()


def test_an_answer_is_shared_by_the_prompt_that_goes_on_from_it():
    scheduler, _ = scheduler_of(request("a", 3, 6))
    a = here(scheduler, "a")
    run(scheduler)
    scheduler.add(replace(request("b"), prompt_ids=(*a.token_ids, 5, 6, 7)))
    step(scheduler)
    assert cached_tokens(scheduler, "b") == 8  # 3 + 6 tokens; the last of them was never fed


def test_blocks_are_found_only_after_the_step_that_reads_them_all_is_applied():
    scheduler, _ = scheduler_of(request("a", 1, 2, beginning=SHARED), *map(_sharer, "bc"), prefill_tokens=13)
    prefill = planned(scheduler)
    planned(scheduler)
    planned(scheduler)
    assert cached_tokens(scheduler, "b") == 0
    apply(scheduler, prefill)
    planned(scheduler)
    planned(scheduler)
    assert cached_tokens(scheduler, "c") == 12


def _sharer(key: str) -> PreparedRequest:
    return request(key, 1, beginning=SHARED)


def test_a_block_whose_last_token_is_pending_is_not_found():
    scheduler, _ = scheduler_of(request("a", 3, 9), prefill_tokens=3, decoding_prefill_tokens=99)
    a = here(scheduler, "a")
    prefill, decode = planned(scheduler), planned(scheduler)
    apply(scheduler, prefill)  # the fourth token is known, but the step that computes its keys is not over
    scheduler.add(replace(request("b"), prompt_ids=(*a.token_ids, 5)))
    planned(scheduler)
    assert cached_tokens(scheduler, "b") == 0
    apply(scheduler, decode)
    scheduler.add(replace(request("c"), prompt_ids=(*a.token_ids[:4], 5)))
    planned(scheduler)
    planned(scheduler)
    assert cached_tokens(scheduler, "c") == 4


def test_blocks_that_led_to_no_number_are_never_shared():
    scheduler, _ = scheduler_of(request("a", 1, beginning=SHARED))
    scheduler.apply(planned(scheduler), [Choice(-1, error="no numbers")])
    scheduler.add(_sharer("b"))
    step(scheduler)
    assert cached_tokens(scheduler, "b") == 0


def test_without_a_prefix_cache_nothing_is_shared():
    scheduler, _ = warm(prefix_cache=False)
    scheduler.add(_sharer("b"))
    assert fed(step(scheduler)) == [("b", 0, 13, True)]
    assert cached_tokens(scheduler, "b") == 0


def test_where_the_rest_has_no_room_what_was_found_is_given_back():
    scheduler, pool = warm(num_blocks=5)
    scheduler.add(request("x", 5))
    step(scheduler)
    scheduler.add(request("b", 4, beginning=SHARED))  # shares 3 blocks, and 2 more are not there
    step(scheduler)
    assert step(scheduler).rows[0].key == "x"
    assert here(scheduler, "b").slot is None
    assert pool.num_free == 3
    pool.check()
    scheduler.remove("x")
    assert fed(step(scheduler)) == [("b", 12, 4, True)]


def test_a_preempted_one_finds_its_own_blocks_again_and_still_says_what_its_prompt_found_first():
    scheduler, _ = scheduler_of(request("a", 3, 10), request("b", 3, 9), num_blocks=4)
    b = here(scheduler, "b")
    batches = run(scheduler)
    (again,) = [batch for batch in batches if not batch.is_decode and batch.rows[0].key == "b"]
    assert again.rows[0].start > 0
    assert b.num_admissions == 2
    assert b.num_cached_prompt_tokens == 0
    assert b.num_answer_tokens == 9


# --- removal ------------------------------------------------------------------------------------------------------


def _waiting(scheduler: Scheduler) -> list[Batch]:
    return []


def _between_chunks(scheduler: Scheduler) -> list[Batch]:
    step(scheduler)
    return []


def _chunk_launched(scheduler: Scheduler) -> list[Batch]:
    return [planned(scheduler)]


def _decoding(scheduler: Scheduler) -> list[Batch]:
    for _ in range(4):
        step(scheduler)
    return []


def _two_tokens_pending(scheduler: Scheduler) -> list[Batch]:
    _decoding(scheduler)
    return [planned(scheduler), planned(scheduler)]


def _preempted(scheduler: Scheduler) -> list[Batch]:
    _decoding(scheduler)
    scheduler._preempt_youngest()
    return []


def _preempted_with_a_token_pending(scheduler: Scheduler) -> list[Batch]:
    launched = _two_tokens_pending(scheduler)
    scheduler._preempt_youngest()
    return launched


STATES = [
    _waiting,
    _between_chunks,
    _chunk_launched,
    _decoding,
    _two_tokens_pending,
    _preempted,
    _preempted_with_a_token_pending,
]


@pytest.mark.parametrize("reach", STATES)
def test_removal_in_every_state_frees_all_at_once_and_what_was_launched_does_not_count(reach):
    scheduler, pool = scheduler_of(request("a", 9, 20), prefill_tokens=4)
    launched = reach(scheduler)
    scheduler.remove("a")
    assert scheduler.num_sequences == scheduler.num_running == scheduler.num_waiting == 0
    assert is_whole(pool)
    assert [apply(scheduler, batch) for batch in launched] == [[] for _ in launched]
    assert scheduler.plan() is None
    assert is_whole(pool)


@pytest.mark.parametrize("reach", STATES)
def test_a_newcomer_of_the_same_key_gets_nothing_of_what_was_launched_before(reach):
    scheduler, pool = scheduler_of(request("a", 9, 20), prefill_tokens=4)
    launched = reach(scheduler)
    scheduler.remove("a")
    scheduler.add(request("a", 2, 3))
    launched.append(planned(scheduler))
    *old, new = [apply(scheduler, batch, 7) for batch in launched]
    assert new == ["a"]
    assert old == [[] for _ in old]
    assert here(scheduler, "a").token_ids[2:] == [7]
    run(scheduler)
    assert is_whole(pool)


@pytest.mark.parametrize("reach", STATES)
def test_a_newcomer_may_have_the_slot_at_once(reach):
    scheduler, _ = scheduler_of(request("a", 9, 20), prefill_tokens=4, max_running=1)
    reach(scheduler)
    scheduler.remove("a")
    scheduler.add(request("b", 3))
    assert [row.slot for row in planned(scheduler).rows] == [0]


def test_an_unknown_key_is_ignored():
    scheduler, pool = scheduler_of(request("a"))
    scheduler.remove("b")
    step(scheduler)
    scheduler.remove("b")
    assert scheduler.num_sequences == 1
    pool.check()


def test_a_row_that_was_launched_still_knows_its_blocks_after_the_sequence_is_gone():
    scheduler, _ = scheduler_of(request("a", 9))
    row: Row = planned(scheduler).rows[0]
    blocks = list(row.blocks)
    scheduler.remove("a")
    assert row.blocks == blocks
    assert len(blocks) == 3
