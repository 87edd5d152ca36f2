import threading
from dataclasses import replace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mini_infer.engines import sampler
from mini_infer.engines.api import FinishReason, OutputOptions, PreparedRequest, Sampling, StopConditions
from mini_infer.engines.errors import StreamFailed
from mini_infer.engines.sampler import Sampler

VOCAB = 300
NEUTRAL = Sampling(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=1,
)
CPU = torch.device("cpu")


def request(prompt=(1, 2, 3), *, stop=StopConditions(), output=OutputOptions(), eos=frozenset({0}), **sampling):
    return PreparedRequest(
        key="a",
        prompt_ids=prompt,
        sampling=replace(NEUTRAL, **sampling),
        stop=replace(stop, max_new_tokens=100),
        eos_token_ids=eos,
        limit_reason=FinishReason.MAX_NEW_TOKENS,
        output=output,
    )


def choose(req, logits, answer=()):
    ids = torch.tensor([[*req.prompt_ids, *answer]])
    return Sampler(req, CPU).choose(ids, logits)


def draws(req, logits, num=2000):
    """One draw at each position of a long answer of the same token."""
    one = Sampler(req, CPU)
    return [one.choose(torch.tensor([[*req.prompt_ids, *([7] * n)]]), logits).token_id for n in range(num)]


def random_logits(seed=0, scale=3.0):
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


# --- extremes ---


@pytest.mark.parametrize(
    "sharp",
    [
        {"temperature": 0.0, "seed": None},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-6},
        {"temperature": 2.0, "top_p": 1e-9},
        {"temperature": 2.0, "min_p": 1.0},
        {"temperature": 1e-4},
        {"temperature": 1e-6},
        {"temperature": 1e-30},
        {"temperature": 1e-300},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sharpest_settings_are_greedy(sharp, dtype):
    for seed in range(20):
        logits = random_logits(seed).to(dtype)
        if dtype is not torch.float32 and logits.float().topk(2).values.diff() == 0:
            continue  # a tie: only the settings below promise which one
        assert choose(request(**sharp), logits).token_id == int(logits.argmax())


@pytest.mark.parametrize(
    "sharp", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.5}]
)
def test_where_tokens_tie_the_lowest_id_wins_as_in_argmax(sharp):
    logits = torch.zeros(1, VOCAB)
    logits[0, [50, 9, 200]] = 4.0
    assert set(draws(request(**{"temperature": 2.0, **sharp}), logits, 50)) == {9}


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 0.7, 100.0, 1e6])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 5, 10_000])
@pytest.mark.parametrize("min_p", [0.0, 0.5, 1.0])
def test_every_legal_extreme_gives_a_token(temperature, top_p, top_k, min_p):
    for scale in (0.0, 1.0, 1e30):
        req = request(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=1e-30,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias={5: 100.0, 6: -100.0},
        )
        assert 0 <= choose(req, random_logits(scale=scale), (7, 7)).token_id < VOCAB


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, [3, 4]] = torch.tensor([0.0, -3.0])
    assert set(draws(request(), logits)) == {3, 4}


def test_a_clock_at_zero_does_not_let_an_impossible_token_win(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator: self.zero_())
    scores = torch.tensor([[0.0, float("-inf"), -1.0]])
    assert sampler.draw(scores, torch.Generator()).tolist() == [0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_fail_this_stream(bad):
    logits = random_logits()
    logits[0, 17] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(StreamFailed):
            choose(request(temperature=temperature), logits)
    with pytest.raises(StreamFailed):
        choose(request(), torch.full((1, VOCAB), float("-inf")))


def test_nothing_left_to_choose_fails_this_stream():
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 0] = 1.0  # only the end token, and it is held back
    with pytest.raises(StreamFailed, match="left to choose"):
        choose(request(stop=StopConditions(min_new_tokens=1)), logits)


# --- effects ---


def test_no_hidden_top_k():
    assert len(set(draws(request(), torch.zeros(1, VOCAB)))) > 150


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    picked = torch.bincount(torch.tensor(draws(request(eos=frozenset()), logits, 3000)), minlength=4) / 3000
    assert torch.allclose(picked, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03)


def test_order_is_temperature_then_top_k_then_top_p_then_min_p():
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    def kept(**sampling):
        return (sampler.truncate(scores, replace(NEUTRAL, **sampling)) > -torch.inf).sum().item()

    assert kept(top_p=0.65) == 2
    assert kept(top_p=0.65, temperature=100.0) == 3  # nearly flat: 0.25 each
    assert kept(top_k=2, top_p=0.5) == 1  # 4/7 of what top_k left; of all four it would be two
    assert kept(top_k=3, min_p=0.6) == 2
    assert kept(min_p=0.6, temperature=100.0) == 4


def test_logit_bias_bans_and_forces():
    logits = random_logits(scale=1.0)
    best = int(logits.argmax())
    assert choose(request(temperature=0.0, logit_bias={best: -100.0}), logits).token_id != best
    assert choose(request(temperature=0.0, logit_bias={44: 100.0, 45: 50.0}), logits).token_id == 44


