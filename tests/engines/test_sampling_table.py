import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import CPU, choose, choose_one, draws, probabilities, request

from mini_infer.engines.api import OutputOptions, StopConditions
from mini_infer.engines.sampling_table import SamplingTable

VOCAB = 300


def random_logits(seed=0, scale=3.0, rows=1):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


# --- extremes ---


SHARP = [
    {"temperature": 0.0, "seed": None},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 2.0, "top_p": 1e-6},
    {"temperature": 2.0, "top_p": 1e-9},
    {"temperature": 2.0, "min_p": 1.0},
    {"temperature": 1e-4},
    {"temperature": 1e-6},
    {"temperature": 1e-30},
    {"temperature": 1e-300},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sharpest_settings_are_greedy(dtype):
    for seed in range(20):
        logits = random_logits(seed).to(dtype)
        if dtype is not torch.float32 and logits.float().topk(2).values.diff() == 0:
            continue  # a tie: only the settings below promise which one
        choices = choose([request(**sharp) for sharp in SHARP], logits.expand(len(SHARP), -1))
        assert {choice.token_id for choice in choices} == {int(logits.argmax())}


@pytest.mark.parametrize(
    "sharp", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.5}]
)
def test_where_tokens_tie_the_lowest_id_wins_as_in_argmax(sharp):
    logits = torch.zeros(1, VOCAB)
    logits[0, [50, 9, 200]] = 4.0
    assert set(draws(request(**{"temperature": 2.0, **sharp}), logits, 50)) == {9}


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 0.7, 100.0, 1e6])
def test_every_legal_extreme_gives_a_token(temperature):
    extremes = [
        request(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=1e-30,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias={5: 100.0, 6: -100.0},
        )
        for top_p in (1e-9, 0.5, 1.0)
        for top_k in (0, 1, 5, 10_000)
        for min_p in (0.0, 0.5, 1.0)
    ]
    for scale in (0.0, 1.0, 1e30):
        logits = random_logits(scale=scale, rows=len(extremes))
        for choice in choose(extremes, logits, [(7, 7)] * len(extremes)):
            assert 0 <= choice.token_id < VOCAB
            assert choice.error is None


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, [3, 4]] = torch.tensor([0.0, -3.0])
    assert set(draws(request(), logits)) == {3, 4}


@pytest.mark.parametrize("wishes", [{"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 50, "min_p": 0.1}])
def test_a_row_that_is_no_distribution_fails_alone(wishes):
    nan, inf = float("nan"), float("inf")
    logits = random_logits(rows=6)
    good = [choose_one(request(**wishes), logits[row : row + 1]) for row in range(6)]
    logits[0, 17], logits[1, 17], logits[2], logits[4, 0] = nan, inf, -inf, nan
    logits[4, 1] = inf
    output = OutputOptions(logprobs=True, top_logprobs=2)
    choices = choose([request(output=output), *[request(**wishes)] * 5], logits)
    assert [choice.error for choice in choices] == [
        *["the model's logits are not numbers"] * 3,
        None,
        "the model's logits are not numbers",
        None,
    ]
    assert [choices[3], choices[5]] == [good[3], good[5]]
    assert choices[0].logprob is None


def test_nothing_left_to_choose_fails_alone():
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[:, 0] = 1.0  # only the end token, and the first row holds it back
    for temperature in (0.0, 1.0):
        held = request(stop=StopConditions(min_new_tokens=1), temperature=temperature)
        failed, other = choose([held, request(temperature=temperature)], logits)
        assert failed.error == "no token is left to choose from"
        assert other.token_id == 0
        assert other.error is None


# --- effects ---


def test_no_hidden_top_k():
    assert len(set(draws(request(), torch.zeros(1, VOCAB)))) > 150


def test_a_cut_that_is_not_asked_for_is_not_made():
    plain = draws(request(temperature=3.0), random_logits())
    assert plain == draws(request(temperature=3.0, top_k=VOCAB, top_p=1.0, min_p=1e-12), random_logits())


@pytest.mark.parametrize(
    ("wishes", "kept"),
    [
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.65, "temperature": 100.0}, {0, 1, 2}),  # nearly flat: 0.25 each
        ({"top_k": 2, "top_p": 0.5}, {0}),  # 4/7 of what top_k left; of all four it would be two
        ({"top_k": 3, "min_p": 0.6}, {0, 1}),
        ({"min_p": 0.6, "temperature": 100.0}, {0, 1, 2, 3}),
    ],
)
def test_order_is_temperature_then_top_k_then_top_p_then_min_p(wishes, kept):
    assert set(draws(request(**wishes), torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log(), 500)) == kept


def test_logit_bias_bans_and_forces():
    logits = random_logits(scale=1.0)
    best = int(logits.argmax())
    assert choose_one(request(temperature=0.0, logit_bias={best: -100.0}), logits).token_id != best
    assert choose_one(request(temperature=0.0, logit_bias={44: 100.0, 45: 50.0}), logits).token_id == 44


def test_repetition_penalty_counts_prompt_and_answer():
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 7, 9]] = torch.tensor([1.2, 1.1, 1.0])
    assert choose_one(request(temperature=0.0), logits).token_id == 2
    assert choose_one(request(temperature=0.0, repetition_penalty=1.5), logits).token_id == 7
    assert choose_one(request(temperature=0.0, repetition_penalty=1.5), logits, (7,)).token_id == 9


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_presence_and_frequency_penalties_count_the_answer_only(name):
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 9]] = torch.tensor([1.0, 0.8])
    req = request(temperature=0.0, **{name: 0.5})
    assert choose_one(req, logits).token_id == 2  # 2 is in the prompt
    assert choose_one(req, logits, (2,)).token_id == 9


