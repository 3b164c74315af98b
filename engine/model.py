"""A model over a fixed-address cache: forward passes over trees of rows, rewind and compaction in place.

The books of each slot are kept here; how a pass is run is the matter of `engine/eager.py` (as it comes) or
`engine/captured.py` (rounded up to a shape that was captured).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.buckets import FIRST_LENGTH, Buckets, doubling
from engine.cache import KVCache
from engine.captured import CapturedPasses
from engine.capturer import Capturer, Uncaptured
from engine.chain import CapturedChain
from engine.eager import EagerPasses
from engine.errors import CacheError
from engine.hf import CausalLM
from engine.rows import SlotRows

PREFILL_ROWS = 256
WARM_PREFILL_ROWS = 128
"""What the schedulers give out at most. Captured passes are no larger: each bucket is captured."""
WARM_EAGER_ROWS = 32
SELF_CHECK_ROWS = 8
"""Passes of so many rows are needed whatever the node was told (`engine/selfcheck.py`)."""
FIRST_SEGMENT = 4096


class CachedModel:
    """`num_slots` sessions of at most `max_length` positions, each with up to `max_tree_rows` tree rows behind them.

    Args:
        capturer: captures passes; None to run them as they come. The model's own lean forward is never captured, so
            `lm` must be without one then.
        first_segment: positions whose memory is taken, and whose passes are captured, at the start; the cache grows
            by doubling. Without capture pages are taken as they are written, and nothing grows.
        chain_vocab: capture chains of drafted tokens too, of ids below this; 0 for none.

    Attributes:
        rows: bookkeeping of each slot; read it, change it through the methods here.
    """

    def __init__(
        self,
        lm: CausalLM,
        *,
        num_slots: int,
        max_length: int,
        max_tree_rows: int,
        capturer: Capturer | None = None,
        first_segment: int = FIRST_SEGMENT,
        chain_vocab: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.max_tree_rows = max_tree_rows
        self._lm = lm
        self._passes: EagerPasses | CapturedPasses
        self._chain: CapturedChain | None = None
        if capturer is None:
            capacity = max_length + max_tree_rows
            self.max_pass_rows = max(PREFILL_ROWS, max_tree_rows + 1)
            self.cache = KVCache(lm.layers, num_slots=num_slots, capacity=capacity, dtype=lm.dtype)
            self._passes = EagerPasses(lm, self.cache, max_rows=self.max_pass_rows)
        else:
            # Kernels of masked attention want lengths in eights.
            capacity = -(-(max_length + max_tree_rows) // 8) * 8
            buckets = Buckets.powers(
                max_rows=min(WARM_PREFILL_ROWS, capacity),
                full_rows=max(max_tree_rows, SELF_CHECK_ROWS),
                first_length=min(FIRST_LENGTH, first_segment),
                capacity=capacity,
            )
            self.max_pass_rows = buckets.rows[-1]
            self.cache = KVCache(
                lm.layers, num_slots=num_slots, capacity=capacity, dtype=lm.dtype,
                bounds=doubling(first_segment, capacity),
            )  # fmt: skip
            self._passes = CapturedPasses(
                lm, self.cache, buckets=buckets, max_moves=max_tree_rows + 1, capturer=capturer
            )
            if chain_vocab and not isinstance(capturer, Uncaptured):
                self._chain = CapturedChain(self._passes, vocab_size=chain_vocab)
        self.rows = [SlotRows(capacity=capacity, max_length=max_length) for _ in range(num_slots)]

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
            logits = self._passes.run(slot, tokens, rows, range(before, rows.used), num_logits or len(tokens))
        except BaseException:
            rows.rewind(rows.used - before)
            raise
        return logits

    @property
    def has_chains(self) -> bool:
        """Whether `chain` can be called."""
        return self._chain is not None

    def chain(
        self, slot: int, token: int, *, parent: int | None, keys: Sequence[int], temperature: float
    ) -> tuple[list[int], list[float]]:
        """Run a path of len(keys) new rows, each with the token that the model has chosen behind the one before.

        Args:
            token: of the first row, whose parent is the row `parent`; None if it is the next committed token.
            keys, temperature: see `CapturedChain.run`.

        Returns:
            The token chosen behind each row and its log-probability. The rows stay, as tree rows behind the first.

        Raises:
            CacheError: the rows do not fit; nothing was changed.
        """
        assert self._chain is not None
        rows = self.rows[slot]
        before = rows.used
        try:
            if parent is None:
                rows.extend(1)
            rows.append([*([] if parent is None else [parent]), *range(before, before + len(keys) - 1)])
            return self._chain.run(slot, token, rows, range(before, rows.used), keys, temperature)
        except BaseException:
            rows.rewind(rows.used - before)
            raise

    def keep(self, slot: int, path: Sequence[int], rest: Sequence[int] = ()) -> None:
        """Commit a path of tree rows, keep `rest`, drop the other tree rows, in place (see `SlotRows.keep`)."""
        self._passes.move(slot, self.rows[slot].keep(path, rest))

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

    @property
    def run_s(self) -> float:
        """Total time spent in the model so far; on a GPU up to the launch, the wait shows where results are read."""
        return self._passes.run_s + (self._chain.run_s if self._chain else 0.0)

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""
        return self._passes.num_captures + (self._chain.num_captures if self._chain else 0)

    def addresses(self) -> list[int]:
        """Where the cache and the input buffers lie. When the cache grows some are added; none changes."""
        chain = self._chain.addresses() if self._chain else []
        return [*self.cache.addresses(), *self._passes.addresses(), *chain]

    def warm_up(self) -> None:
        """Do what the first pass of each kind would have to: capture, then one pass for each power of two of rows.

        Without capture only up to WARM_EAGER_ROWS: what a pass sets up hardly depends on its rows then.

        All slots must be empty; they are empty afterwards.

        Raises:
            CacheError: there is no memory for it.
        """
        self._passes.warm_up()
        if self._chain is not None and not self._chain.warm_up():
            self._chain = None
        num_rows = 1
        most = self.max_tree_rows if self.num_captures else min(self.max_tree_rows, WARM_EAGER_ROWS)
        while num_rows <= most:
            # Behind a token, as in use: a tree of children of the last committed one.
            self.forward(0, [0], num_committed=1)
            self.forward(0, [0] * num_rows, parents=[0] * num_rows)
            self.clear(0)
            num_rows *= 2
        prefill = min(WARM_PREFILL_ROWS, self.max_length, self.cache.available)
        self.forward(0, [0] * prefill, num_committed=prefill, num_logits=1)
        self.clear(0)