def test_repetition_penalty_counts_prompt_and_answer():
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 7, 9]] = torch.tensor([1.2, 1.1, 1.0])
    assert choose(request(temperature=0.0), logits).token_id == 2
    assert choose(request(temperature=0.0, repetition_penalty=1.5), logits).token_id == 7
    assert choose(request(temperature=0.0, repetition_penalty=1.5), logits, (7,)).token_id == 9


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_penalties_count_the_answer_only(name):
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 9]] = torch.tensor([1.0, 0.8])
    req = request(temperature=0.0, **{name: 0.5})
    assert choose(req, logits).token_id == 2  # 2 is in the prompt
    assert choose(req, logits, (2,)).token_id == 9


def test_frequency_counts_each_time_and_presence_once():
    answer = torch.tensor([[5, 5, 5, 6]])
    scores = torch.zeros(1, VOCAB)
    assert sampler.penalise_answer(scores, answer, 0.0, 0.5)[0, [4, 5, 6]].tolist() == [0.0, -1.5, -0.5]
    assert sampler.penalise_answer(scores, answer, 0.5, 0.0)[0, [4, 5, 6]].tolist() == [0.0, -0.5, -0.5]


def test_min_new_tokens_holds_back_end_and_stop_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, [0, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])
    req = request(temperature=0.0, stop=StopConditions(min_new_tokens=2, token_ids=(8,)))
    assert [choose(req, logits, answer).token_id for answer in ((), (9,), (9, 9))] == [9, 9, 0]


def test_end_tokens_that_the_model_does_not_have_are_no_failure():
    req = request(temperature=0.0, stop=StopConditions(min_new_tokens=2), eos=frozenset({0, VOCAB + 5}))
    assert choose(req, random_logits()).token_id != 0


# --- equality with transformers ---


@pytest.mark.floor
@pytest.mark.parametrize("seed", range(10))
def test_equal_to_the_processors_of_transformers(seed):
    logits = random_logits(seed)
    req = request(
        prompt=(1, 2, 3, 2),
        temperature=0.7,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        stop=StopConditions(min_new_tokens=5),
    )
    ids = torch.tensor([[1, 2, 3, 2, 44, 45]])
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            MinNewTokensLengthLogitsProcessor(4, 5, 0, device="cpu"),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )(ids, logits.clone())
    ours = sampler.truncate(Sampler(req, CPU)._biased(logits, ids, ids[:, 4:]), req.sampling)
    assert torch.equal(ours.isinf(), theirs.isinf())
    assert torch.allclose(ours.softmax(-1), theirs.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_nucleus_equals_transformers_where_nothing_ties(top_p):
    for seed in range(20):
        scores = random_logits(seed)
        theirs = TopPLogitsWarper(top_p)(None, scores)
        assert torch.equal(sampler.nucleus(scores, top_p).isinf(), theirs.isinf())


# --- log-probabilities ---


def test_logprobs_are_of_the_raw_distribution():
    logits = random_logits()
    expected = logits.log_softmax(-1)[0]
    req = request(temperature=0.0, logit_bias={44: 100.0}, output=OutputOptions(logprobs=True, top_logprobs=3), top_k=2)
    choice = choose(req, logits)
    assert choice.token_id == 44
    assert choice.logprob == pytest.approx(float(expected[44]), abs=1e-6)
    assert [token_id for token_id, _ in choice.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in choice.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-6)
    assert choice.logprob <= 0


def test_logprobs_only_where_asked_and_no_more_than_the_vocabulary():
    assert choose(request(), random_logits()).logprob is None
    none = choose(request(output=OutputOptions(logprobs=True)), random_logits())
    assert none.logprob is not None
    assert none.top == ()
    few = choose(request(output=OutputOptions(logprobs=True, top_logprobs=20)), torch.zeros(1, 4))
    assert len(few.top) == 4


# --- seeds ---


def test_same_seed_same_draws_and_other_seed_other_draws():
    logits = torch.zeros(1, VOCAB)
    assert draws(request(seed=5), logits, 20) == draws(request(seed=5), logits, 20)
    assert draws(request(seed=5), logits, 20) != draws(request(seed=6), logits, 20)
    low, high = 5, 5 + (1 << 32)  # a CPU generator by itself reads the low 32 bits only
    assert draws(request(seed=low), logits, 20) != draws(request(seed=high), logits, 20)
    assert len(draws(request(seed=(1 << 64) - 1), logits, 3)) == 3


def test_a_draw_depends_on_its_position_not_on_the_draws_before():
    logits = torch.zeros(1, VOCAB)
    whole = draws(request(seed=5), logits, 10)
    assert choose(request(seed=5), logits, (7,) * 9).token_id == whole[9]


def test_draws_neither_read_nor_move_the_global_generator():
    logits = torch.zeros(1, VOCAB)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = draws(request(seed=5), logits, 10)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert draws(request(seed=5), logits, 10) == first


def test_threads_do_not_disturb_each_other():
    logits = torch.zeros(1, VOCAB)
    alone = {seed: draws(request(seed=seed), logits, 200) for seed in range(4)}
    together = {}
    threads = [
        threading.Thread(target=lambda s=s: together.update({s: draws(request(seed=s), logits, 200)})) for s in alone
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_the_logits_given_are_left_as_they_were():
    logits = random_logits()
    before = logits.clone()
    choose(request(logit_bias={1: 5.0}, repetition_penalty=1.5, presence_penalty=1.0), logits, (1,))
    assert torch.equal(logits, before)
