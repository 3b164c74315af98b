"""Passes run as they come, and what the rows of a pass see of each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.errors import CacheError
from engine.hf import CausalLM, Masks
from engine.rows import SlotRows
from engine.window import SlotWindow


@dataclass(frozen=True, slots=True)
class Run:
    """What a pass does for one slot.

    Attributes:
        tokens: of the new rows.
        rows: the slot's books, the new rows in them.
        new: the new rows, the last of those in use.
        num_logits: of how many last rows logits are wanted, at least 1.
    """

    slot: int
    tokens: Sequence[int]
    rows: SlotRows
    new: range
    num_logits: int


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

    def run_batch(self, runs: Sequence[Run]) -> list[Tensor | CacheError]:
        """`run` for several slots, each once: in shared passes where our own forward runs the model.

        transformers' forward looks at one slot's storage as it lies there. To share a pass it would have to be given a
        copy of what all slots have in use, for each layer; on a CPU that costs what sharing saves.
        """
        if not self._lm.is_lean:
            return [self.run(run.slot, run.tokens, run.rows, run.new, run.num_logits) for run in runs]
        results: list[Tensor | CacheError] = []
        group: list[Run] = []
        for run in runs:
            if sum(len(each.new) for each in group) + len(run.new) > self._tokens.shape[1]:
                results += self._run_shared(group)
                group = []
            group.append(run)
        return results + self._run_shared(group)

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
        self._fill_at(0, tokens, rows, new)
        n = len(new)
        self._row_ids[:n].copy_(torch.arange(new.start, new.stop))
        window = self._window
        window.slot, window.rows, window.length = slot, self._row_ids[:n], rows.used

    def _fill_at(self, first: int, tokens: Sequence[int], rows: SlotRows, new: range) -> None:
        """Copy tokens, positions and masks of one slot's new rows into rows first.. of the buffers."""
        end = first + len(new)
        self._tokens[0, first:end].copy_(torch.tensor(tokens, dtype=torch.long))
        self._positions[0, first:end].copy_(torch.tensor([rows.position(row) for row in new], dtype=torch.long))
        mask = seen_rows(rows, new)
        self._mask[0, 0, first:end, : rows.used].copy_(mask)
        if self._sliding is not None:
            near = near_rows(mask, rows, new, self._lm.sliding_window)
            self._sliding[0, 0, first:end, : rows.used].copy_(near)

    @torch.inference_mode()
    def _run_shared(self, runs: Sequence[Run]) -> list[Tensor | CacheError]:
        """One pass of our own forward over all of them."""
        ends = list(accumulate(len(run.new) for run in runs))
        parts = []
        for run, end in zip(runs, ends, strict=True):
            first = end - len(run.new)
            self._fill_at(first, run.tokens, run.rows, run.new)
            masks = self._mask if self._sliding is None else self._sliding
            parts.append((self._window.slots[run.slot], masks[0, 0, first:end, : run.rows.used], run.num_logits))
        started = time.perf_counter()
        logits = self._lm.forward_slots(self._tokens[:, : ends[-1]], self._positions[:, : ends[-1]], parts).float()
        self.run_s += time.perf_counter() - started
        return list(torch.split(logits, [run.num_logits for run in runs]))

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
