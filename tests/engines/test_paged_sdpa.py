"""Attention over the paged cache equals the slow and obvious one. Free places of the cache hold NaN throughout."""

from dataclasses import replace

import pytest
import torch
from support.packing import attention_step, deal_blocks

from mini_infer.engines.kv_cache import KVCache, LayerShape
from mini_infer.engines.paged_sdpa import AttentionOptions, paged_attention, write_cache

NUM_KV_HEADS = 2
PLAIN = AttentionOptions(scaling=0.3)


def obvious(query, keys, values, start, options):
    # query [num_tokens, num_heads, dim]; keys, values [length, num_kv_heads, dim], in the order of positions
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * options.scaling
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    for at in range(query.shape[0]):
        position = start + at
        scores[:, at, position + 1 :] = float("-inf")
        if options.window is not None:
            scores[:, at, : max(0, position + 1 - options.window)] = float("-inf")
    if options.sinks is not None:
        sinks = options.sinks.float()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, values)


def check(rows, block_size, options=PLAIN, *, group=3, dims=(16, 16), scattered=True, dtype=torch.float32, atol=1e-5):
    """rows: (tokens that are cached already, tokens of this step)."""
    generator = torch.Generator().manual_seed(sum(start * 31 + new for start, new in rows))

    def numbers(num_tokens, num_heads, dim):
        return torch.randn(num_tokens, num_heads, dim, generator=generator).mul(2.0).to(dtype)

    lengths = [start + new for start, new in rows]
    blocks = deal_blocks(lengths, block_size, scattered=scattered)
    num_blocks = sum(map(len, blocks)) + 1
    cache = KVCache([LayerShape(NUM_KV_HEADS, *dims)], num_blocks, block_size, dtype, "cpu")
    keys, values = cache.keys[0].fill_(float("nan")), cache.values[0].fill_(float("nan"))
    all_keys = [numbers(length, NUM_KV_HEADS, dims[0]) for length in lengths]
    all_values = [numbers(length, NUM_KV_HEADS, dims[1]) for length in lengths]

    def write(parts):
        step = attention_step([(begin, end - begin, blocks[row]) for row, begin, end in parts], block_size)
        new = [torch.cat([whole[row][a:b] for row, a, b in parts]).transpose(0, 1) for whole in (all_keys, all_values)]
        write_cache(*new, keys, values, step)
        return step

    if cached := [(row, 0, start) for row, (start, _) in enumerate(rows) if start]:
        write(cached)
    step = write([(row, start, start + new) for row, (start, new) in enumerate(rows)])
    queries = [numbers(new, NUM_KV_HEADS * group, dims[0]) for _, new in rows]
    attended = paged_attention(torch.cat(queries).transpose(0, 1), keys, values, step, options)
    expected = [
        obvious(query, all_keys[row], all_values[row], rows[row][0], options) for row, query in enumerate(queries)
    ]
    assert attended.dtype == dtype
    torch.testing.assert_close(attended.float(), torch.cat(expected), atol=atol, rtol=0)


def sinks(group=3):
    return torch.linspace(-2.0, 3.0, NUM_KV_HEADS * group)


OPTIONS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=8),
    "window of one": replace(PLAIN, window=1),
    "cap": replace(PLAIN, softcap=1.5),
    "cap and window": replace(PLAIN, softcap=1.5, window=8),
    "sinks": replace(PLAIN, sinks=sinks()),
    "sinks and window": replace(PLAIN, sinks=sinks(), window=5),
    "everything": replace(PLAIN, sinks=sinks(), window=7, softcap=2.0),
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
block_sizes = pytest.mark.parametrize("block_size", [1, 3, 8, 32])
layouts = pytest.mark.parametrize("scattered", [False, True], ids=["in one piece", "scattered"])


def edges(block_size):
    """Lengths about the ends of blocks."""
    return sorted({blocks * block_size + more for blocks in (1, 2, 4) for more in (-1, 0, 1)} - {0})


@options
@block_sizes
@layouts
def test_decode(options, block_size, scattered):
    lengths = edges(block_size)
    check([(length - 1, 1) for length in lengths], block_size, options, scattered=scattered)
    for length in lengths:
        check([(length - 1, 1)], block_size, options, scattered=scattered)


@options
@block_sizes
@layouts
def test_prefill(options, block_size, scattered):
    check([(0, length) for length in edges(block_size)], block_size, options, scattered=scattered)


@options
@block_sizes
@layouts
def test_later_chunks(options, block_size, scattered):
    for start in edges(block_size):
        check(
            [(start, 1), (start, 2), (0, 3), (start, block_size), (start, 13)], block_size, options, scattered=scattered
        )


@pytest.mark.parametrize("start", range(21))
def test_a_chunk_that_starts_anywhere_about_a_window_of_8_in_a_prompt_of_20(start):
    if start < 20:
        check([(start, 20 - start)], 4, OPTIONS["window"])
    else:
        check([(start, 1)], 4, OPTIONS["window"])


@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (8, 32)])
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("name", ["plain", "window", "cap", "sinks"])
def test_heads_of_any_number_and_size(name, group, dims):
    options = replace(OPTIONS[name], sinks=sinks(group) if name == "sinks" else None)
    for rows in ([(9, 1), (3, 1), (16, 1)], [(0, 11), (5, 6), (8, 1)]):
        check(rows, 4, options, group=group, dims=dims)


@options
def test_bfloat16(options):
    check([(9, 1), (3, 1), (40, 1)], 4, options, dtype=torch.bfloat16, atol=0.15)
    check([(0, 11), (5, 6), (30, 9), (8, 1)], 4, options, dtype=torch.bfloat16, atol=0.15)


def test_many_rows_of_very_different_length():
    check([(length, 1) for length in (0, 200, 3, 64, 63, 31, 32, 500)], 32)
    check([(length, 1) for length in (0, 200, 3, 64, 63, 31, 32, 500)], 32, OPTIONS["window"])


def test_every_token_sees_at_least_itself():
    for window in (None, 1, 3):
        for start in range(10):
            step = attention_step([(start, 1, [3, 1, 2]), (0, 1, [4])], 4)
            mask = step.decode_view(window, 4, torch.float32).mask
            assert (mask == 0).any(-1).all()
            step = attention_step([(start, 5, [5, 3, 1, 2]), (0, 5, [4, 6])], 4)
            views = step.span_views(window, 4, torch.float32)
            assert all(view.mask is None or (view.mask == 0).any(-1).all() for view in views)


def test_what_a_step_derives_is_made_once():
    step = attention_step([(5, 1, [3, 1])], 4)
    assert step.decode_view(None, 4, torch.float32) is step.decode_view(None, 4, torch.float32)
    assert step.span_views(3, 4, torch.float32) is step.span_views(3, 4, torch.float32)
    assert step.opened_blocks(4) is step.opened_blocks(4)
