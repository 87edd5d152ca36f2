"""The sampling parameters of all slots, on the device, and the choice of their next tokens. Knows no model and no text.

Order: logit_bias, repetition, presence and frequency penalties, end tokens held back by min_new_tokens, temperature,
top_k, top_p, min_p. Each is worked out for the rows that ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import pad

from mini_infer.engines import sampler
from mini_infer.engines.api import PreparedRequest
from mini_infer.engines.batch import Choice

_ERRORS = {
    sampler.NOT_NUMBERS: "the model's logits are not numbers",
    sampler.NOTHING_LEFT: "no token is left to choose from",
}


class _Wish(Enum):
    """What a request may ask for beyond the most probable token."""

    BIAS = auto()
    REPETITION = auto()
    ANSWER = auto()
    DRAW = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    LOGPROBS = auto()
    HOLD = auto()


_CUTS = (_Wish.TOP_K, _Wish.TOP_P, _Wish.MIN_P)
_FLOAT32 = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty")
_FLOAT64 = ("top_p", "min_p")


@dataclass(frozen=True, slots=True)
class Choices:
    """The tokens of one step, on the device."""

    token_ids: Tensor  # [rows] long; -1: the logits are no numbers, -2: nothing is left to choose from
    logprobs: Tensor | None  # [wanting rows], of the raw distribution
    top_ids: Tensor | None  # [wanting rows, most wanted]
    top_logprobs: Tensor | None  # [wanting rows, most wanted]
    num_top: dict[int, int]  # of each row that wants log-probabilities

    def to_host(self) -> list[Choice]:
        """One for each row. Waits for the device: one copy."""
        parts = [each for each in (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs) if each is not None]
        flat = torch.cat([each.double().flatten() for each in parts]).tolist()  # ids too are exact in float64
        choices = [Choice(int(token_id), error=_ERRORS.get(int(token_id))) for token_id in flat[: len(self.token_ids)]]
        logprobs, tops = flat[len(choices) :][: len(self.num_top)], flat[len(choices) + len(self.num_top) :]
        top_ids, top_logprobs = tops[: len(tops) // 2], tops[len(tops) // 2 :]
        for number, (row, num_top) in enumerate(self.num_top.items()):
            begin = number * (len(top_ids) // len(self.num_top))
            top = zip(map(int, top_ids[begin:]), top_logprobs[begin:], strict=True)
            if choices[row].error is None:
                choices[row] = replace(choices[row], logprob=logprobs[number], top=tuple(islice(top, num_top)))
        return choices


class _Step:
    """What the device must know of one step: each row's slot and length, and which rows ask for what."""

    def __init__(
        self, rows: Sequence[tuple[int, int]], asking: dict[_Wish, list[int]], most_top_k: int, device: torch.device
    ) -> None:
        slots, lengths = [slot for slot, _ in rows], [length for _, length in rows]
        lists = [slots, lengths, *asking.values()]
        parts = to_device([each for part in lists for each in part], device).split([len(part) for part in lists])
        self.slots = parts[0]  # [rows]
        self.lengths = parts[1][:, None]  # [rows, 1]
        self.longest = max(lengths)
        self.most_top_k = most_top_k
        self.rows = dict(zip(asking, parts[2:], strict=True))  # [asking rows] each; of a cut: among those that draw
        self.has_cuts = not asking.keys().isdisjoint(_CUTS)


