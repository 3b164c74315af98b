"""Storage for keys and values at addresses that never change.

One pair of tensors per layer, allocated once: keys [num_slots, kv_heads, capacity, key_dim], values likewise. New rows
are written in place, a rewind forgets rows without touching them, a compaction copies rows within the storage. So a
captured graph or compiled function that holds these addresses stays right.

Stale rows: a pass is given a view that ends at the slot's last used row, and used rows are contiguous
(`engine/rows.py`), so stale rows are never part of a product. A mask alone would not do: 0 x NaN is NaN. Whoever hands
out longer views, to reuse a captured graph, must zero what `clear` and compaction leave behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer caches for a token."""

    kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Keys and values of `num_slots` sessions, `capacity` rows each."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def allocate(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_slots, heads, capacity, dim, dtype=dtype, device=device)

        self.num_slots = num_slots
        self.capacity = capacity
        self.keys = [allocate(layer.kv_heads, layer.key_dim) for layer in layers]
        self.values = [allocate(layer.kv_heads, layer.value_dim) for layer in layers]
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Size of the storage."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def addresses(self) -> list[int]:
        """Where the storage lies; the same for the life of the cache."""
        return [tensor.data_ptr() for tensor in (*self.keys, *self.values)]

    @torch.inference_mode()
    def move(self, slot: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows (from, to) of one slot; sources are read before anything is written."""
        if not moves:
            return
        source = torch.tensor([row for row, _ in moves], device=self._device)
        target = torch.tensor([row for _, row in moves], device=self._device)
        for storage in (*self.keys, *self.values):
            rows = storage[slot]  # [kv_heads, capacity, dim]
            rows.index_copy_(1, target, rows.index_select(1, source))

    @torch.inference_mode()
    def poison(self, slot: int, first_row: int) -> None:
        """Fill the rows from `first_row` on with NaN: whoever reads one that is not in use will show it."""
        for storage in (*self.keys, *self.values):
            storage[slot, :, first_row:].fill_(float("nan"))

    @torch.inference_mode()
    def zero(self, slot: int) -> None:
        """Fill all rows of a slot with zeros, as they were at first."""
        for storage in (*self.keys, *self.values):
            storage[slot].zero_()
