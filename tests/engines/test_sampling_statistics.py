"""Each setting gives the distribution that its definition says: 100 000 draws against the slow reference."""

from dataclasses import replace

import pytest
import torch
from support.sampling import CPU, probabilities, request

from mini_infer.engines.sampling_table import SamplingTable

VOCAB = 24
NEVER = VOCAB - 1  # impossible by its logit, so that an answer of it changes nothing
PROMPT = (1, 2, 3)
ANSWER = (5, 5, 6, 2)
NUM_SEEDS, NUM_POSITIONS = 200, 500

# What is asked for, and a wrong value that the test has to tell from it.
SETTINGS = {
    "temperature": (0.8, 0.83),
    "top_k": (6, 7),
    "top_p": (0.7, 0.85),
    "min_p": (0.2, 0.1),
    "repetition_penalty": (1.3, 1.2),
    "presence_penalty": (0.6, 0.75),
    "frequency_penalty": (0.4, 0.5),
    "logit_bias": ({4: 1.0, 2: -1.0}, {4: 1.0, 2: -1.15}),
}


@pytest.fixture(scope="module", autouse=True)
def _a_large_piece_was_freed():
    """Until then glibc gives back all that a step frees, and fetches it again: ten times slower here."""
    torch.empty(30 << 20, dtype=torch.uint8)


def logits():
    """[vocab]. What was said before is likely, so that penalties show; one of it is below 0, the others above."""
    values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    values[[2, 3, 4, 5, 6]] = torch.tensor([2.5, -0.5, 2.0, 3.0, 2.2])
    values[NEVER] = -torch.inf
    return values


def counts(first_seed=0, num_positions=NUM_POSITIONS, **wishes):
    """How often each token is drawn by each of some seeds at each of some positions."""
    table = SamplingTable(NUM_SEEDS, CPU)
    for slot in range(NUM_SEEDS):
        table.set(slot, request(PROMPT, seed=first_seed + slot, **wishes))
    history = (*PROMPT, *ANSWER, *[NEVER] * num_positions)
    token_table = torch.tensor([history]).expand(NUM_SEEDS, -1)
    rows_of_logits = logits().expand(NUM_SEEDS, -1)
    counted = torch.zeros(VOCAB, dtype=torch.int64)
    for length in range(len(PROMPT) + len(ANSWER), len(history)):
        choices = table.choose(rows_of_logits, [(slot, length) for slot in range(NUM_SEEDS)], token_table)
        counted += choices.token_ids.bincount(minlength=VOCAB)
    return counted


def chance_of_such_counts(counted, expected):
    """The p-value of Pearson's chi-square test. ``expected`` are probabilities; what cannot be must not have been."""
    possible = expected > 0
    assert possible.sum() > 1
    if counted[~possible].any():
        return 0.0
    wanted = expected[possible] * counted.sum()
    assert wanted.min() > 5  # else the statistic is not distributed as chi-square
    statistic = ((counted[possible] - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2.0, statistic.float() / 2))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_gives_its_distribution_and_no_other(name):
    right, wrong = SETTINGS[name]
    counted = counts(**{name: right})

    def chance(value):
        return chance_of_such_counts(counted, probabilities(request(PROMPT, **{name: value}), logits(), ANSWER))

    assert chance(right) > 0.01
    assert chance(wrong) < 1e-6


def test_the_settings_together_give_their_distribution():
    wishes = {name: right for name, (right, _) in SETTINGS.items()}
    wishes.update(top_k=12, top_p=0.95, min_p=0.02)
    counted = counts(num_positions=100, **wishes)
    req = request(PROMPT, **wishes)
    assert chance_of_such_counts(counted, probabilities(req, logits(), ANSWER)) > 0.01
    other = replace(req, sampling=replace(req.sampling, temperature=0.9))
    assert chance_of_such_counts(counted, probabilities(other, logits(), ANSWER)) < 1e-6


@pytest.mark.parametrize("first_seed", [0, 12_345, 1 << 32, (1 << 64) - NUM_SEEDS])
def test_seeds_in_a_row_give_the_distribution_too(first_seed):
    counted = counts(first_seed)
    assert chance_of_such_counts(counted, probabilities(request(PROMPT), logits(), ANSWER)) > 0.01


def test_neighbouring_seeds_and_positions_are_independent():
    """Pairs of draws that lie side by side fall into a flat table of pairs."""
    num, side = 400, 8
    table = SamplingTable(num, CPU)
    for slot in range(num):
        table.set(slot, request(PROMPT, seed=slot))
    token_table = torch.tensor([[*PROMPT, *[0] * num]]).expand(num, -1)
    flat, rows = torch.zeros(num, side), range(num)
    drawn = torch.stack(
        [
            table.choose(flat, [(slot, len(PROMPT) + at) for slot in rows], token_table).token_ids
            for at in range(num // 2)
        ]
    )  # [positions, seeds]
    even = torch.full((side * side,), 1 / side**2, dtype=torch.float64)
    for one, next_one in ((drawn[::2], drawn[1::2]), (drawn[:, ::2], drawn[:, 1::2])):
        assert chance_of_such_counts((one * side + next_one).flatten().bincount(minlength=side**2), even) > 0.01
