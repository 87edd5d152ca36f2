"""Asks a model what its layers want of attention: heads, sizes, and which tokens each may see, far beyond a short text.

Two forwards of three tokens, with a stand-in for attention that remembers how it was called. Proves no numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from mini_infer.engines.attention import AttentionSwitch, bind_layers, binding_of, unbind_layers
from mini_infer.engines.errors import NotExact, one_line
from mini_infer.engines.kv_cache import LayerShape

_STAND_IN = "mini_infer_survey"
_STAND_IN_WITH_MASK = "mini_infer_survey_with_mask"
_NUM_TOKENS = 3
_QUERIES = (0, 1, 5, 130, 1031, 4099, 8209, 16_411, 65_537)  # positions at no round number, where chunks would begin


@dataclass(frozen=True, slots=True)
class LayerWish:
    """What one layer asks for."""

    shape: LayerShape
    window: int | None  # tokens that it sees, the last one included; None: all
    mask: torch.Tensor | None = None  # [1, 1, positions, positions]: True is seen


def survey(model: PreTrainedModel) -> list[LayerWish]:
    """One wish for each layer, in order. Leaves the model as it was.

    Raises:
        NotExact: A layer has no attention of the usual kind, or hides tokens by more than a window.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    try:
        calls = _call(model, _STAND_IN)
    except NotExact:
        raise
    except Exception as error:
        raise NotExact(f"it cannot run without masks of its own making: {one_line(error)}") from error
    if [layer for layer, _ in calls] != list(range(num_layers)):
        raise NotExact(f"{len(calls)} of its {num_layers} layers have attention of the usual kind")
    for _, wish in _call(model, _STAND_IN_WITH_MASK):
        _check_mask(wish)
    return [wish for _, wish in calls]


def _call(model: PreTrainedModel, attention_name: str) -> list[tuple[int, LayerWish]]:
    # What each call of attention wished, with the layer that called.
    calls: list[tuple[int, LayerWish]] = []
    switch = AttentionSwitch(model)
    switch.turn_to(attention_name)
    bind_layers(model, lambda layer: lambda wish: calls.append((layer, wish)))
    try:
        model(input_ids=torch.arange(_NUM_TOKENS, device=model.device)[None], use_cache=False)
    finally:
        unbind_layers(model)
        switch.turn_back()
    return calls


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    # query [1, num_heads, _NUM_TOKENS, key_dim]; key and value the same with num_kv_heads
    note: Callable[[LayerWish], None] = binding_of(module)
    note(LayerWish(LayerShape(key.shape[1], key.shape[3], value.shape[3]), sliding_window, attention_mask))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _mask(*, mask_function: Callable[..., torch.Tensor], device: torch.device | str = "cpu", **_: Any) -> torch.Tensor:
    # In place of the mask of this forward, which shows three positions: [1, 1, _QUERIES, keys], True is seen.
    zero = torch.zeros((), dtype=torch.long, device=device)
    queries, keys = _positions(device)
    return mask_function(zero, zero, queries, keys).expand(len(queries), len(keys))[None, None]


def _check_mask(wish: LayerWish) -> None:
    if wish.mask is None and wish.window is None:
        return
    if wish.mask is None:
        raise NotExact("a layer has a window and no mask")
    queries, keys = _positions(wish.mask.device)
    seen = keys <= queries
    if wish.window is not None:
        seen &= keys > queries - wish.window
    if wish.mask.shape[2:] != seen.shape or not torch.equal(wish.mask[0, 0], seen):
        raise NotExact("a layer hides tokens by another rule than a window, for example by chunks")


def _positions(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    queries = torch.tensor(_QUERIES, device=device)
    return queries[:, None], torch.arange(_QUERIES[-1] + 1, device=device)


AttentionInterface.register(_STAND_IN, _attention)
AttentionInterface.register(_STAND_IN_WITH_MASK, _attention)
AttentionMaskInterface.register(_STAND_IN_WITH_MASK, _mask)
