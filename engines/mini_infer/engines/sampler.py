"""From raw logits to the next tokens of many streams at once: the steps, as functions. Knows no request, slot or text.

Scores are [rows, vocab] float32, parameters [rows, 1]. Each row is worked on alone: sums that decide are sums of
integers, so that neither company nor a device's order of adding changes a choice. Nothing here waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOT_NUMBERS = -1
"""In the place of a token id: the row holds NaN or +inf, or nothing but -inf."""
NOTHING_LEFT = -2
"""In the place of a token id: bias, penalties and tokens held back leave nothing to choose from."""

_FLOAT32 = torch.finfo(torch.float32)
_WEIGHT_OF_BEST = 1 << 44  # the weights of 2**19 - 1 tokens add up to less than 2**63
_DIGIT_BITS = 11  # three of them hold a rank
_NUM_DIGITS = 1 << _DIGIT_BITS
_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


# --- what holds for greedy decoding too ---------------------------------------------------------------------------


def add_at(scores: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Adds ``values`` to single tokens, both [rows, num]; ids that the model does not have are passed over."""
    known = (token_ids >= 0) & (token_ids < scores.shape[-1])
    return scores.scatter_add(-1, token_ids * known, values.masked_fill(~known, 0.0))


def count_tokens(token_ids: Tensor, counted: Tensor, vocab_size: int) -> Tensor:
    """How often each token is among ``token_ids`` where ``counted``, both [rows, length]: [rows, vocab] float32."""
    counts = torch.zeros(len(token_ids), vocab_size, device=token_ids.device)
    return counts.scatter_add_(-1, token_ids * counted, counted.float())  # what does not count may be no token id


def penalise_repetition(scores: Tensor, counts: Tensor, penalty: Tensor) -> Tensor:
    """Divides the scores of tokens seen before, and multiplies where they are negative (CTRL, arXiv 1909.05858)."""
    penalised = torch.where(scores < 0, scores * penalty, scores / penalty.clamp(min=_FLOAT32.tiny))
    return torch.where(counts > 0, penalised, scores).clamp(max=_FLOAT32.max)  # a penalty near 0 makes infinities


