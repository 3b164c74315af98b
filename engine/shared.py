"""Captured passes that several slots share: the rows of sessions side by side, each seeing its own slot alone.

As in `engine/captured.py` a pass is rounded up to a shape and everything else is data in buffers. Here a shape is rows
run by rows seen of all sessions together, so it does not matter how many sessions there are nor how unequal:

    tokens, positions   [rows]            padding first, then the rows of one slot behind those of another
    targets             [rows]            where new rows go; padding rows go to SINK
    seen                [length]          what each slot has in use, one behind another; the rest is BLANK
    mask                [rows, length]    a block for each slot; a padding row sees the first row

Only the first segment of the cache is looked at. A session that has outgrown it, or finds no room beside others, runs
by itself. As the rows of other slots are in the products, behind a mask, a NaN of one session shows in the logits of
all that share the pass: whoever reads them must then run each by itself (`engine/target.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.captured import CapturedPasses
from engine.capturer import Replay
from engine.eager import Run, near_rows, seen_rows
from engine.errors import CacheError
from engine.hf import Masks
from engine.window import GatherWindow

log = logging.getLogger(__name__)
FIRST_LENGTH = 1024
MAX_LENGTH = 16_384
"""Most rows that the sessions of one pass see together; with more there are several passes."""


class SharedPasses:
    """Shared passes over the cache and with the capturer of `passes`.

    Attributes:
        rows, lengths: the shapes, ascending.
        num_captures: graphs made so far.
        run_s: total time of replays so far; on a GPU up to the launch.
    """

    def __init__(self, passes: CapturedPasses, *, num_slots: int) -> None:
        lm = passes.lm
        self.num_captures = 0
        self.run_s = 0.0
        self._passes = passes
        self._segment = passes.cache.segments[0]
        self.rows = [rows for rows in passes.buckets.rows if 1 < rows <= passes.buckets.full_rows]
        self.lengths = lengths_up_to(min(num_slots * self._segment.num_rows, MAX_LENGTH))
        most_rows, most_length = self.rows[-1], self.lengths[-1]
        self._inputs = torch.zeros(2, most_rows, dtype=torch.long, device=lm.device)
        self._logits = torch.zeros(most_rows, lm.width, dtype=torch.float32, device=lm.logits_device)
        self._indices = {
            device: (
                torch.zeros(most_rows, dtype=torch.long, device=device),
                torch.zeros(most_length, dtype=torch.long, device=device),
            )
            for device in {layer.device for layer in lm.layers}
        }
        self._masks: dict[int, Masks] = {}
        self._replays: dict[tuple[int, int], Replay] = {}

    def run_batch(self, runs: Sequence[Run]) -> list[Tensor | CacheError]:
        """Run the new rows of several slots, each once; logits [num_logits, width] of each, float32, copies.

        A session alone in its group may need a longer cache than there is memory for: its `CacheError` is in its place.
        """
        results: dict[int, Tensor | CacheError] = {}
        for group in self.grouped(runs):
            if len(group) > 1:
                results |= zip(group, self._run([runs[index] for index in group]), strict=True)
                continue
            run = runs[group[0]]
            try:
                results[group[0]] = self._passes.run(run.slot, run.tokens, run.rows, run.new, run.num_logits)
            except CacheError as exc:
                results[group[0]] = exc
        return [results[index] for index in range(len(runs))]

    def grouped(self, runs: Sequence[Run]) -> list[list[int]]:
        """Indices of runs that share a pass: as few passes as come out when they are filled in order."""
        groups: list[list[int]] = []
        open_group: list[int] = []
        num_rows = length = 0
        for index, run in enumerate(runs):
            if run.rows.used > self._segment.num_rows or len(run.new) > self.rows[-1]:
                groups.append([index])
                continue
            if num_rows + len(run.new) > self.rows[-1] or length + run.rows.used > self.lengths[-1]:
                groups.append(open_group)
                open_group, num_rows, length = [], 0, 0
            open_group.append(index)
            num_rows += len(run.new)
            length += run.rows.used
        return [group for group in (*groups, open_group) if group]

    def warm_up(self) -> bool:
        """Capture all shapes; False, with a warning, if there is no memory for them."""
        try:
            self.prepare()
        except CacheError as exc:
            log.warning("sessions take turns with the model instead of sharing its passes: %s", exc)
            return False
        return True

    def prepare(self) -> None:
        """Capture all shapes.

        Raises:
            CacheError: there is no memory for them.
        """
        try:
            for length in self.lengths:
                size = (1, 1, self.rows[-1], length)
                full = torch.zeros(*size, dtype=torch.bool, device=self._passes.lm.device)
                self._masks[length] = Masks(full, torch.zeros_like(full) if self._passes.outgrows_window else None)
                for num_rows in reversed(self.rows):
                    self._fill(num_rows, length, [])
                    self._replays[num_rows, length] = self._passes.capture(self._forward(num_rows, length))
                    self.num_captures += self._passes.is_captured
        except torch.OutOfMemoryError as exc:
            raise CacheError("no memory for passes that sessions share") from exc

    def addresses(self) -> list[int]:
        """Where buffers lie."""
        masks = [mask for pair in self._masks.values() for mask in (pair.full, pair.sliding) if mask is not None]
        indices = [index for pair in self._indices.values() for index in pair]
        return [buffer.data_ptr() for buffer in (self._inputs, self._logits, *indices, *masks)]

    @torch.inference_mode()
    def _run(self, runs: Sequence[Run]) -> list[Tensor]:
        total = sum(len(run.new) for run in runs)
        num_rows = next(rows for rows in self.rows if rows >= total)
        length = next(length for length in self.lengths if length >= sum(run.rows.used for run in runs))
        if not self._replays:
            self.prepare()
        self._fill(num_rows, length, runs)
        started = time.perf_counter()
        self._replays[num_rows, length]()
        logits = self._logits[num_rows - total : num_rows].clone()
        self.run_s += time.perf_counter() - started
        return [
            own[len(run.new) - run.num_logits :]
            for run, own in zip(runs, torch.split(logits, [len(run.new) for run in runs]), strict=True)
        ]

    def _forward(self, num_rows: int, length: int) -> Callable[[], None]:
        """The pass of a shape, over the buffers."""
        lm, cache = self._passes.lm, self._passes.cache
        indices = {
            device: [(targets[:num_rows], seen[:length])] for device, (targets, seen) in self._indices.items()
        }  # fmt: skip
        attached = lm.attach(GatherWindow(cache, indices), cache.capacity)
        whole = self._masks[length]
        masks = Masks(whole.full[:, :, :num_rows], None if whole.sliding is None else whole.sliding[:, :, :num_rows])
        tokens, positions = self._inputs[:1, :num_rows], self._inputs[1:, :num_rows]

        @torch.inference_mode()
        def forward() -> None:
            self._logits[:num_rows].copy_(lm.forward(tokens, positions, masks, attached, num_logits=num_rows))

        return forward

    def _fill(self, num_rows: int, length: int, runs: Sequence[Run]) -> None:
        """Write the inputs of a pass into the buffers, in full, with padding up to its shape."""
        segment = self._segment
        first = num_rows - sum(len(run.new) for run in runs)
        inputs = torch.zeros(2, num_rows, dtype=torch.long)
        targets = torch.full((num_rows,), segment.sink)
        seen = torch.full((length,), segment.blank)
        full = torch.zeros(num_rows, length, dtype=torch.bool)
        full[:first, 0] = True
        whole = self._masks[length]
        sliding = None if whole.sliding is None else full.clone()
        column = 0
        for run in runs:
            end, used = first + len(run.new), run.rows.used
            block = (slice(first, end), slice(column, column + used))
            inputs[0, first:end] = torch.tensor(run.tokens, dtype=torch.long)
            inputs[1, first:end] = torch.tensor([run.rows.position(row) for row in run.new], dtype=torch.long)
            own = run.slot * segment.num_rows
            targets[first:end] = torch.arange(own + run.new.start, own + run.new.stop)
            seen[column : column + used] = torch.arange(own, own + used)
            full[block] = seen_rows(run.rows, run.new)
            if sliding is not None:
                sliding[block] = near_rows(full[block], run.rows, run.new, self._passes.lm.sliding_window)
            first, column = end, column + used
        self._inputs[:, :num_rows].copy_(inputs)
        whole.full[0, 0, :num_rows].copy_(full)
        if whole.sliding is not None and sliding is not None:
            whole.sliding[0, 0, :num_rows].copy_(sliding)
        for on_device in self._indices.values():
            on_device[0][:num_rows].copy_(targets)
            on_device[1][:length].copy_(seen)


def lengths_up_to(most: int) -> tuple[int, ...]:
    """FIRST_LENGTH, four times as much, and so on, and `most`, leaving out what is just below it."""
    steps, length = [], FIRST_LENGTH
    while length <= most // 2:
        steps.append(length)
        length *= 4
    return (*steps, most)
