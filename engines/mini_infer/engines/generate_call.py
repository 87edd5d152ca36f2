"""One call of ``model.generate``, driven from outside through three hooks. Knows no thread and no engine.

`generate` keeps the loop, the cache and the model's peculiarities. Ours are the choice of the token (a logits
processor), its hand-over (a streamer) and the end (a stopping criterion). Decoding is greedy as far as `generate`
knows: the processor leaves it one token to take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from mini_infer.engines.api import PreparedRequest
from mini_infer.engines.batch import Choice
from mini_infer.engines.errors import StreamFailed
from mini_infer.engines.model import LoadedModel
from mini_infer.engines.sampling_table import SamplingTable

HandOver = Callable[[Choice], bool]
"""Takes a chosen token; says whether it was the last."""


def generate(loaded: LoadedModel, request: PreparedRequest, hand_over: HandOver) -> None:
    """Generates one answer and returns when it has ended. Raises `StreamFailed`, and whatever the model raises.

    Every setting is passed, so that nothing is taken from the model's files.
    """
    step = _Step(request, loaded.device, hand_over)
    input_ids = torch.tensor([request.prompt_ids], device=loaded.device)  # [1, num_prompt_tokens]
    model: Any = loaded.model
    config = GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=request.stop.max_new_tokens, use_cache=True)
    with torch.inference_mode():
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([_Choose(step)]),
            stopping_criteria=StoppingCriteriaList([_Stop(step)]),
            streamer=_Feed(step),
        )


class _Step:
    """What `generate`'s three hooks share: the token chosen in this step, and whether it was the last.

    Which of the other two hooks comes first differs between versions of transformers. The first one hands the token
    over, so that the end is known in the same step and no forward pass is run for nothing.
    """

    def __init__(self, request: PreparedRequest, device: torch.device, hand_over: HandOver) -> None:
        self._table = SamplingTable(1, device)
        self._table.set(0, request)
        self._hand_over = hand_over
        self._choice: Choice | None = None
        self._is_done = False

    def choose(self, input_ids: Tensor, logits: Tensor) -> int:
        """The token of this step, after ``input_ids`` [1, length], by its ``logits`` [1, vocab].

        Raises `StreamFailed` where the logits are no distribution, or where nothing is left to choose from.
        """
        (choice,) = self._table.choose(logits, [(0, input_ids.shape[1])], input_ids).to_host()
        if choice.error is not None:
            raise StreamFailed(choice.error)
        self._choice = choice
        return choice.token_id

    def settle(self) -> bool:
        """Hands the token over, unless that was done. Returns whether the stream has ended."""
        choice, self._choice = self._choice, None
        if choice is not None:
            self._is_done = self._hand_over(choice)
        return self._is_done


class _Choose(LogitsProcessor):
    def __init__(self, step: _Step) -> None:
        self._step = step

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # both [1, ...]
        token_id = self._step.choose(input_ids, scores)
        only = torch.full_like(scores, float("-inf"))
        only[0, token_id] = 0.0
        return only


class _Stop(StoppingCriteria):
    def __init__(self, step: _Step) -> None:
        self._step = step

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:  # noqa: ARG002  # generate's signature
        return torch.tensor([self._step.settle()], device=input_ids.device)


class _Feed(BaseStreamer):
    """`generate`'s streamer. What it is given, the prompt and then the tokens, the step knows already."""

    def __init__(self, step: _Step) -> None:
        self._step = step

    def put(self, value: Any) -> None:  # noqa: ARG002  # a streamer's signature
        self._step.settle()

    def end(self) -> None:
        """The engine ends the streamer, also where `generate` never comes here."""
