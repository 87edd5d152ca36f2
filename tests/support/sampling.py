"""Requests for the sampler's tests, and the slow, obvious definition of what a request's next token may be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from mini_infer.engines.api import FinishReason, OutputOptions, PreparedRequest, Sampling, StopConditions
from mini_infer.engines.sampling_table import SamplingTable

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
    """A prepared request that samples from the whole distribution, but for what is said."""
    return PreparedRequest(
        key="a",
        prompt_ids=tuple(prompt),
        sampling=replace(NEUTRAL, **sampling),
        stop=replace(stop, max_new_tokens=100),
        eos_token_ids=eos,
        limit_reason=FinishReason.MAX_NEW_TOKENS,
        output=output,
    )


def choose(requests, logits: Tensor, answers=None):
    """The choices of some requests in one step. Each is one row; ``answers`` are what they have got so far."""
    answers = answers or [()] * len(requests)
    histories = [(*req.prompt_ids, *answer) for req, answer in zip(requests, answers, strict=True)]
    garbage = -(10**12)  # what the table holds behind a row's end counts for nothing
    token_table = torch.full((len(requests), max(map(len, histories)) + 3), garbage)
    sampling_table = SamplingTable(len(requests), CPU)
    for slot, (req, history) in enumerate(zip(requests, histories, strict=True)):
        sampling_table.set(slot, req)
        token_table[slot, : len(history)] = torch.tensor(history)
    rows = [(slot, len(history)) for slot, history in enumerate(histories)]
    return sampling_table.choose(logits, rows, token_table).to_host()


def choose_one(req, logits: Tensor, answer=()):
    """The choice of one request alone, by its logits [1, vocab]."""
    (choice,) = choose([req], logits, [answer])
    return choice


def draws(req, logits: Tensor, num: int = 2000):
    """One draw at each position of a long answer of the same token."""
    table = SamplingTable(1, CPU)
    table.set(0, req)
    num_prompt = len(req.prompt_ids)
    token_table = torch.tensor([[*req.prompt_ids, *([7] * num)]])
    rows = [(0, num_prompt + position) for position in range(num)]
    return table.choose(logits.expand(num, -1), rows, token_table).token_ids.tolist()


def probabilities(req, logits: Tensor, answer=()) -> Tensor:
    """The chance of each token to be the next one: [vocab] float64. ``logits`` is [vocab]. Sorts, and loops."""
    sampling, scores = req.sampling, logits.double()
    for token_id, bias in sampling.logit_bias.items():
        scores[token_id] += bias
    for token_id in {*req.prompt_ids, *answer}:
        penalty = sampling.repetition_penalty
        scores[token_id] *= penalty if scores[token_id] < 0 else 1 / penalty
    for token_id, count in Counter(answer).items():
        scores[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * count
    if len(answer) < req.stop.min_new_tokens:
        scores[[*req.eos_token_ids, *req.stop.token_ids]] = -torch.inf
    if sampling.is_greedy:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    return truncate(scores / sampling.temperature, sampling)


def truncate(scores: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities that top_k, then top_p, then min_p leave of scores [vocab], after the temperature."""
    scores, order = scores.sort(stable=True, descending=True)  # the lowest id first where tokens tie
    if sampling.top_k:
        scores[sampling.top_k :] = -torch.inf
    chances = scores.softmax(-1)
    if sampling.top_p < 1:
        before = chances.cumsum(-1) - chances
        before[0] = 0.0
        chances[before >= sampling.top_p] = 0.0
    chances[chances < sampling.min_p * chances[0]] = 0.0
    return torch.zeros_like(chances).scatter(0, order, chances / chances.sum())
