"""Where transformers' models call our attention. Each layer's cache hangs on its own attention module, and nothing is
global: models of several threads never meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from mini_infer.engines.attention_step import AttentionStep
from mini_infer.engines.errors import NotExact
from mini_infer.engines.paged_sdpa import AttentionOptions, paged_attention, write_cache

ATTENTION_NAME = "mini_infer"
"""Under this name transformers knows our attention. No mask goes with it: models then build none."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions], torch.Tensor]
"""From query, key and value of one layer, each [heads, num_tokens, dim], to [num_tokens, num_heads, value_dim]."""

_BINDING = "_mini_infer"


class CurrentStep:
    """The step that a model's layers are in; its stage sets it."""

    step: AttentionStep | None = None


class LayerCache:
    """The attention of one layer: its keys and values, [num_blocks, block_size, num_kv_heads, dim] each."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, current: CurrentStep) -> None:
        self._keys = keys
        self._values = values
        self._current = current

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """An `Attend` for the step that the model is in."""
        step = self._current.step
        assert step is not None
        write_cache(key, value, self._keys, self._values, step)
        return paged_attention(query, self._keys, self._values, step, options)


def bind_layers(model: nn.Module, attend: Callable[[int], Attend]) -> None:
    """Hangs ``attend(layer)`` on every module that says which layer it is in."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            setattr(module, _BINDING, attend(layer))


def unbind_layers(model: nn.Module) -> None:
    """Leaves nothing of ours on the modules."""
    for module in model.modules():
        if _BINDING in module.__dict__:
            delattr(module, _BINDING)


def _packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    # query [1, num_heads, num_tokens, key_dim]; key and value the same with num_kv_heads
    if attention_mask is not None or others.get("position_bias") is not None or others.get("is_causal") is False:
        raise NotExact("its attention has a mask of its own, a bias by position, or looks ahead")
    attend: Attend | None = module.__dict__.get(_BINDING)
    if attend is None:
        raise NotExact("its attention modules do not say which layer they are in")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attend(query[0], key[0], value[0], options)[None], None


AttentionInterface.register(ATTENTION_NAME, _packed_attention)