def test_min_new_tokens_holds_back_end_and_stop_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, [0, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])
    req = request(temperature=0.0, stop=StopConditions(min_new_tokens=2, token_ids=(8,)))
    assert [choose_one(req, logits, answer).token_id for answer in ((), (9,), (9, 9))] == [9, 9, 0]


def test_end_tokens_that_the_model_does_not_have_are_no_failure():
    logits = random_logits()
    logits[0, 0] = 100.0
    req = request(temperature=0.0, stop=StopConditions(min_new_tokens=2), eos=frozenset({0, VOCAB + 5}))
    choice = choose_one(req, logits)
    assert choice.error is None
    assert choice.token_id != 0
    assert choose_one(request(temperature=0.0, stop=StopConditions(min_new_tokens=2), eos=frozenset()), logits)


def test_a_token_held_back_stays_so_whatever_biases_it():
    req = request(temperature=0.0, logit_bias={0: 100.0}, stop=StopConditions(min_new_tokens=1))
    assert choose_one(req, torch.zeros(1, VOCAB)).token_id == 1


def test_a_slot_forgets_the_request_before():
    table, logits = SamplingTable(1, CPU), torch.zeros(1, VOCAB)
    logits[0, [0, 2, 5, 9]] = torch.tensor([2.0, 1.0, 0.9, 0.8])
    token_table = torch.tensor([[1, 2, 3]])
    everything = request(
        logit_bias={9: 100.0, 5: -100.0},
        repetition_penalty=50.0,
        top_k=3,
        stop=StopConditions(min_new_tokens=9, token_ids=(2, 5)),
        output=OutputOptions(logprobs=True, top_logprobs=3),
    )
    table.set(0, everything)
    assert table.choose(logits, [(0, 3)], token_table).to_host()[0].token_id == 9
    stop = StopConditions(min_new_tokens=9, token_ids=(7,))
    table.set(0, request(temperature=0.0, logit_bias={9: 0.1}, stop=stop, eos=frozenset()))
    (choice,) = table.choose(logits, [(0, 3)], token_table).to_host()
    assert choice.token_id == 0
    assert choice.logprob is None


# --- company ---


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-30, 0.7, 1.0, 100.0]),
        "top_k": st.sampled_from([0, 1, 5, 40, 10_000]),
        "top_p": st.sampled_from([1e-9, 0.5, 0.95]),
        "min_p": st.sampled_from([0.05, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.3, 100.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.3, 0.5]),
        "seed": st.integers(0, (1 << 64) - 1),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -3.0, 4.0, 100.0]), max_size=6
        ),
        "stop": st.builds(StopConditions, min_new_tokens=st.integers(0, 4), token_ids=st.sampled_from([(), (5, 6)])),
        "output": st.builds(OutputOptions, logprobs=st.just(True), top_logprobs=st.integers(0, 20)),
    },
)
ROWS = st.lists(
    st.tuples(SETTINGS, st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(0, 9)), min_size=2, max_size=6
)


@settings(deadline=None, max_examples=150)
@given(ROWS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_row_gets_in_any_company_what_it_gets_alone(rows, dtype):
    logits = torch.cat([random_logits(seed) for *_, seed in rows]).to(dtype)
    requests, answers = [request(**wishes) for wishes, *_ in rows], [answer for _, answer, _ in rows]
    together = choose(requests, logits, answers)
    for row, req in enumerate(requests):
        assert choose_one(req, logits[row : row + 1], answers[row]) == together[row]


@settings(deadline=None, max_examples=150)
@given(ROWS)
def test_what_is_chosen_is_possible_by_the_slow_definition(rows):
    logits = torch.cat([random_logits(seed) for *_, seed in rows])
    requests, answers = [request(**wishes) for wishes, *_ in rows], [answer for _, answer, _ in rows]
    for row, choice in enumerate(choose(requests, logits, answers)):
        assert probabilities(requests[row], logits[row], answers[row])[choice.token_id] > 0


def test_rows_may_be_any_slots_in_any_order():
    table, logits = SamplingTable(5, CPU), random_logits(rows=3)
    token_table = torch.tensor([[1, 2, 3, 7, 7]] * 5)
    for slot in range(5):
        table.set(slot, request(seed=slot, top_k=slot, repetition_penalty=1.0 + slot))
    rows = [(4, 5), (1, 3), (2, 4)]
    together = table.choose(logits, rows, token_table).to_host()
    alone = [table.choose(logits[[n]], [row], token_table).to_host()[0] for n, row in enumerate(rows)]
    assert together == alone


def test_a_large_vocabulary_too_is_the_same_alone_and_in_company():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50_001, generator=generator) * 3
    requests = [request(seed=seed, top_p=0.9, output=OutputOptions(logprobs=True)) for seed in range(6)]
    alone = [choose_one(req, logits[row : row + 1]) for row, req in enumerate(requests)]
    assert choose(requests, logits) == alone


