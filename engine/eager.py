"""Passes run as they come, and what the rows of a pass see of each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.hf import CausalLM, Masks
from engine.rows import SlotRows
from engine.window import SlotWindow


def seen_rows(rows: SlotRows, new: range) -> Tensor:
    """Which rows of the slot each new row sees: the committed ones before it and its path in the tree.

    Returns:
        bool [new rows, rows.used].
    """
    num_linear = max(0, rows.length - new.start)
    mask = torch.zeros(len(new), rows.used, dtype=torch.bool)
    mask[:, : rows.length] = True
    mask[:num_linear] = mask[:num_linear].tril(new.start)
    for i, row in enumerate(new[num_linear:], num_linear):
        ancestors = rows.tree[row - rows.length].ancestors
        seen = [rows.length + bit for bit in range(ancestors.bit_length()) if ancestors >> bit & 1]
        mask[i, seen] = True
    return mask


def near_rows(mask: Tensor, rows: SlotRows, new: range, window: int) -> Tensor:
    """The mask of layers that see `window` positions: the row's own and those before it."""
    positions = torch.cat([torch.arange(rows.length), torch.tensor([row.position for row in rows.tree]).long()])
    return mask & (positions[new.start : new.stop, None] - positions[None] < window)


class EagerPasses:
    """Passes over a cache of one segment: a pass looks at the first n rows of buffers that are allocated once.

    Args:
        max_rows: most rows of a pass.

    Attributes:
        run_s: total time of passes so far, without the filling of buffers.
    """

    num_captures = 0

    def __init__(self, lm: CausalLM, cache: KVCache, *, max_rows: int) -> None:
        self.cache = cache
        self.run_s = 0.0
        self._lm = lm
        self._window = SlotWindow(cache)
        self._attached = lm.attach(self._window, cache.capacity)
        self._tokens = torch.zeros(1, max_rows, dtype=torch.long, device=lm.device)
        self._positions = torch.zeros(1, max_rows, dtype=torch.long, device=lm.device)
        self._row_ids = torch.zeros(max_rows, dtype=torch.long, device=lm.device)
        # Not zeros: pages of a long context that no session reaches take no memory.
        self._mask = torch.empty(1, 1, max_rows, cache.capacity, dtype=torch.bool, device=lm.device)
        self._sliding = torch.empty_like(self._mask) if 0 < lm.sliding_window < cache.capacity else None

    def run(self, slot: int, tokens: Sequence[int], rows: SlotRows, new: range, num_logits: int) -> Tensor:
        """Run the rows `new` of a slot, the last of those in use; logits [num_logits, width], float32, a copy."""
        self._fill(slot, tokens, rows, new)
        started = time.perf_counter()
        logits = self._run(len(tokens), rows.used, num_logits)
        self.run_s += time.perf_counter() - started
        return logits

    def move(self, slot: int, moves: Sequence[tuple[int, int]]) -> None:
        """See `KVCache.move`."""
        self.cache.move(slot, moves)

    def warm_up(self) -> None:
        """Nothing is prepared."""

    def addresses(self) -> list[int]:
        """Where the input buffers lie."""
        masks = [self._mask] if self._sliding is None else [self._mask, self._sliding]
        return [buffer.data_ptr() for buffer in (self._tokens, self._positions, self._row_ids, *masks)]

    def _fill(self, slot: int, tokens: Sequence[int], rows: SlotRows, new: range) -> None:
        """Copy the inputs into the buffers, and point the window at them."""
        n = len(new)
        self._tokens[0, :n].copy_(torch.tensor(tokens, dtype=torch.long))
        self._positions[0, :n].copy_(torch.tensor([rows.position(row) for row in new], dtype=torch.long))
        self._row_ids[:n].copy_(torch.arange(new.start, new.stop))
        mask = seen_rows(rows, new)
        self._mask[0, 0, :n, : rows.used].copy_(mask)
        if self._sliding is not None:
            near = near_rows(mask, rows, new, self._lm.sliding_window)
            self._sliding[0, 0, :n, : rows.used].copy_(near)
        window = self._window
        window.slot, window.rows, window.length = slot, self._row_ids[:n], rows.used

    @torch.inference_mode()
    def _run(self, num_rows: int, length: int, num_logits: int) -> Tensor:
        logits = self._lm.forward(
            self._tokens[:, :num_rows],
            self._positions[:, :num_rows],
            Masks(
                self._mask[:, :, :num_rows, :length],
                None if self._sliding is None else self._sliding[:, :, :num_rows, :length],
            ),
            self._attached,
            num_logits=num_logits,
        )
        return logits.float()
