import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import NEUTRAL, truncate
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_infer.engines import sampler

VOCAB = 300
MASK64 = (1 << 64) - 1


def column(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)[:, None]


def random_scores(seed=0, rows=4, scale=3.0):
    """Scores whose best is 0."""
    scores = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    return scores - scores.amax(-1, keepdim=True)


def cut(scores, *, top_k=None, top_p=None, min_p=None):
    """The weights that are left."""
    weights, ranks, rows = sampler.weigh(scores), sampler.rank(scores), len(scores)
    if top_k is not None:
        weights = sampler.keep_top_k(
            weights, ranks, column(*[top_k] * rows, dtype=torch.int64), min(top_k + 3, scores.shape[1])
        )
    if top_p is not None:
        weights = sampler.keep_top_p(weights, ranks, column(*[top_p] * rows, dtype=torch.float64))
    if min_p is not None:
        weights = sampler.keep_min_p(weights, column(*[min_p] * rows, dtype=torch.float64))
    return weights


def kept(chances, **cuts):
    """The ids that are left."""
    scores = torch.tensor([chances]).log()
    return cut(scores - scores.amax(-1, keepdim=True), **cuts)[0].nonzero()[:, 0].tolist()


def num_kept(chances, **cuts):
    return len(kept(chances, **cuts))


# --- the order of numbers ---


def test_ranks_are_ordered_as_numbers_are():
    tiny, small = torch.finfo(torch.float32).smallest_normal, 1e-45
    values = [torch.inf, 3e38, 1.5, 1.0, tiny, small, 0.0, -small, -tiny, -1.0, -1.5, -3e38, -torch.inf]
    ranks = sampler.rank(torch.tensor([values]))[0].tolist()
    assert ranks == sorted(set(ranks))
    assert ranks[0] >= 0
    assert ranks[-1] < 1 << 32
    assert sampler.rank(torch.tensor([0.0])) == sampler.rank(torch.tensor([-0.0]))


def test_first_takes_what_a_stable_sort_puts_first():
    generator = random.Random(0)
    for _ in range(200):
        num = generator.choice([1, 2, 7, 50])
        values = torch.tensor([[generator.choice([-2.5, -1.0, -0.0, 0.0, 1e-40, 3.0]) for _ in range(num)]])
        amounts = torch.tensor([[generator.choice([0, 1, 5, 1 << 40]) for _ in range(num)]])
        enough = column(generator.randint(1, max(1, int(amounts.sum()))), dtype=torch.int64)
        order = values[0].sort(stable=True, descending=True).indices.tolist()
        taken, sum_taken = set(), 0
        for token_id in order:
            if sum_taken < enough:
                taken.add(token_id)
                sum_taken += int(amounts[0, token_id])
        found = sampler.first(sampler.rank(values), amounts, torch.minimum(enough, amounts.sum(-1, keepdim=True)))
        counts = {token_id for token_id in range(num) if amounts[0, token_id]}  # the others change nothing
        assert set(found[0].nonzero()[:, 0].tolist()) & counts == taken & counts


# --- top_k, top_p, min_p ---


@pytest.mark.parametrize("step", [0.0, 0.5])  # 0.5: nearly every token ties with others
@pytest.mark.parametrize("cuts", [{"top_k": 1}, {"top_k": 40}, {"top_k": VOCAB}, {"top_p": 0.3}, {"top_p": 0.97}])
@pytest.mark.parametrize("min_p", [None, 0.1])
def test_cuts_equal_the_definition_by_sorting(step, cuts, min_p):
    for seed in range(10):
        scores = random_scores(seed)
        if step:
            scores = (scores / step).round() * step
        wanted = {**cuts, **({} if min_p is None else {"min_p": min_p})}
        ours = cut(scores, **wanted)
        sampling = replace(NEUTRAL, **wanted)
        for row in range(len(scores)):
            theirs = truncate(scores[row].double(), sampling)
            assert torch.equal(ours[row] > 0, theirs > 0)
            assert torch.allclose(ours[row].double() / ours[row].sum(), theirs, atol=1e-6)


@pytest.mark.floor
@pytest.mark.parametrize("seed", range(10))
def test_equal_to_the_processors_of_transformers(seed):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    ids = torch.tensor([[1, 2, 3, 2, 44, 45]])
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )(ids, logits.clone())
    counts = sampler.count_tokens(ids, torch.ones_like(ids, dtype=torch.bool), VOCAB)
    scores = sampler.heat(sampler.penalise_repetition(logits, counts, column(1.3)), column(0.7))
    ours = cut(scores, top_k=40, top_p=0.9, min_p=0.02)
    assert torch.equal(ours == 0, theirs.isinf())
    assert torch.allclose(ours.double() / ours.sum(), theirs.softmax(-1).double(), atol=1e-6)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_nucleus_equals_transformers_where_nothing_ties(top_p):
    scores = random_scores(rows=20)
    theirs = TopPLogitsWarper(top_p)(None, scores)
    assert torch.equal(cut(scores, top_p=top_p) == 0, theirs.isinf())


