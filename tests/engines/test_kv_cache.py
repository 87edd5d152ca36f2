"""The sizes of the cache are those of the layers, each its own."""

import torch

from mini_infer.engines.kv_cache import KVCache, LayerShape, bytes_per_token

SHAPES = [LayerShape(num_kv_heads=2, key_dim=24, value_dim=16), LayerShape(num_kv_heads=1, key_dim=8, value_dim=8)]


def test_each_layer_has_its_own_shape_and_starts_with_zeros() -> None:
    cache = KVCache(SHAPES, 5, 4, torch.bfloat16, "cpu")
    assert cache.block_size == 4
    assert [tuple(keys.shape) for keys in cache.keys] == [(5, 4, 2, 24), (5, 4, 1, 8)]
    assert [tuple(values.shape) for values in cache.values] == [(5, 4, 2, 16), (5, 4, 1, 8)]
    assert all(part.dtype == torch.bfloat16 and not part.any() for part in cache.keys + cache.values)


def test_bytes_of_a_token_are_those_that_the_cache_takes() -> None:
    cache = KVCache(SHAPES, 5, 4, torch.float32, "cpu")
    taken = sum(part.numel() * part.element_size() for part in cache.keys + cache.values)
    assert bytes_per_token(SHAPES, torch.float32) * 5 * 4 == taken
    assert bytes_per_token(SHAPES, torch.bfloat16) * 2 == bytes_per_token(SHAPES, torch.float32)
