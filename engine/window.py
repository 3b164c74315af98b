"""What a pass writes and sees of the cache: a slot's own rows as plain views, or rows gathered by index."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.cache import KVCache

Pair = tuple[Tensor, Tensor]


class Window(Protocol):
    """Where the new rows of a pass go, and which rows it sees.

    Attributes:
        length: rows seen.
    """

    length: int

    def exchange(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        """Store a layer's new rows, [kv_heads, n, dim], and return the rows seen, [kv_heads, length, dim]."""
        ...


class SlotWindow:
    """Rows of one slot of a cache of one segment: nothing is copied, what is seen ends at `length`.

    Attributes:
        rows: long [n], rows of the slot that are written.
        slots: of each slot the keys and values of each layer, views [kv_heads, capacity, dim].
    """

    def __init__(self, storage: KVCache) -> None:
        self.slot = 0
        self.rows = torch.empty(0, dtype=torch.long)
        self.length = 0
        self.slots = [storage.rows_of(slot) for slot in range(storage.num_slots)]

    def exchange(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        own_keys, own_values = self.slots[self.slot][layer]
        own_keys.index_copy_(1, self.rows, keys)
        own_values.index_copy_(1, self.rows, values)
        return own_keys[:, : self.length], own_values[:, : self.length]


class GatherWindow:
    """Rows anywhere in a cache, chosen by indices that lie at fixed addresses.

    So slot, number of rows and of used rows are data: one captured graph serves them all. The price is a copy of what
    is seen.

    Attributes:
        indices: for each device with layers, of each segment that is seen: long [n], where the new rows go, and long
            [rows of the segment that are seen], which rows. What lies elsewhere is SINK, and BLANK.
    """

    def __init__(self, storage: KVCache, indices: dict[torch.device, list[Pair]]) -> None:
        self.indices = indices
        self.length = sum(seen.numel() for _, seen in next(iter(indices.values())))
        self._storage = storage

    def exchange(self, layer: int, keys: Tensor, values: Tensor) -> Pair:
        seen_keys, seen_values = [], []
        for segment, (target, seen) in zip(self._storage.segments, self.indices[keys.device], strict=False):
            segment.keys[layer].index_copy_(1, target, keys)
            segment.values[layer].index_copy_(1, target, values)
            seen_keys.append(segment.keys[layer].index_select(1, seen))
            seen_values.append(segment.values[layer].index_select(1, seen))
        if len(seen_keys) == 1:
            return seen_keys[0], seen_values[0]
        return torch.cat(seen_keys, 1), torch.cat(seen_values, 1)
