"""A model over a fixed-address cache: forward passes over trees of rows, rewind and compaction in place.

The books of each slot are kept here; how a pass is run is the matter of `engine/eager.py` (as it comes) or
`engine/captured.py` (rounded up to a shape that was captured).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.buckets import FIRST_LENGTH, Buckets, doubling
from engine.cache import KVCache
from engine.captured import CapturedPasses
from engine.capturer import Capturer, Uncaptured
from engine.chain import CapturedChain
from engine.eager import EagerPasses, Run
from engine.errors import CacheError
from engine.hf import CausalLM
from engine.rows import SlotRows
from engine.shared import SharedPasses

PREFILL_ROWS = 256
WARM_PREFILL_ROWS = 128
"""What the schedulers give out at most. Captured passes are no larger: each bucket is captured."""
WARM_EAGER_ROWS = 32
SELF_CHECK_ROWS = 8
"""Passes of so many rows are needed whatever the node was told (`engine/selfcheck.py`)."""
FIRST_SEGMENT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """New rows of one slot; see `CachedModel.forward`."""

    slot: int
    tokens: Sequence[int]
    num_committed: int = 0
    parents: Sequence[int] = ()
    num_logits: int | None = None


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
        self._shared: SharedPasses | None = None
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
            if num_slots > 1:
                self._shared = SharedPasses(self._passes, num_slots=num_slots)
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
        run = self._place(
            NewRows(slot=slot, tokens=tokens, num_committed=num_committed, parents=parents, num_logits=num_logits)
        )
        try:
            return self._passes.run(slot, run.tokens, run.rows, run.new, run.num_logits)
        except BaseException:
            run.rows.rewind(len(run.new))
            raise

    def forward_batch(self, batch: Sequence[NewRows]) -> list[Tensor | CacheError]:
        """`forward` for several slots, each once, in as few passes as can be.

        Returns:
            Logits for each, or why its rows do not fit; nothing was changed in that slot.

        Raises:
            CacheError: a slot comes twice; nothing was changed.
            Exception: what a pass raises; nothing was changed in any slot.
        """
        if len({new.slot for new in batch}) != len(batch):
            raise CacheError(f"a slot is twice in one batch: {[new.slot for new in batch]}")
        results: list[Tensor | CacheError] = [CacheError("not run")] * len(batch)
        runs: dict[int, Run] = {}
        for index, new in enumerate(batch):
            try:
                runs[index] = self._place(new)
            except CacheError as exc:
                results[index] = exc
        try:
            for index, result in zip(runs, self._run(list(runs.values())), strict=True):
                results[index] = result
        except BaseException:
            for run in runs.values():
                run.rows.rewind(len(run.new))
            raise
        for index, run in runs.items():
            if isinstance(results[index], CacheError):
                run.rows.rewind(len(run.new))
        return results

    def _run(self, runs: list[Run]) -> list[Tensor | CacheError]:
        if len(runs) > 1 and self._shared is not None:
            return self._shared.run_batch(runs)
        if len(runs) > 1 and isinstance(self._passes, EagerPasses):
            return self._passes.run_batch(runs)
        results: list[Tensor | CacheError] = []
        for run in runs:
            try:
                results.append(self._passes.run(run.slot, run.tokens, run.rows, run.new, run.num_logits))
            except CacheError as exc:
                results.append(exc)
        return results

    def _place(self, new: NewRows) -> Run:
        """Enter new rows into the slot's books.

        Raises:
            CacheError: they do not fit; nothing was changed.
        """
        num_rows = len(new.tokens)
        if not 0 < num_rows <= self.max_pass_rows or num_rows != new.num_committed + len(new.parents):
            raise CacheError(
                f"a pass takes 1..{self.max_pass_rows} tokens, one for each row; got {num_rows} tokens for "
                f"{new.num_committed} committed and {len(new.parents)} tree rows"
            )
        rows = self.rows[new.slot]
        before = rows.used
        if new.num_committed:
            rows.extend(new.num_committed)
        try:
            rows.append(new.parents)
        except BaseException:
            rows.rewind(rows.used - before)
            raise
        return Run(new.slot, new.tokens, rows, range(before, rows.used), new.num_logits or num_rows)

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
        parts = (self._passes, self._shared, self._chain)
        return sum(part.run_s for part in parts if part is not None)

    @property
    def num_captures(self) -> int:
        """Graphs captured so far."""
        parts = (self._passes, self._shared, self._chain)
        return sum(part.num_captures for part in parts if part is not None)

    def addresses(self) -> list[int]:
        """Where the cache and the input buffers lie. When the cache grows some are added; none changes."""
        parts = (self.cache, self._passes, self._shared, self._chain)
        return [address for part in parts if part is not None for address in part.addresses()]

    def warm_up(self) -> None:
        """Do what the first pass of each kind would have to: capture, then one pass for each power of two of rows.

        Without capture only up to WARM_EAGER_ROWS: what a pass sets up hardly depends on its rows then.

        All slots must be empty; they are empty afterwards.

        Raises:
            CacheError: there is no memory for it.
        """
        self._passes.warm_up()
        if self._shared is not None and not self._shared.warm_up():
            self._shared = None
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