class SamplingTable:
    """One row of parameters for each slot, written when a request is admitted. One thread uses it."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        def column(dtype: torch.dtype, width: int = 1) -> Tensor:
            return torch.zeros(num_slots, width, dtype=dtype, device=device)

        self._device = device
        self._values = {name: column(torch.float32) for name in _FLOAT32} | {
            name: column(torch.float64) for name in _FLOAT64
        }
        self._values |= {name: column(torch.int64) for name in ("top_k", "seed", "num_prompt")}
        self._bias = (column(torch.int64), column(torch.float32))  # ids and what is added, [slots, most biased tokens]
        self._held = (column(torch.int64), column(torch.float32))  # end tokens and -inf, likewise
        self._asking: dict[_Wish, set[int]] = {wish: set() for wish in _Wish}  # slots
        self._held_until = [0] * num_slots  # the length from which end tokens may be chosen
        self._top_k = [0] * num_slots
        self._num_top = [0] * num_slots

    @torch.inference_mode()
    def set(self, slot: int, request: PreparedRequest) -> None:
        """Gives the slot to a request."""
        sampling, num_prompt = request.sampling, len(request.prompt_ids)
        seed = sampling.seed or 0
        values = {name: getattr(sampling, name) or 0.0 for name in (*_FLOAT32, *_FLOAT64)}
        signed_seed = seed - (1 << 64) if seed >> 63 else seed  # the same bits
        values |= {"top_k": sampling.top_k or 0, "num_prompt": num_prompt, "seed": signed_seed}
        for name, value in values.items():
            self._values[name][slot] = value
        ends = sorted(request.eos_token_ids.union(request.stop.token_ids))
        self._bias = _with_row(self._bias, slot, list(sampling.logit_bias.items()))
        self._held = _with_row(self._held, slot, [(token_id, float("-inf")) for token_id in ends])
        self._held_until[slot] = num_prompt + request.stop.min_new_tokens
        self._top_k[slot] = sampling.top_k or 0
        self._num_top[slot] = request.output.top_logprobs
        for wish, is_asked in _wishes(request).items():
            (self._asking[wish].add if is_asked else self._asking[wish].discard)(slot)

    @torch.inference_mode()
    def choose(self, logits: Tensor, rows: Sequence[tuple[int, int]], token_table: Tensor) -> Choices:
        """The next token of each row, by its ``logits`` [rows, vocab], any dtype, which are left as they are.

        A row is its slot and its length, the number of tokens before the new one; ``token_table`` [slots, max length]
        holds these tokens. The device is not waited for.
        """
        vocab_size = logits.shape[1]
        asking = self._rows_asking(rows, vocab_size)
        most_top_k = max((top_k for slot, _ in rows if (top_k := self._top_k[slot]) < vocab_size), default=0)
        step = _Step(rows, asking, most_top_k, self._device)
        raw = logits.float()
        scores = self._adjust(raw, step, token_table)
        best, token_ids = scores.max(-1)  # both [rows]; of tokens that tie the first
        if (drawing := step.rows.get(_Wish.DRAW)) is not None:
            token_ids = token_ids.index_copy(0, drawing, self._draw(_select(scores, drawing), drawing, step))
        token_ids = sampler.judge(token_ids, best if scores is raw else raw.amax(-1), best)
        num_top = {row: min(self._num_top[rows[row][0]], vocab_size) for row in asking.get(_Wish.LOGPROBS, ())}
        if not num_top:
            return Choices(token_ids, None, None, None, num_top)
        wanting = step.rows[_Wish.LOGPROBS]
        logprobs = _select(raw, wanting).log_softmax(-1)  # [wanting rows, vocab]
        chosen = _select(token_ids, wanting)[:, None].clamp(min=0)  # an id may stand for an error
        top = sampler.top_logprobs(logprobs, max(num_top.values()))
        return Choices(token_ids, logprobs.gather(-1, chosen).squeeze(-1), *top, num_top)

    def _rows_asking(self, rows: Sequence[tuple[int, int]], vocab_size: int) -> dict[_Wish, list[int]]:
        """The rows that ask for each thing that any of them asks for. Cuts count among the rows that draw."""
        drawing = [row for row in rows if row[0] in self._asking[_Wish.DRAW]]
        found = {}
        for wish, asking in self._asking.items():
            if asking:
                among = drawing if wish in _CUTS else rows
                found[wish] = [number for number, (slot, _) in enumerate(among) if slot in asking]
        if _Wish.HOLD in found:
            found[_Wish.HOLD] = [row for row in found[_Wish.HOLD] if rows[row][1] < self._held_until[rows[row][0]]]
        if _Wish.TOP_K in found:
            found[_Wish.TOP_K] = [row for row in found[_Wish.TOP_K] if self._top_k[drawing[row][0]] < vocab_size]
        return {wish: numbers for wish, numbers in found.items() if numbers}

    def _adjust(self, scores: Tensor, step: _Step, token_table: Tensor) -> Tensor:
        """What holds for greedy decoding too."""
        if (rows := step.rows.get(_Wish.BIAS)) is not None:
            old = _select(scores, rows)
            scores = _replace(scores, rows, sampler.add_at(old, *self._pairs(self._bias, rows, step)))
        if (rows := step.rows.get(_Wish.REPETITION)) is not None:
            old = _select(scores, rows)
            counts = self._counts(token_table, rows, step, old.shape[-1], answer_only=False)
            penalty = self._of("repetition_penalty", rows, step)
            scores = _replace(scores, rows, sampler.penalise_repetition(old, counts, penalty))
        if (rows := step.rows.get(_Wish.ANSWER)) is not None:
            old = _select(scores, rows)
            counts = self._counts(token_table, rows, step, old.shape[-1], answer_only=True)
            penalties = self._of("presence_penalty", rows, step), self._of("frequency_penalty", rows, step)
            scores = _replace(scores, rows, sampler.penalise_answer(old, counts, *penalties))
        if (rows := step.rows.get(_Wish.HOLD)) is not None:
            old = _select(scores, rows)
            scores = _replace(scores, rows, sampler.add_at(old, *self._pairs(self._held, rows, step)))
        return scores

    def _draw(self, scores: Tensor, rows: Tensor, step: _Step) -> Tensor:
        """A random token for each of ``rows``: [those rows]. Their scores are [those rows, vocab]."""
        scores = sampler.heat(scores, self._of("temperature", rows, step))
        weights = sampler.weigh(scores)
        weights = self._cut(weights, sampler.rank(scores), rows, step) if step.has_cuts else weights
        position = step.lengths[rows] - self._of("num_prompt", rows, step)
        return sampler.draw(weights, sampler.uniform(self._of("seed", rows, step), position))

    def _cut(self, weights: Tensor, ranks: Tensor, rows: Tensor, step: _Step) -> Tensor:
        """Makes tokens impossible: each step on what the one before left."""
        if (cut := step.rows.get(_Wish.TOP_K)) is not None:
            top_k = self._of("top_k", rows[cut], step), step.most_top_k
            weights = _replace(weights, cut, sampler.keep_top_k(_select(weights, cut), _select(ranks, cut), *top_k))
        if (cut := step.rows.get(_Wish.TOP_P)) is not None:
            top_p = self._of("top_p", rows[cut], step)
            weights = _replace(weights, cut, sampler.keep_top_p(_select(weights, cut), _select(ranks, cut), top_p))
        if (cut := step.rows.get(_Wish.MIN_P)) is not None:
            min_p = self._of("min_p", rows[cut], step)
            weights = _replace(weights, cut, sampler.keep_min_p(_select(weights, cut), min_p))
        return weights

    def _of(self, name: str, rows: Tensor, step: _Step) -> Tensor:
        """A parameter of the rows: [rows, 1]."""
        return self._values[name].index_select(0, step.slots[rows])

    def _pairs(self, pairs: tuple[Tensor, Tensor], rows: Tensor, step: _Step) -> tuple[Tensor, Tensor]:
        slots = step.slots[rows]
        return pairs[0].index_select(0, slots), pairs[1].index_select(0, slots)

    def _counts(self, token_table: Tensor, rows: Tensor, step: _Step, vocab_size: int, *, answer_only: bool) -> Tensor:
        """How often a row holds each token: [rows, vocab]. What the table holds behind a row's end is nothing."""
        token_ids = token_table[:, : step.longest].index_select(0, step.slots[rows])  # [rows, longest]
        position = torch.arange(token_ids.shape[1], device=token_ids.device)
        counted = position < step.lengths[rows]
        if answer_only:
            counted &= position >= self._of("num_prompt", rows, step)
        return sampler.count_tokens(token_ids, counted, vocab_size)