def penalise_answer(scores: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Subtracts ``presence`` from tokens that the answer holds, and ``frequency`` for each time it does."""
    return scores - presence * (counts > 0) - frequency * counts


def judge(token_ids: Tensor, raw_best: Tensor, best: Tensor) -> Tensor:
    """`NOT_NUMBERS` or `NOTHING_LEFT` instead of a token where a row's maximum, all [rows], is not finite.

    A maximum shows all three: NaN, +inf, and nothing but -inf. ``raw_best`` is of the logits, ``best`` of the scores.
    """
    token_ids = token_ids.masked_fill(~best.isfinite(), NOTHING_LEFT)
    return token_ids.masked_fill(~raw_best.isfinite(), NOT_NUMBERS)


# --- sampling -----------------------------------------------------------------------------------------------------


def heat(scores: Tensor, temperature: Tensor) -> Tensor:
    """Divides by the temperature. Only differences count, so the best is put at 0 first: then nothing overflows."""
    return (scores - scores.amax(-1, keepdim=True)) / temperature.clamp(min=_FLOAT32.tiny)


def weigh(scores: Tensor) -> Tensor:
    """Probabilities as integers, for scores whose best is 0: [rows, vocab] int64. Below 2**-44 of the best is 0."""
    return scores.exp().mul_(_WEIGHT_OF_BEST).long()


def rank(scores: Tensor) -> Tensor:
    """Numbers from 0 to 2**32 - 1 (int64) that are lower where a score is higher, and equal where scores are equal.

    The bits of a float32, taken as an integer, are ordered as the numbers are, backwards where they are negative.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 become one number
    return ((bits >> 31) & 0x7FFFFFFF).bitwise_xor_(bits).long().neg_().add_(0x7FFFFFFF)


def keep_top_k(weights: Tensor, ranks: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Keeps the ``top_k`` (int64, 1 to ``most``) best tokens; of tokens that tie those with the lowest ids."""
    last = ranks.topk(most, largest=False).values.gather(-1, top_k - 1)  # [rows, 1]
    num_ties = top_k - (ranks < last).sum(-1, keepdim=True)
    return weights * _up_to(last, ranks, (ranks == last).long(), num_ties)


def keep_top_p(weights: Tensor, ranks: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest best tokens that weigh at least ``top_p`` (float64) of all: one or more."""
    total = weights.sum(-1, keepdim=True)
    enough = torch.minimum((total * top_p).ceil().long().clamp(min=1), total)
    return weights * first(ranks, weights, enough)


def keep_min_p(weights: Tensor, min_p: Tensor) -> Tensor:
    """Keeps tokens with at least ``min_p`` (float64) of the weight of the best."""
    return weights * (weights >= min_p * _WEIGHT_OF_BEST)


def first(ranks: Tensor, amounts: Tensor, enough: Tensor) -> Tensor:
    """The fewest first tokens whose ``amounts`` together are ``enough``: [rows, vocab] bool.

    First is the lowest rank, then the lowest id. A sort would tell, but takes several times as long. So we look for the
    last token that is needed, as one looks up a word: letter by letter of its rank, then by the id among those of the
    same rank. ``amounts`` are int64, of sum ``enough`` or more.
    """
    last = torch.zeros_like(enough)  # [rows, 1]: as much of the rank of the last token as is known
    among = amounts  # of the tokens whose rank begins like this
    for shift in (2 * _DIGIT_BITS, _DIGIT_BITS, 0):
        beginning = ranks >> shift
        digit, enough = _find_digit(beginning & (_NUM_DIGITS - 1), among, enough)
        last = (last << _DIGIT_BITS) + digit
        among = amounts * (beginning == last)
    return _up_to(last, ranks, among, enough)


def _up_to(last: Tensor, ranks: Tensor, ties: Tensor, enough: Tensor) -> Tensor:
    """Tokens of a rank before ``last``, and with it those of the lowest ids whose amounts ``ties`` are ``enough``."""
    before = ties.cumsum(-1).sub_(ties)
    return (ranks < last) | ((ranks == last) & (before < enough))


def _find_digit(digits: Tensor, amounts: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """The digit of the last token needed, and what is ``enough`` among the tokens that have it; both [rows, 1]."""
    sums = torch.zeros(len(digits), _NUM_DIGITS, dtype=torch.int64, device=digits.device)
    up_to = sums.scatter_add_(-1, digits, amounts).cumsum(-1)
    digit = torch.searchsorted(up_to, enough).clamp_(max=_NUM_DIGITS - 1)  # a row of NaN may find none
    return digit, enough - up_to.gather(-1, digit) + sums.gather(-1, digit)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One token for each row with a chance of its weight: [rows]. ``uniform`` is [rows, 1], of the function below.

    A token of weight 0 is never drawn: up to it weighs no more than before it.
    """
    up_to = weights.cumsum(-1)
    spot = (uniform * up_to[:, -1:]).long()  # at most 1 - 2**-53 of the total: no rounding reaches it
    return torch.searchsorted(up_to, spot, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A random number in [0, 1), float64, that depends on the seed and the position alone; both are int64.

    The upper 53 bits of splitmix64's output number ``position`` from a state of ``seed`` (Steele, Lea, Flood 2014).
    """
    return (_shift(mix(seed, position), 11)).double() * 2.0**-53


def mix(seed: Tensor, position: Tensor) -> Tensor:
    """64 random bits: splitmix64 in int64, whose products wrap as those of unsigned numbers do."""
    value = seed + (position + 1) * _GOLDEN
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, num_bits: int) -> Tensor:
    """To the right, filling up with zeros."""
    return (value >> num_bits) & ((1 << (64 - num_bits)) - 1)


# --- log-probabilities --------------------------------------------------------------------------------------------


def top_logprobs(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Ids and values, [rows, num_top], of the most probable tokens; the lowest id first where tokens tie.

    Since each key is another number, a row's first ones are the same however many its neighbours want.
    """
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    keys = (rank(logprobs) << 31) + ids  # [rows, vocab]
    top = keys.topk(num_top, largest=False).indices
    return top, logprobs.gather(-1, top)
