import torch

from engine.cache import KVCache, LayerShape


def make_cache() -> KVCache:
    shapes = [LayerShape(2, 4, 4), LayerShape(1, 4, 6)]
    cache = KVCache(shapes, num_slots=2, capacity=8, dtype=torch.float32, device=torch.device("cpu"))
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.arange(8.0).view(1, 1, 8, 1).expand_as(tensor))
    return cache


def rows_of(cache: KVCache, slot: int) -> list[list[float]]:
    return [tensor[slot, 0, :, 0].tolist() for tensor in (*cache.keys, *cache.values)]


def test_layers_may_differ_in_heads_and_in_key_and_value_size() -> None:
    cache = make_cache()
    assert [tuple(tensor.shape) for tensor in cache.keys] == [(2, 2, 8, 4), (2, 1, 8, 4)]
    assert [tuple(tensor.shape) for tensor in cache.values] == [(2, 2, 8, 4), (2, 1, 8, 6)]
    assert cache.num_bytes == 4 * sum(tensor.numel() for tensor in (*cache.keys, *cache.values))


def test_moves_read_all_sources_first_and_touch_one_slot_of_every_layer() -> None:
    cache = make_cache()
    cache.move(1, [(3, 2), (4, 3), (7, 4)])
    assert rows_of(cache, 1) == [[0, 1, 3, 4, 7, 5, 6, 7]] * 4
    assert rows_of(cache, 0) == [[0, 1, 2, 3, 4, 5, 6, 7]] * 4


def test_moves_allocate_no_new_storage() -> None:
    cache = make_cache()
    before = cache.addresses()
    cache.move(0, [(5, 1)])
    cache.move(0, [])
    assert cache.addresses() == before
