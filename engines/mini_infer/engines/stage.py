"""Runs one model over one packed step. Knows how transformers' models are called, and neither requests nor sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mini_infer.engines.attention import CurrentStep, LayerCache, bind_layers
from mini_infer.engines.attention_step import AttentionStep
from mini_infer.engines.kv_cache import KVCache, LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a step feeds, on the stage's device; rows are packed one after the other."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    sample_index: torch.Tensor  # [num_samples] int64: packed places whose logits are wanted
    attention: AttentionStep


class Stage:
    """A model whose attention is ours (`guard.pack` makes it so), with a cache of its own. One thread at a time."""

    def __init__(self, model: PreTrainedModel, shapes: Sequence[LayerShape]) -> None:
        self._model = model
        self._current = CurrentStep()
        self.shapes = tuple(shapes)
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        """Logits of one token, padding of the vocabulary included."""

    def bind(self, cache: KVCache) -> None:
        """Keys and values go into ``cache`` from now on."""
        bind_layers(self._model, lambda layer: LayerCache(cache.keys[layer], cache.values[layer], self._current))

    def run(self, inputs: StepInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [num_samples, vocab_size] of one step. Runs under the caller's inference mode; waits for no device.

        ``hidden`` is what the stage before this one made; the first stage gets None.
        """
        assert hidden is None
        self._current.step = inputs.attention
        try:
            outputs = self._model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.sample_index,
            )
        finally:
            self._current.step = None  # it holds tensors
        logits: torch.Tensor = outputs.logits[0]  # [num_samples, vocab_size]
        return logits
