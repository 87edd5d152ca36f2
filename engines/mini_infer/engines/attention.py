"""Where transformers' models call our attention. Each layer's cache hangs on its own attention module, and nothing is
global: models of several threads never meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from mini_infer.engines.attention_step import AttentionStep
from mini_infer.engines.errors import NotExact
from mini_infer.engines.paged_sdpa import AttentionOptions, paged_attention, write_cache

ATTENTION_NAME = "mini_infer"
"""Under this name transformers knows our attention. No mask goes with it: models then build none."""

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
        """From [heads, num_tokens, dim] of the current step's tokens to [num_tokens, num_heads, value_dim]."""
        step = self._current.step
        assert step is not None
        write_cache(key, value, self._keys, self._values, step)
        return paged_attention(query, self._keys, self._values, step, options)


class AttentionSwitch:
    """Which attention a model calls. Made before anything is switched, it knows the way back."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._former = [(config, config._attn_implementation) for config in _configs(model)]

    def turn_to(self, name: str) -> None:
        """The model calls the attention that is registered as ``name``."""
        for config, _ in self._former:
            config._attn_implementation = name

    def turn_back(self) -> None:
        """The model calls what it called at first."""
        for config, name in self._former:
            config._attn_implementation = name


def bind_layers(model: nn.Module, make: Callable[[int], object]) -> None:
    """Hangs ``make(layer)`` on every module that says which layer it is in."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            setattr(module, _BINDING, make(layer))


def unbind_layers(model: nn.Module) -> None:
    """Leaves nothing of ours on the modules."""
    for module in model.modules():
        module.__dict__.pop(_BINDING, None)


def binding_of(module: nn.Module) -> Any:
    """What hangs on a module. Raises `NotExact` where nothing does."""
    if _BINDING not in module.__dict__:
        raise NotExact("its attention does not say which layer it is in")
    return module.__dict__[_BINDING]


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    # Each after the one that it is part of: setting that one sets its parts.
    found: dict[int, PretrainedConfig] = {}
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        found.setdefault(id(config), config)
        parts = (getattr(config, name, None) for name in config.sub_configs)
        waiting += [part for part in parts if part is not None]
    return list(found.values())


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
    attend: LayerCache = binding_of(module)
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attend(query[0], key[0], value[0], options)[None], None


AttentionInterface.register(ATTENTION_NAME, _packed_attention)
