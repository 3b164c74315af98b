"""Storage for keys and values at addresses that never change.

The rows of all slots lie in segments: the first holds rows 0..bounds[0]-1 of every slot, the next those up to
bounds[1], and so on. One tensor for keys and one for values per layer and segment:

    [kv_heads, num_slots * rows of the segment + 2, dim]        row r of slot s at s * rows + r - first
                                                        behind them BLANK, always zero, and SINK, never read

Growing means one more segment. Nothing that exists moves, so whoever holds addresses (a captured graph, a compiled
function) may go on; new rows are written in place, a rewind forgets rows without touching them, a compaction copies
rows within the storage. On a CPU one segment holds everything: its pages are taken when they are first written.

Stale rows are never read. Either a pass sees a plain view that ends at the slot's last used row, used rows being
contiguous (`engine/rows.py`); or it gathers rows by index, and what is not in use is gathered from BLANK. A mask alone
would not do: 0 x NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CacheError


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer caches for a token, and where."""

    kv_heads: int
    key_dim: int
    value_dim: int
    device: torch.device


class Segment:
    """Rows first..end-1 of every slot.

    Attributes:
        keys, values: of each layer, [kv_heads, num_slots * num_rows + 2, dim].
        blank, sink: indices of the row that is always zero, and of the one that takes what nobody wants.
    """

    def __init__(
        self, layers: Sequence[LayerShape], *, num_slots: int, first: int, end: int, dtype: torch.dtype
    ) -> None:
        self.first, self.end = first, end
        self.num_rows = end - first
        self.blank = num_slots * self.num_rows
        self.sink = self.blank + 1

        def allocate(layer: LayerShape, dim: int) -> Tensor:
            # Not zeros: on a CPU untouched pages take no memory.
            storage = torch.empty(layer.kv_heads, self.sink + 1, dim, dtype=dtype, device=layer.device)
            storage[:, self.blank :].zero_()
            return storage

        self.keys = [allocate(layer, layer.key_dim) for layer in layers]
        self.values = [allocate(layer, layer.value_dim) for layer in layers]

    @property
    def tensors(self) -> list[Tensor]:
        """All storage, keys first."""
        return [*self.keys, *self.values]

    def index(self, slot: int, row: int, otherwise: int) -> int:
        """Where the row of a slot lies; `otherwise` if it is in another segment."""
        return slot * self.num_rows + row - self.first if self.first <= row < self.end else otherwise


class KVCache:
    """Keys and values of `num_slots` sessions, `capacity` rows each, of which `available` are allocated.

    Args:
        bounds: ends of the segments, ascending up to `capacity`; by default one segment. The first is allocated now.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        bounds: Sequence[int] = (),
    ) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.bounds = tuple(bounds) or (capacity,)
        if list(self.bounds) != sorted({*self.bounds}) or self.bounds[0] < 1 or self.bounds[-1] != capacity:
            raise CacheError(f"bounds of segments must ascend to the capacity, {capacity}; got {self.bounds}")
        self.segments: list[Segment] = []
        self._layers = list(layers)
        self._dtype = dtype
        self.reserve(1)

    @property
    def available(self) -> int:
        """Rows of a slot that are allocated."""
        return self.segments[-1].end if self.segments else 0

    @property
    def num_bytes(self) -> int:
        """Size of the storage that is allocated."""
        return sum(tensor.nbytes for segment in self.segments for tensor in segment.tensors)

    def addresses(self) -> list[int]:
        """Where the storage lies. Growing adds to the list, and changes nothing in it."""
        return [tensor.data_ptr() for segment in self.segments for tensor in segment.tensors]

    @torch.inference_mode()
    def reserve(self, num_rows: int) -> bool:
        """Allocate segments until each slot has `num_rows` rows. Returns whether any was added.

        Raises:
            CacheError: there is no memory for them; what was there is as before.
        """
        if num_rows > self.capacity:
            raise CacheError(f"{num_rows} rows do not fit in a slot of {self.capacity}")
        had = self.available
        while self.available < num_rows:
            end = self.bounds[len(self.segments)]
            try:
                segment = Segment(
                    self._layers, num_slots=self.num_slots, first=self.available, end=end, dtype=self._dtype
                )
            except torch.OutOfMemoryError as exc:
                raise CacheError(
                    f"no memory for a cache of {end} positions in {self.num_slots} slots; it has {self.available}"
                ) from exc
            self.segments.append(segment)
        return self.available > had

    def rows_of(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Of each layer the slot's keys and values in the first segment, views [kv_heads, rows, dim]."""
        segment = self.segments[0]
        own = slice(slot * segment.num_rows, (slot + 1) * segment.num_rows)
        return [(keys[:, own], values[:, own]) for keys, values in zip(segment.keys, segment.values, strict=True)]

    @torch.inference_mode()
    def move(self, slot: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy rows (from, to) of one slot; sources are read before anything is written."""
        if not moves:
            return
        indices = [
            (
                torch.tensor([segment.index(slot, source, segment.blank) for source, _ in moves]),
                torch.tensor([segment.index(slot, target, segment.sink) for _, target in moves]),
            )
            for segment in self.segments
            if segment.first <= max(source for source, _ in moves)
        ]
        for device in {layer.device for layer in self._layers}:
            on_device = [(source.to(device), target.to(device)) for source, target in indices]
            self.move_by_index(on_device, device)

    def move_by_index(self, indices: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
        """Copy rows by (from, to) indices into each of the first segments, in the layers of one device.

        A source that lies in another segment is BLANK, a target SINK, so each index has all moves and the sum of what
        the segments yield is what was in the row.
        """
        segments = self.segments[: len(indices)]
        for which in range(2 * len(self._layers)):
            if self._layers[which % len(self._layers)].device != device:
                continue
            storages = [segment.tensors[which] for segment in segments]
            pieces = [storage.index_select(1, source) for storage, (source, _) in zip(storages, indices, strict=True)]
            moved = pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(0)
            for storage, (_, target) in zip(storages, indices, strict=True):
                storage.index_copy_(1, target, moved)

    @torch.inference_mode()
    def fill(self, slot: int, first_row: int, end_row: int, value: float) -> None:
        """Set rows of a slot, as far as they are allocated: to NaN, and whoever reads a stale one will show it."""
        for segment in self.segments:
            first, end = max(first_row, segment.first), min(end_row, segment.end)
            if first < end:
                start = segment.index(slot, first, 0)
                for storage in segment.tensors:
                    storage[:, start : start + end - first].fill_(value)