def test_a_choice_reads_nothing_back_from_the_device():
    """On torch's meta device there are shapes and no values: whoever asks for one fails."""
    meta = torch.device("meta")
    everything = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "logit_bias": {4: 1.0}}
    everything |= {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    stop, output = StopConditions(min_new_tokens=9), OutputOptions(logprobs=True, top_logprobs=3)
    table = SamplingTable(3, meta)
    table.set(0, request(temperature=0.0))
    table.set(1, request(**everything, stop=stop, output=output))
    table.set(2, request(**everything, stop=stop, output=output))
    logits, token_table = torch.empty(3, VOCAB, device=meta), torch.empty(3, 9, dtype=torch.long, device=meta)
    choices = table.choose(logits, [(slot, 5) for slot in range(3)], token_table)
    assert choices.token_ids.shape == (3,)
    assert choices.top_ids.shape == (2, 3)
    with pytest.raises(RuntimeError):
        choices.to_host()


def test_the_logits_given_are_left_as_they_were():
    logits = random_logits()
    before = logits.clone()
    everything = {"logit_bias": {1: 5.0}, "repetition_penalty": 1.5, "presence_penalty": 1.0, "top_p": 0.5, "top_k": 9}
    choose_one(request(**everything, stop=StopConditions(min_new_tokens=5)), logits, (1,))
    assert torch.equal(logits, before)


# --- log-probabilities ---


def test_logprobs_are_of_the_raw_distribution():
    logits = random_logits()
    expected = logits.log_softmax(-1)[0]
    output = OutputOptions(logprobs=True, top_logprobs=3)
    choice = choose_one(request(temperature=0.0, logit_bias={44: 100.0}, output=output, top_k=2), logits)
    assert choice.token_id == 44
    assert choice.logprob == pytest.approx(float(expected[44]), abs=1e-6)
    assert [token_id for token_id, _ in choice.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in choice.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-6)
    assert choice.logprob <= 0


def test_each_row_gets_the_logprobs_that_it_wants():
    logits = random_logits(rows=4)
    outputs = [OutputOptions(logprobs=True, top_logprobs=2), OutputOptions(), OutputOptions(logprobs=True)]
    outputs.append(OutputOptions(logprobs=True, top_logprobs=5))
    choices = choose([request(output=output) for output in outputs], logits)
    assert [len(choice.top) for choice in choices] == [2, 0, 0, 5]
    assert choices[1].logprob is None
    for row in (0, 2, 3):
        expected = logits[row].log_softmax(-1)
        assert choices[row].logprob == pytest.approx(float(expected[choices[row].token_id]), abs=1e-6)
        assert all(value == pytest.approx(float(expected[token_id]), abs=1e-6) for token_id, value in choices[row].top)


def test_logprobs_are_never_positive():
    logits = torch.full((1, VOCAB), -100.0)
    logits[0, 5] = 100.0
    choice = choose_one(request(output=OutputOptions(logprobs=True, top_logprobs=20)), logits)
    assert choice.logprob == 0.0
    assert max(value for _, value in choice.top) <= 0.0


def test_no_more_top_logprobs_than_the_vocabulary_has_tokens():
    assert len(choose_one(request(output=OutputOptions(logprobs=True, top_logprobs=20)), torch.zeros(1, 4)).top) == 4


# --- seeds ---


def test_same_seed_same_draws_and_other_seed_other_draws():
    logits = torch.zeros(1, VOCAB)
    assert draws(request(seed=5), logits, 20) == draws(request(seed=5), logits, 20)
    assert draws(request(seed=5), logits, 20) != draws(request(seed=6), logits, 20)
    for bit in range(64):
        assert draws(request(seed=5), logits, 20) != draws(request(seed=5 ^ (1 << bit)), logits, 20)
    assert len(draws(request(seed=(1 << 64) - 1), logits, 3)) == 3


def test_a_draw_depends_on_its_position_in_the_answer_alone():
    logits = torch.zeros(1, VOCAB)
    whole = draws(request(seed=5), logits, 10)
    assert choose_one(request(seed=5), logits, (7,) * 9).token_id == whole[9]
    assert draws(request(prompt=range(1, 50), seed=5), logits, 10) == whole
    assert len(set(whole)) > 5


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