def _select(values: Tensor, rows: Tensor) -> Tensor:
    """Some rows, in order and each once; no copy where they are all."""
    return values if len(rows) == len(values) else values.index_select(0, rows)


def _replace(values: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """The values with some rows, in order and each once, replaced."""
    return new if len(rows) == len(values) else values.index_copy(0, rows, new)


def _wishes(request: PreparedRequest) -> dict[_Wish, bool]:
    sampling = request.sampling
    return {
        _Wish.BIAS: bool(sampling.logit_bias),
        _Wish.REPETITION: sampling.repetition_penalty not in (None, 1.0),
        _Wish.ANSWER: bool(sampling.presence_penalty or sampling.frequency_penalty),
        _Wish.HOLD: request.stop.min_new_tokens > 0,
        _Wish.DRAW: not sampling.is_greedy,
        _Wish.TOP_K: bool(sampling.top_k),
        _Wish.TOP_P: sampling.top_p is not None and sampling.top_p < 1,
        _Wish.MIN_P: bool(sampling.min_p),
        _Wish.LOGPROBS: request.output.logprobs,
    }


def _with_row(table: tuple[Tensor, Tensor], slot: int, pairs: Sequence[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    """The table with a slot's pairs of id and value, widened where needed. The rest of a row adds 0 to token 0."""
    ids, values = (pad(each, (0, max(0, len(pairs) - each.shape[1]))) for each in table)
    ids[slot], values[slot] = 0, 0.0
    if pairs:
        ids[slot, : len(pairs)] = to_device([token_id for token_id, _ in pairs], ids.device)
        values[slot, : len(pairs)] = to_device([value for _, value in pairs], ids.device)
    return ids, values


def to_device(numbers: Iterable[int] | Iterable[float], device: torch.device) -> Tensor:
    """Numbers of the host, [num], on the device, which is not waited for."""
    host = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
