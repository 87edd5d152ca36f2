"""The mathematics of attention over a paged cache, by torch's own operations: any device, any head sizes.

Knows tensors and one step's views; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from mini_infer.engines.attention_step import AttentionStep, SpanView


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How a layer attends, as the model calls it."""

    scaling: float  # of the scores
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = None  # [num_heads]: a score of each head that takes its share and has no value


def write_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: AttentionStep
) -> None:
    """Puts a step's own keys and values [num_kv_heads, num_tokens, dim] into their places."""
    opened = step.opened_blocks(keys.shape[1])
    for new, cache in ((key, keys), (value, values)):
        if opened.numel():
            cache.index_fill_(0, opened, 0)
        cache.flatten(0, 1).index_copy_(0, step.cache_index, new.transpose(0, 1))


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: AttentionStep,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attends from ``query`` [num_heads, num_tokens, key_dim] to what the cache holds, its own tokens included.

    Returns [num_tokens, num_heads, value_dim].
    """
    attend = _attend_rows if step.is_decode else _attend_spans
    return attend(query, keys, values, step, options)


def _attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: AttentionStep, options: AttentionOptions
) -> torch.Tensor:
    num_heads, num_rows, _ = query.shape
    num_kv_heads = keys.shape[2]
    view = step.decode_view(options.window, keys.shape[1], query.dtype)
    # The heads that share a key are one key head's queries: [num_rows, num_kv_heads, group, key_dim]
    grouped = query.transpose(0, 1).unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
    sinks = None if options.sinks is None else options.sinks.view(1, num_kv_heads, -1, 1)
    attended = _attend(
        grouped,
        keys.index_select(0, view.table).unflatten(0, (num_rows, -1)).flatten(1, 2).transpose(1, 2),
        values.index_select(0, view.table).unflatten(0, (num_rows, -1)).flatten(1, 2).transpose(1, 2),
        options,
        mask=view.mask,
        sinks=sinks,
    )
    return attended.flatten(1, 2)


def _attend_spans(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: AttentionStep, options: AttentionOptions
) -> torch.Tensor:
    views = step.span_views(options.window, keys.shape[1], query.dtype)
    attended = [
        _attend_span(query[:, span.begin : span.end], _seen(keys, view), _seen(values, view), view, options)
        for span, view in zip(step.spans, views, strict=True)
    ]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _attend_span(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: SpanView, options: AttentionOptions
) -> torch.Tensor:
    group = query.shape[0] // keys.shape[1]
    # Key heads stand where SDPA has its batch, and the heads that share one where it has heads: the keys are repeated
    # by a stride of 0 and nothing is copied. [num_kv_heads, group, tokens, dim]
    sinks = None if options.sinks is None else options.sinks.view(-1, group, 1, 1)
    attended = _attend(
        query.unflatten(0, (-1, group)),
        keys.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
        values.transpose(0, 1)[:, None].expand(-1, group, -1, -1),
        options,
        mask=view.mask,
        sinks=sinks,
        is_causal=view.is_causal,
    )
    return attended.flatten(0, 1).transpose(0, 1)


def _seen(cache: torch.Tensor, view: SpanView) -> torch.Tensor:
    # [num_keys, num_kv_heads, dim]
    if view.first_block is None:
        return cache.index_select(0, view.table).flatten(0, 1)[view.skip : view.skip + view.num_keys]
    begin = view.first_block * cache.shape[1] + view.skip
    return cache.flatten(0, 1)[begin : begin + view.num_keys]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    options: AttentionOptions,
    *,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    is_causal: bool = False,
) -> torch.Tensor:
    if options.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=options.scaling
        )
    scores = torch.matmul(query, keys.mT).float() * options.scaling  # [.., .., num_queries, num_keys]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores += mask
    if is_causal:
        scores.masked_fill_(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)
