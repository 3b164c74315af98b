import pytest
import torch

from engine.cache import KVCache, LayerShape
from engine.errors import CacheError

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 4, 4, CPU), LayerShape(1, 4, 6, CPU)]


def make_cache(bounds: tuple[int, ...] = ()) -> KVCache:
    """Two slots of eight rows; every row holds its number, in slot 1 plus a hundred."""
    cache = KVCache(SHAPES, num_slots=2, capacity=8, dtype=torch.float32, bounds=bounds)
    cache.reserve(8)
    for slot in range(2):
        for row in range(8):
            cache.fill(slot, row, row + 1, 100.0 * slot + row)
    return cache


def rows_of(cache: KVCache, slot: int) -> list[list[float]]:
    tensors = [[segment.tensors[i] for segment in cache.segments] for i in range(2 * len(SHAPES))]
    return [
        [
            value
            for segment, storage in zip(cache.segments, storages, strict=True)
            for value in storage[0, slot * segment.num_rows : (slot + 1) * segment.num_rows, 0].tolist()
        ]
        for storages in tensors
    ]


def test_layers_may_differ_in_heads_and_in_key_and_value_size() -> None:
    cache = make_cache()
    views = cache.rows_of(1)
    assert [tuple(keys.shape) for keys, _ in views] == [(2, 8, 4), (1, 8, 4)]
    assert [tuple(values.shape) for _, values in views] == [(2, 8, 4), (1, 8, 6)]
    assert views[1][1][0, 3].tolist() == [103.0] * 6
    assert cache.num_bytes == 4 * (2 * 8 + 2) * (2 * 4 + 2 * 4 + 4 + 6)


@pytest.mark.parametrize("bounds", [(), (4, 8), (3, 4, 8)])
def test_moves_read_all_sources_first_and_touch_one_slot_of_every_layer(bounds: tuple[int, ...]) -> None:
    cache = make_cache(bounds)
    cache.move(1, [(3, 2), (4, 3), (7, 4)])
    assert rows_of(cache, 1) == [[100, 101, 103, 104, 107, 105, 106, 107]] * 4
    assert rows_of(cache, 0) == [[0, 1, 2, 3, 4, 5, 6, 7]] * 4
    assert all(not storage[:, s.blank].any() for s in cache.segments for storage in s.tensors)


def test_moves_allocate_no_new_storage() -> None:
    cache = make_cache()
    before = cache.addresses()
    cache.move(0, [(5, 1)])
    cache.move(0, [])
    assert cache.addresses() == before


def test_growing_adds_a_segment_and_moves_nothing() -> None:
    cache = KVCache(SHAPES, num_slots=2, capacity=8, dtype=torch.float32, bounds=(2, 4, 8))
    assert (cache.available, len(cache.segments)) == (2, 1)
    before = cache.addresses()
    assert not cache.reserve(2)
    assert cache.reserve(3)
    assert cache.available == 4
    assert cache.reserve(8)
    assert cache.addresses()[: len(before)] == before
    assert [(s.first, s.end) for s in cache.segments] == [(0, 2), (2, 4), (4, 8)]
    with pytest.raises(CacheError, match="9 rows do not fit in a slot of 8"):
        cache.reserve(9)


@pytest.mark.parametrize("bounds", [(4,), (4, 4, 8), (8, 4), (0, 8), (4, 9)])
def test_bounds_ascend_to_the_capacity(bounds: tuple[int, ...]) -> None:
    with pytest.raises(CacheError, match="must ascend to the capacity, 8"):
        KVCache(SHAPES, num_slots=1, capacity=8, dtype=torch.float32, bounds=bounds)


def test_a_cache_for_a_long_context_takes_no_memory_before_it_is_used() -> None:
    """On a CPU: pages come when they are written. 2 GiB are reserved here, and 64 rows used."""

    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    shape = LayerShape(4, 64, 64, CPU)
    before = resident_bytes()
    cache = KVCache([shape] * 2, num_slots=4, capacity=1 << 18, dtype=torch.float32)
    assert cache.num_bytes > 2 << 30
    cache.fill(3, 0, 64, 1.0)
    assert resident_bytes() - before < 64 << 20
