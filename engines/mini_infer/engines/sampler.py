"""The choice of the next token of one stream, from raw logits. Knows no model, no text and no thread.

Order: logit_bias, repetition, presence and frequency penalties, end tokens held back by min_new_tokens, temperature,
top_k, top_p, min_p. All in float32. Functions take scores of shape [rows, vocab] and return new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from mini_infer.engines.api import PreparedRequest, Sampling
from mini_infer.engines.errors import StreamFailed

_FLOAT32 = torch.finfo(torch.float32)
_MASK64 = (1 << 64) - 1
_OFF = float("-inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token. Log-probabilities are of the raw distribution; None and empty where they were not asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # best first: token id, logprob


class Sampler:
    """Chooses the tokens of one stream. What it draws depends on the stream's seed and the position alone."""

    def __init__(self, request: PreparedRequest, device: torch.device) -> None:
        self._request = request
        self._sampling = request.sampling
        self._generator = torch.Generator(device)

    def choose(self, input_ids: Tensor, logits: Tensor) -> Choice:
        """The next token after ``input_ids`` [1, prompt and answer so far], by its ``logits`` [1, vocab], any dtype.

        Raises `StreamFailed` where the logits are no distribution, or where nothing is left to choose from.
        """
        logits = logits.float()
        require_distribution(logits, "the model's logits are not numbers")
        num_prompt = len(self._request.prompt_ids)
        scores = self._biased(logits, input_ids, input_ids[:, num_prompt:])
        require_distribution(scores, "no token is left to choose from")
        token_id = int(self._pick(scores, input_ids.shape[1] - num_prompt))
        if not self._request.output.logprobs:
            return Choice(token_id)
        return Choice(token_id, *raw_logprobs(logits, token_id, self._request.output.top_logprobs))

    def _biased(self, scores: Tensor, input_ids: Tensor, answer_ids: Tensor) -> Tensor:
        """What holds for greedy decoding too."""
        sampling, stop = self._sampling, self._request.stop
        if sampling.logit_bias:
            scores = add_bias(scores, sampling.logit_bias)
        if sampling.repetition_penalty not in (None, 1.0):
            scores = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))(input_ids, scores)
            scores = scores.clamp(max=_FLOAT32.max)  # a penalty near 0 makes infinities
        if sampling.presence_penalty or sampling.frequency_penalty:
            scores = penalise_answer(
                scores, answer_ids, sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
            )
        if answer_ids.shape[1] < stop.min_new_tokens:
            scores = without(scores, self._request.eos_token_ids.union(stop.token_ids))
        return scores

    def _pick(self, scores: Tensor, position: int) -> Tensor:
        if self._sampling.is_greedy:
            return scores.argmax(-1)
        seed = self._sampling.seed
        assert seed is not None, "a request that samples has a seed"
        self._generator.manual_seed(mix(seed, position))
        return draw(truncate(scores, self._sampling), self._generator)


def require_distribution(scores: Tensor, message: str) -> None:
    """Raises `StreamFailed` where a row holds NaN or +inf, or nothing but -inf: its maximum shows all three."""
    if not bool(scores.amax(-1).isfinite().all()):
        raise StreamFailed(message)


def raw_logprobs(logits: Tensor, token_id: int, num_top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of a token and the ``num_top`` most probable tokens with theirs. ``logits`` is [1, vocab]."""
    logprobs = logits.log_softmax(-1)[0]
    values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
    return float(logprobs[token_id]), tuple(zip(ids.tolist(), values.tolist(), strict=True))


def add_bias(scores: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Adds to single logits."""
    ids = torch.tensor(list(bias), device=scores.device)
    return scores.index_add(-1, ids, torch.tensor([list(bias.values())], device=scores.device).expand(len(scores), -1))


def penalise_answer(scores: Tensor, answer_ids: Tensor, presence: float, frequency: float) -> Tensor:
    """Subtracts ``presence`` from tokens that the answer [1, length] holds, and ``frequency`` for each time it does."""
    counts = torch.bincount(answer_ids[0], minlength=scores.shape[-1])
    return scores - presence * (counts > 0) - frequency * counts


def without(scores: Tensor, token_ids: Iterable[int]) -> Tensor:
    """Makes tokens impossible. A tokenizer may know end tokens that the model does not have."""
    known = [token_id for token_id in token_ids if token_id < scores.shape[-1]]
    return scores.index_fill(-1, torch.tensor(known, dtype=torch.long, device=scores.device), _OFF)


def truncate(scores: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then top_k, top_p and min_p, each on what the one before left."""
    scores = heat(scores, sampling.temperature or 0.0)
    unread: Any = None  # transformers' own take the ids too
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(unread, scores)
    if sampling.top_p is not None and sampling.top_p < 1:
        scores = nucleus(scores, sampling.top_p)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(unread, scores)
    return scores


def heat(scores: Tensor, temperature: float) -> Tensor:
    """Divides by the temperature. Only differences count, so the best is put at 0 first: then nothing overflows."""
    return (scores - scores.amax(-1, keepdim=True)) / max(temperature, _FLOAT32.tiny)


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keeps the smallest set of most probable tokens that has at least ``top_p`` together; always at least one.

    The stable sort lets the lowest id win where tokens tie, as argmax does; transformers' own keeps the highest.
    """
    values, order = scores.sort(stable=True, dim=-1, descending=True)
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    before[..., 0] = 0.0
    return scores.masked_fill((before >= top_p).scatter(-1, order, before >= top_p), _OFF)


def draw(scores: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each row, by its softmax: the winner of a race of exponential clocks.

    The token whose Exp(1) / probability is least wins with its probability (gpt-fast, LLaMA inference code).
    """
    clocks = torch.empty_like(scores).exponential_(generator=generator)
    clocks.clamp_(min=_FLOAT32.tiny)  # a clock at 0 would let an impossible token win by 0 / 0
    return (scores.softmax(-1) / clocks).argmax(-1)


def mix(seed: int, position: int) -> int:
    """A 64-bit seed for one position: splitmix64's finaliser, since a CPU generator reads the low 32 bits only."""
    value = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
