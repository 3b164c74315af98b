"""Passes without the interpreter: each shape of a pass is captured once, then replayed on static inputs.

A pass is rounded up to a shape (`engine/buckets.py`). Which slot, which rows and how many are data in buffers:

    tokens, positions   [rows]                  padding rows come first, so the last rows are always the pass's own
    targets             [rows] per segment      where new rows go; padding rows go to SINK
    seen                [rows of the segment]   which rows are seen; what is not in use is BLANK
    mask                [rows, length]          a padding row sees the first row, so that it has something to see

All are written anew for each pass, in full: nothing of an earlier pass remains in what a replay reads. Logits come out
in one buffer that all graphs share, and are copied before anybody gets them. The cache grows between passes, by a
segment; captured graphs stay right, those of the new lengths are captured then, and counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.buckets import Buckets, Shape
from engine.cache import KVCache
from engine.capturer import Capturer, Replay, Uncaptured
from engine.eager import near_rows, seen_rows
from engine.errors import CacheError
from engine.hf import CausalLM, Masks
from engine.rows import SlotRows
from engine.window import GatherWindow

log = logging.getLogger(__name__)


class CapturedPasses:
    """Passes over a cache in segments, replayed by shape.

    Args:
        max_moves: most rows of one compaction.

    Attributes:
        num_captures: graphs made so far; constant while no session needs a longer context than any before.
        run_s: total time of replays so far, without the filling of buffers; on a GPU up to the launch.
    """

    def __init__(self, lm: CausalLM, cache: KVCache, *, buckets: Buckets, max_moves: int, capturer: Capturer) -> None:
        self.cache = cache
        self.buckets = buckets
        self.num_captures = 0
        self.run_s = 0.0
        self.lm = lm
        self._capturer = capturer
        self._max_rows = buckets.rows[-1]
        self._max_moves = max_moves
        self._devices = sorted({layer.device for layer in lm.layers}, key=str)
        self._inputs = torch.zeros(2, self._max_rows, dtype=torch.long, device=lm.device)  # tokens, positions
        self._indices: dict[torch.device, list[Tensor]] = {device: [] for device in self._devices}
        self._moves: dict[torch.device, list[Tensor]] = {device: [] for device in self._devices}
        self._masks: dict[int, Masks] = {}
        self._logits = torch.zeros(0)
        self._passes: dict[Shape, Replay] = {}
        self._compactions: dict[int, Replay] = {}  # by the number of segments they span
        self._ready = 0  # passes that see so many rows are prepared

    @torch.inference_mode()
    def run(self, slot: int, tokens: Sequence[int], rows: SlotRows, new: range, num_logits: int) -> Tensor:
        """Run the rows `new` of a slot, the last of those in use; logits [num_logits, width], float32, a copy.

        Raises:
            CacheError: no shape is large enough, or the cache cannot grow to it.
        """
        shape = self.buckets.shape(len(new), rows.used, num_logits)
        self.prepare(shape.length)
        self._fill(shape, slot, tokens, rows, new)
        started = time.perf_counter()
        self._passes[shape]()
        logits = self._logits[shape.num_logits - num_logits : shape.num_logits].clone()
        self.run_s += time.perf_counter() - started
        return logits

    @torch.inference_mode()
    def move(self, slot: int, moves: Sequence[tuple[int, int]]) -> None:
        """See `KVCache.move`."""
        if not moves:
            return
        if len(moves) > self._max_moves:
            raise CacheError(f"{len(moves)} rows to be moved, the limit is {self._max_moves}")
        highest = max(max(move) for move in moves)
        spanned = sum(segment.first <= highest for segment in self.cache.segments)
        num_segments = min(number for number in self._compactions if number >= spanned)
        self._fill_moves(num_segments, slot, moves)
        self._compactions[num_segments]()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture every shape that the cache has room for. If the model cannot be captured, say so and go on without.

        Raises:
            CacheError: there is no memory for it.
        """
        try:
            self.prepare(min(self.cache.available, self.buckets.lengths[-1]))
        except CacheError:
            raise
        except Exception as exc:
            log.warning("passes are not captured, so each launches its kernels one by one: %s", exc)
            self._capturer = Uncaptured()
            self._passes.clear()
            self._compactions.clear()
            self.num_captures = self._ready = 0
            self.prepare(min(self.cache.available, self.buckets.lengths[-1]))

    def addresses(self) -> list[int]:
        """Where buffers lie. Growing adds to the end of the list, and changes nothing in it."""
        by_segment = [index for device in self._devices for index in (*self._indices[device], *self._moves[device])]
        masks = [mask for pair in self._masks.values() for mask in (pair.full, pair.sliding) if mask is not None]
        return [buffer.data_ptr() for buffer in (self._inputs, self._logits, *by_segment, *masks)]

    @property
    def is_captured(self) -> bool:
        """Whether passes are replayed; they are not where the model could not be captured."""
        return not isinstance(self._capturer, Uncaptured)

    @property
    def outgrows_window(self) -> bool:
        """Whether a session may be longer than what layers with a sliding window see."""
        return 0 < self.lm.sliding_window < self.buckets.lengths[-1]

    def prepared_lengths(self) -> list[int]:
        """Of the passes that are ready."""
        return [length for length in self.buckets.lengths if length <= self._ready]

    def prepare(self, length: int) -> None:
        """Have memory, buffers and graphs for passes that see `length` rows.

        Raises:
            CacheError: there is no memory for them.
        """
        if length <= self._ready:
            return
        if self.cache.reserve(length):
            log.info("the cache has grown to %d positions; passes of the new lengths are captured", length)
        try:
            for segment in self.cache.segments[len(self._indices[self._devices[0]]) :]:
                for device in self._devices:
                    index = torch.zeros(self._max_rows + segment.num_rows, dtype=torch.long, device=device)
                    self._indices[device].append(index)
                    self._moves[device].append(torch.zeros(2, self._max_moves, dtype=torch.long, device=device))
            if not self._logits.numel():
                # On the device of the head, which is the last layer's.
                size = (self.buckets.full_rows, self.lm.width)
                self._logits = torch.zeros(*size, dtype=torch.float32, device=self.lm.logits_device)
            for each in self.buckets.lengths:
                if each <= self.cache.available:
                    self._capture_length(each)
                    self._ready = each
        except torch.OutOfMemoryError as exc:
            raise CacheError(f"no memory for passes over {length} rows") from exc

    def _capture_length(self, length: int) -> None:
        if length not in self._masks:
            size = (1, 1, self._max_rows, length)
            full = torch.zeros(*size, dtype=torch.bool, device=self.lm.device)
            self._masks[length] = Masks(full, torch.zeros_like(full) if self.outgrows_window else None)
        # The largest first: the memory that it needs between serves the smaller ones.
        for shape in reversed(self.buckets.shapes(length)):
            if shape not in self._passes:
                self._fill_padding(shape)
                self._passes[shape] = self.capture(self._forward(shape))
                self.num_captures += self.is_captured
        num_segments = self._num_segments(length)
        if num_segments not in self._compactions:
            self._fill_moves(num_segments, 0, ())
            self._compactions[num_segments] = self.capture(self._compaction(num_segments))
            self.num_captures += self.is_captured

    @torch.inference_mode()
    def capture(self, fn: Callable[[], None]) -> Replay:
        """Capture a function over static buffers, and replay it once: a graph's first launch also uploads it."""
        replay = self._capturer.capture(fn)
        if self.is_captured:
            replay()
        return replay

    def _forward(self, shape: Shape) -> Callable[[], None]:
        """The pass of a shape, over the buffers."""
        n, k = shape.num_rows, shape.num_logits
        indices = {
            device: [
                (index[self._max_rows - n : self._max_rows], index[self._max_rows :][: shape.length - segment.first])
                for index, segment in zip(self._indices[device], self.cache.segments, strict=True)
                if segment.first < shape.length
            ]
            for device in self._devices
        }
        attached = self.lm.attach(GatherWindow(self.cache, indices), self.cache.capacity)
        whole = self._masks[shape.length]
        masks = Masks(whole.full[:, :, :n], None if whole.sliding is None else whole.sliding[:, :, :n])
        tokens, positions = self._inputs[:1, :n], self._inputs[1:, :n]

        @torch.inference_mode()
        def forward() -> None:
            self._logits[:k].copy_(self.lm.forward(tokens, positions, masks, attached, num_logits=k))

        return forward

    def _compaction(self, num_segments: int) -> Callable[[], None]:
        indices = {
            device: [(moves[0], moves[1]) for moves in self._moves[device][:num_segments]] for device in self._devices
        }

        @torch.inference_mode()
        def compact() -> None:
            for device in self._devices:
                self.cache.move_by_index(indices[device], device)

        return compact

    def _num_segments(self, length: int) -> int:
        return sum(segment.first < length for segment in self.cache.segments)

    def _fill(self, shape: Shape, slot: int, tokens: Sequence[int], rows: SlotRows, new: range) -> None:
        """Write the inputs of a pass into the buffers, with padding up to its shape."""
        num_padding = shape.num_rows - len(new)
        inputs = torch.zeros(2, shape.num_rows, dtype=torch.long)
        inputs[0, num_padding:] = torch.tensor(tokens, dtype=torch.long)
        inputs[1, num_padding:] = torch.tensor([rows.position(row) for row in new], dtype=torch.long)
        mask = torch.zeros(shape.num_rows, shape.length, dtype=torch.bool)
        mask[:num_padding, 0] = True
        own = seen_rows(rows, new)
        mask[num_padding:, : rows.used] = own
        sliding = None
        if self._masks[shape.length].sliding is not None:
            sliding = mask.clone()
            sliding[num_padding:, : rows.used] = near_rows(own, rows, new, self.lm.sliding_window)
        self._write(shape, inputs, mask, sliding, slot=slot, new=new, used=rows.used)

    def _fill_padding(self, shape: Shape) -> None:
        """Write the inputs of a pass that is padding only: it touches no row of any slot."""
        mask = torch.zeros(shape.num_rows, shape.length, dtype=torch.bool)
        mask[:, 0] = True
        inputs = torch.zeros(2, shape.num_rows, dtype=torch.long)
        self._write(shape, inputs, mask, mask, slot=0, new=range(0), used=0)

    def _write(
        self, shape: Shape, inputs: Tensor, mask: Tensor, sliding: Tensor | None, *, slot: int, new: range, used: int
    ) -> None:
        n, length = shape.num_rows, shape.length
        self._inputs[:, :n].copy_(inputs)
        buffers = self._masks[length]
        buffers.full[0, 0, :n].copy_(mask)
        if buffers.sliding is not None and sliding is not None:
            buffers.sliding[0, 0, :n].copy_(sliding)
        for i, segment in enumerate(self.cache.segments[: self._num_segments(length)]):
            num_seen = min(length, segment.end) - segment.first
            index = torch.full((n + num_seen,), segment.blank, dtype=torch.long)
            index[: n - len(new)] = segment.sink
            index[n - len(new) : n] = torch.tensor(
                [segment.index(slot, row, segment.sink) for row in new], dtype=torch.long
            )
            in_use = max(0, min(used - segment.first, num_seen))
            first = slot * segment.num_rows
            index[n : n + in_use] = torch.arange(first, first + in_use)
            for device in self._devices:
                self._indices[device][i][self._max_rows - n : self._max_rows + num_seen].copy_(index)

    def _fill_moves(self, num_segments: int, slot: int, moves: Sequence[tuple[int, int]]) -> None:
        """Write a compaction into the buffers; what is left of them moves BLANK to SINK."""
        for i, segment in enumerate(self.cache.segments[:num_segments]):
            index = torch.empty(2, self._max_moves, dtype=torch.long)
            index[0], index[1] = segment.blank, segment.sink
            for place, (source, target) in enumerate(moves):
                index[0, place] = segment.index(slot, source, segment.blank)
                index[1, place] = segment.index(slot, target, segment.sink)
            for device in self._devices:
                self._moves[device][i].copy_(index)
