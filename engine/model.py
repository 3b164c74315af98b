"""A model over a fixed-address cache: forward passes over trees of rows, rewind and compaction in place.

Inputs of a pass are copied into buffers allocated once (tokens, positions, row indices, mask); a pass looks at the
first n rows of them. Passes run eagerly; capturing them means running `_run` on a bucket of n and of cached length
instead of the exact numbers, the rest of this module stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.errors import CacheError
from engine.hf import CausalLM
from engine.rows import SlotRows

PREFILL_ROWS = 256


class CachedModel:
    """`num_slots` sessions of at most `max_length` positions, each with up to `max_tree_rows` tree rows behind them.

    Attributes:
        rows: bookkeeping of each slot; read it, change it through the methods here.
        run_s: total time spent in the model so far; on a GPU up to the launch, the wait shows where results are read.
    """

    def __init__(self, lm: CausalLM, *, num_slots: int, max_length: int, max_tree_rows: int) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.max_tree_rows = max_tree_rows
        self.max_pass_rows = max(PREFILL_ROWS, max_tree_rows + 1)
        capacity = max_length + max_tree_rows
        self.cache = KVCache(lm.layers, num_slots=num_slots, capacity=capacity, dtype=lm.dtype, device=lm.device)
        self.rows = [SlotRows(capacity=capacity, max_length=max_length) for _ in range(num_slots)]
        self.run_s = 0.0
        self._lm = lm
        self._attached = lm.attach(self.cache)
        rows = self.max_pass_rows
        self._tokens = torch.zeros(1, rows, dtype=torch.long, device=lm.device)
        self._positions = torch.zeros(1, rows, dtype=torch.long, device=lm.device)
        self._row_ids = torch.zeros(rows, dtype=torch.long, device=lm.device)
        self._mask = torch.zeros(1, 1, rows, capacity, dtype=torch.bool, device=lm.device)

    def forward(
        self,
        slot: int,
        tokens: Sequence[int],
        *,
        num_committed: int = 0,
        parents: Sequence[int] = (),
        num_logits: int | None = None,
    ) -> Tensor:
        """Run new rows: first `num_committed` at the next positions, then a tree row for each of `parents`.

        Args:
            tokens: ids, num_committed + len(parents) of them.
            parents: row of each tree row's parent, counted in the slot (see `SlotRows.append`).
            num_logits: of how many last rows logits are wanted; all by default, at least 1.

        Returns:
            Logits [num_logits, width], float32, of the caller's own.

        Raises:
            CacheError: the rows do not fit; nothing was changed.
        """
        if not 0 < len(tokens) <= self.max_pass_rows or len(tokens) != num_committed + len(parents):
            raise CacheError(
                f"a pass takes 1..{self.max_pass_rows} tokens, one for each row; got {len(tokens)} tokens for "
                f"{num_committed} committed and {len(parents)} tree rows"
            )
        rows = self.rows[slot]
        before = rows.used
        if num_committed:
            rows.extend(num_committed)
        try:
            rows.append(parents)
            self._fill(slot, tokens, range(before, rows.used))
            started = time.perf_counter()
            logits = self._run(len(tokens), rows.used, num_logits or len(tokens))
            self.run_s += time.perf_counter() - started
        except BaseException:
            rows.rewind(rows.used - before)
            raise
        return logits

    def keep(self, slot: int, path: Sequence[int], rest: Sequence[int] = ()) -> None:
        """Commit a path of tree rows, keep `rest`, drop the other tree rows, in place (see `SlotRows.keep`)."""
        self.cache.move(slot, self.rows[slot].keep(path, rest))

    def rewind(self, slot: int, num_rows: int) -> None:
        """Forget the newest rows, in place (see `SlotRows.rewind`)."""
        self.rows[slot].rewind(num_rows)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.rows[slot].clear()

    @property
    def dtype(self) -> torch.dtype:
        """Of the cache and of the activations."""
        return self._lm.dtype

    def without_cache(self, tokens: Sequence[int]) -> Tensor | None:
        """See `CausalLM.without_cache`."""
        return self._lm.without_cache(tokens)

    def addresses(self) -> list[int]:
        """Where the cache and the input buffers lie; the same for the life of the model."""
        buffers = (self._tokens, self._positions, self._row_ids, self._mask)
        return [*self.cache.addresses(), *(buffer.data_ptr() for buffer in buffers)]

    def _fill(self, slot: int, tokens: Sequence[int], new: range) -> None:
        """Copy the inputs of a pass over the rows `new` into the buffers, and point the window at them."""
        rows, n = self.rows[slot], len(new)
        self._tokens[0, :n].copy_(torch.tensor(tokens, dtype=torch.long))
        self._positions[0, :n].copy_(torch.tensor([rows.position(row) for row in new], dtype=torch.long))
        self._row_ids[:n].copy_(torch.arange(new.start, new.stop))
        num_linear = max(0, rows.length - new.start)
        mask = torch.zeros(n, rows.used, dtype=torch.bool)  # [new rows, rows seen]
        mask[:, : rows.length] = True
        mask[:num_linear] = mask[:num_linear].tril(new.start)
        for i, row in enumerate(new[num_linear:], num_linear):
            ancestors = rows.tree[row - rows.length].ancestors
            seen = [rows.length + bit for bit in range(ancestors.bit_length()) if ancestors >> bit & 1]
            mask[i, seen] = True
        self._mask[0, 0, :n, : rows.used].copy_(mask)
        window = self._attached.window
        window.slot, window.rows, window.length = slot, self._row_ids[:n], rows.used

    @torch.inference_mode()
    def _run(self, num_rows: int, length: int, num_logits: int) -> Tensor:
        logits = self._lm.forward(
            self._tokens[:, :num_rows],
            self._positions[:, :num_rows],
            self._mask[:, :, :num_rows, :length],
            self._attached,
            num_logits=num_logits,
        )
        return logits.float()