def test_order_is_top_k_then_top_p_then_min_p_each_on_what_is_left():
    chances = [0.4, 0.3, 0.2, 0.1]
    assert num_kept(chances, top_p=0.65) == 2
    assert num_kept([0.5, 0.5], top_p=0.5) == 1
    assert num_kept([0.5, 0.5], top_p=0.5 + 2.0**-50) == 2
    assert num_kept(chances, top_k=2, top_p=0.5) == 1  # 4/7 of what top_k left; of all four it would be two
    assert num_kept(chances, top_k=3, min_p=0.6) == 2
    assert num_kept(chances, min_p=0.24) == 4


def test_of_tokens_that_tie_the_lowest_ids_are_kept():
    chances = [0.1, 0.2, 0.2, 0.2, 0.2, 0.1]
    assert kept(chances, top_k=2) == [1, 2]
    assert kept(chances, top_p=0.5) == [1, 2, 3]


def test_weights_of_a_large_vocabulary_do_not_overflow():
    weights = sampler.weigh(torch.zeros(1, 262_144))
    assert weights.sum() == 262_144 << 44
    assert sampler.draw(weights, column(1 - 2.0**-53, dtype=torch.float64)).tolist() == [262_143]


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1e6])
def test_heat_overflows_at_no_temperature(temperature):
    for scale in (1.0, 1e30):
        scores = sampler.heat(random_scores(scale=scale), column(*[temperature] * 4))
        assert not scores.isnan().any()
        assert torch.equal(scores.amax(-1), torch.zeros(4))


# --- drawing ---


def drawn(weights, uniform):
    return sampler.draw(torch.tensor([weights]), column(uniform, dtype=torch.float64)).item()


def test_the_drawn_token_is_where_the_number_falls():
    weights = [0, 3, 0, 1, 0]
    assert [drawn(weights, each) for each in (0.0, 0.74, 0.75, 1 - 2.0**-53)] == [1, 1, 3, 3]


@pytest.mark.parametrize("weight", [1, 1 << 44, (1 << 53) + 3, (1 << 54) - 1, (1 << 62) - 1, (1 << 63) - 1])
def test_no_number_draws_an_impossible_token(weight):
    assert {drawn([0, weight, 0, 0], each) for each in (0.0, 0.5, 1 - 2.0**-53)} == {1}


def splitmix64(seed, position):
    value = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def signed(value):
    return value - (1 << 64) if value >> 63 else value


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, MASK64), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_random_bits_equal_splitmix64(pairs):
    seeds = column(*[signed(seed) for seed, _ in pairs], dtype=torch.int64)
    positions = column(*[position for _, position in pairs], dtype=torch.int64)
    expected = [splitmix64(seed, position) for seed, position in pairs]
    assert [value & MASK64 for value in sampler.mix(seeds, positions)[:, 0].tolist()] == expected
    assert sampler.uniform(seeds, positions)[:, 0].tolist() == [(value >> 11) / (1 << 53) for value in expected]


def test_splitmix64_gives_its_published_numbers():
    """The first outputs from state 1234567, as the reference code in C prints them."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, position) for position in range(4)] == published


# --- bias and penalties ---


def test_ids_that_the_model_does_not_have_are_passed_over():
    ids = torch.tensor([[1, 4, -7, 0]])
    scores = sampler.add_at(torch.zeros(1, 3), ids, torch.tensor([[2.0, -torch.inf, 5.0, 0.0]]))
    assert scores.tolist() == [[0.0, 2.0, 0.0]]


def test_what_is_not_counted_may_be_garbage():
    ids = torch.tensor([[1, 1, 2, 10**12, -5, 3]])
    counted = torch.tensor([[True, True, True, False, False, False]])
    assert sampler.count_tokens(ids, counted, 4).tolist() == [[0.0, 2.0, 1.0, 0.0]]


def test_frequency_counts_each_time_and_presence_once():
    counts = torch.tensor([[0.0, 3.0, 1.0]])
    scores = torch.zeros(1, 3)
    assert sampler.penalise_answer(scores, counts, column(0.0), column(0.5)).tolist() == [[0.0, -1.5, -0.5]]
    assert sampler.penalise_answer(scores, counts, column(0.5), column(0.0)).tolist() == [[0.0, -0.5, -0.5]]


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 0.5, 100.0])
def test_no_repetition_penalty_makes_infinities_that_win(penalty):
    scores = sampler.penalise_repetition(random_scores() + 1.0, torch.ones(4, VOCAB), column(*[penalty] * 4))
    assert scores.amax(-1).isfinite().all()


# --- log-probabilities ---


def test_top_logprobs_are_best_first_and_the_lowest_id_first_where_they_tie():
    logprobs = torch.tensor([[-3.0, -1.0, -2.0, -1.0, -0.0, 0.0]])
    ids, values = sampler.top_logprobs(logprobs, 4)
    assert ids.tolist() == [[4, 5, 1, 3]]
    assert values.tolist() == [[0.0, 0.0, -1.0, -1.0]]


# --- rows that cannot be judged ---


def test_a_maximum_tells_what_is_wrong():
    nan, inf = torch.nan, torch.inf
    raw_best, best = torch.tensor([1.0, nan, inf, -inf, 1.0]), torch.tensor([1.0, nan, 1.0, -inf, -inf])
    assert sampler.judge(torch.full((5,), 7), raw_best, best).tolist() == [7, -1, -1, -1, -2]
