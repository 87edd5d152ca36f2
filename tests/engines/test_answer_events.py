import pytest

from mini_infer.engines.answer_events import AnswerEvents
from mini_infer.engines.api import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    OutputOptions,
    PreparedRequest,
    Sampling,
    StopConditions,
    StreamTimes,
    TokenLogprob,
    Usage,
)
from mini_infer.engines.errors import StreamFailed

EOS = 9


def begun(output: OutputOptions = OutputOptions()) -> AnswerEvents:
    answer = AnswerEvents(
        PreparedRequest(
            key="k",
            prompt_ids=(1, 2, 3),
            sampling=Sampling(seed=7),
            stop=StopConditions(max_new_tokens=3),
            eos_token_ids=frozenset({EOS}),
            limit_reason=FinishReason.CONTEXT_LENGTH,
            output=output,
        )
    )
    answer.admitted_ns, answer.num_cached_prompt_tokens = 5, 2
    return answer


def test_a_token_that_ends_the_answer_says_why():
    answer = begun()
    assert [answer.count(token_id, None, 10) for token_id in (1, EOS, 1)] == [
        None,
        FinishReason.EOS,
        FinishReason.CONTEXT_LENGTH,
    ]


def test_the_first_gap_is_between_the_first_two_tokens_and_the_longest_is_kept():
    answer = begun()
    for at_ns in (1000, 1010, 1400):
        answer.count(1, None, at_ns)
    assert answer.times == StreamTimes(5, 1000, None, 1400, 390, 3)


def test_a_delta_holds_all_since_the_one_before_and_only_the_first_the_first_stamp():
    answer = begun()
    entry = TokenLogprob(1, b"a", -1.0)
    answer.count(1, entry, 10)
    assert answer.delta("", 11) is None
    answer.count(2, None, 20)
    assert answer.delta("ab", 21) == Delta("k", "ab", (1, 2), 2, 20, (entry,), 10)
    answer.count(3, None, 30)
    assert answer.delta("c", 31) == Delta("k", "c", (3,), 3, 30)
    assert answer.delta("held", 41) == Delta("k", "held", (), 3, 30)
    assert answer.times.first_text_ns == 21


@pytest.mark.parametrize("output", [OutputOptions(token_ids=True), OutputOptions(logprobs=True)])
def test_tokens_without_text_are_worth_a_delta_where_each_was_asked_for(output):
    answer = begun(output)
    answer.count(1, None, 10)
    assert answer.delta("", 10) == Delta("k", "", (1,), 1, 10, (), 10)
    assert answer.delta("", 11) is None


def test_both_ends():
    answer = begun()
    answer.count(EOS, None, 10)
    times = StreamTimes(5, 10, None, 10, 0, 1)
    assert answer.end(FinishReason.EOS, EOS) == Finished("k", FinishReason.EOS, Usage(3, 1, 2), times, EOS, 7)
    error = StreamFailed("no")
    assert answer.end(error) == Failed("k", error, times)
