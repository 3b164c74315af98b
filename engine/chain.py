"""A chain of drafted tokens in one replay: each step chooses its token on the device and the next step feeds it.

What a step needs of the host is known before: positions, where its row goes, which rows it sees, the noise's key. So
the steps of a chain are captured behind one another, and only the chosen tokens are read back. The choice is that of
`engine/sampler.py` for requests without penalties, bias and filters: the best logit, or the best of scaled logit plus
noise. A last bit may differ, which a draft can afford.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.captured import CapturedPasses
from engine.capturer import Replay
from engine.eager import near_rows, seen_rows
from engine.errors import CacheError, NumericalError
from engine.hf import Masks
from engine.noise import draws_of_key, gumbel_of_draws
from engine.rows import SlotRows
from engine.window import GatherWindow

log = logging.getLogger(__name__)
STEPS = (8, 4, 2, 1)
"""Steps of a captured chain; a longer or other one is run in several."""


class CapturedChain:
    """Chains over the cache and with the capturer of `passes`, whose layers must be on one device.

    Args:
        vocab_size: ids that may be chosen are below it.

    Attributes:
        num_captures: graphs made so far.
        run_s: total time of chains so far, until their tokens were read.
    """

    def __init__(self, passes: CapturedPasses, *, vocab_size: int) -> None:
        lm = passes.lm
        self.num_captures = 0
        self.run_s = 0.0
        self._passes = passes
        self._device = lm.device
        self._ids = torch.arange(min(vocab_size, lm.width), device=lm.device)
        most = STEPS[0]
        self._token = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
        self._positions = torch.zeros(1, most, dtype=torch.long, device=lm.device)
        self._keys = torch.zeros(most, dtype=torch.long, device=lm.device)
        self._temperature = torch.ones(1, dtype=torch.float64, device=lm.device)
        self._chosen = torch.zeros(2, most, dtype=torch.float64, device=lm.device)  # tokens, log-probabilities
        self._indices: list[tuple[Tensor, Tensor]] = []  # of each segment: targets [steps], seen [steps, rows]
        self._masks: dict[int, Masks] = {}
        self._chains: dict[tuple[int, int, bool], Replay] = {}  # steps, length, sampled

    @torch.inference_mode()
    def run(
        self, slot: int, token: int, rows: SlotRows, new: range, keys: Sequence[int], temperature: float
    ) -> tuple[list[int], list[float]]:
        """Run the rows `new`, a path, the first with `token` and each other with what the one before it chose.

        Args:
            rows: with the new rows in it.
            keys: of the noise at the position behind each row.
            temperature: 0 for greedy choices without noise.

        Returns:
            The tokens chosen behind each row, and their log-probabilities among the scores.

        Raises:
            CacheError: the cache cannot grow to these rows.
            NumericalError: logits are not numbers.
        """
        length = self._passes.buckets.shape(1, rows.used, 1).length
        self._passes.prepare(length)
        self.prepare()
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < len(new):
            done = len(tokens)
            steps = next(steps for steps in STEPS if steps <= len(new) - done)
            piece = slice(done, done + steps)
            self._fill(length, slot, tokens[-1] if tokens else token, rows, new[piece], keys[piece], temperature)
            started = time.perf_counter()
            self._chains[steps, length, temperature > 0]()
            chosen, scores = self._chosen[:, :steps].tolist()
            self.run_s += time.perf_counter() - started
            if not all(map(math.isfinite, scores)):
                raise NumericalError(f"logits of a drafted chain at row {new[done]} are not numbers")
            tokens += map(int, chosen)
            logprobs += scores
        return tokens, logprobs

    def warm_up(self) -> bool:
        """Capture chains for what the passes are prepared for; False, with a warning, if that cannot be done.

        Raises:
            CacheError: there is no memory for them.
        """
        if not self._passes.is_captured:
            return False
        try:
            self.prepare()
        except CacheError:
            raise
        except Exception as exc:
            log.warning("chains are not captured, so each drafted token is a pass of its own: %s", exc)
            return False
        return True

    def prepare(self) -> None:
        """Have buffers and graphs for all lengths that the passes are prepared for.

        Raises:
            CacheError: there is no memory for them.
        """
        try:
            for segment in self._passes.cache.segments[len(self._indices) :]:
                targets = torch.zeros(STEPS[0], dtype=torch.long, device=self._device)
                seen = torch.zeros(STEPS[0], segment.num_rows, dtype=torch.long, device=self._device)
                self._indices.append((targets, seen))
            for length in self._passes.prepared_lengths():
                if length not in self._masks:
                    self._capture_length(length)
        except torch.OutOfMemoryError as exc:
            raise CacheError("no memory for drafting chains of this length") from exc

    def addresses(self) -> list[int]:
        """Where buffers lie. Growing adds to the end of the list, and changes nothing in it."""
        fixed = [self._token, self._positions, self._keys, self._temperature, self._chosen]
        grown = [tensor for pair in self._indices for tensor in pair]
        masks = [mask for pair in self._masks.values() for mask in (pair.full, pair.sliding) if mask is not None]
        return [buffer.data_ptr() for buffer in (*fixed, *grown, *masks)]

    @torch.inference_mode()
    def _capture_length(self, length: int) -> None:
        full = torch.zeros(1, 1, STEPS[0], length, dtype=torch.bool, device=self._device)
        self._masks[length] = Masks(full, torch.zeros_like(full) if self._passes.outgrows_window else None)
        for steps in STEPS:
            for sampled in (False, True):
                self._fill_padding(length, steps)
                self._chains[steps, length, sampled] = self._passes.capture(self._steps(steps, length, sampled))
                self.num_captures += 1

    def _steps(self, steps: int, length: int, sampled: bool) -> Callable[[], None]:
        """The steps of a chain, over the buffers."""
        lm, cache = self._passes.lm, self._passes.cache
        segments = [segment for segment in cache.segments if segment.first < length]
        attached, masks = [], []
        whole = self._masks[length]
        for step in range(steps):
            indices = [
                (targets[step : step + 1], seen[step, : length - segment.first])
                for segment, (targets, seen) in zip(segments, self._indices, strict=False)
            ]
            attached.append(lm.attach(GatherWindow(cache, {self._device: indices}), cache.capacity))
            own = slice(step, step + 1)
            sliding = None if whole.sliding is None else whole.sliding[:, :, own]
            masks.append(Masks(whole.full[:, :, own], sliding))

        @torch.inference_mode()
        def run() -> None:
            token = self._token
            for step in range(steps):
                positions = self._positions[:, step : step + 1]
                logits = lm.forward(token, positions, masks[step], attached[step], num_logits=1)
                scores = self._scores(logits[0], step, sampled)
                best = scores.argmax(0, keepdim=True)
                self._chosen[0, step : step + 1].copy_(best)
                self._chosen[1, step : step + 1].copy_(scores.index_select(0, best) - scores.logsumexp(0))
                token = best[None]

        return run

    def _scores(self, logits: Tensor, step: int, sampled: bool) -> Tensor:
        """What the choice at a step compares, of each id."""
        row = logits[: self._ids.numel()]
        if not sampled:
            return row.float()
        wide = row.to(torch.float64)
        noise = gumbel_of_draws(draws_of_key(self._keys[step], self._ids))
        return (wide - wide.max()) / self._temperature + noise

    def _fill(
        self,
        length: int,
        slot: int,
        token: int,
        rows: SlotRows,
        new: range,
        keys: Sequence[int],
        temperature: float,
    ) -> None:
        """Write the inputs of a piece of a chain into the buffers."""
        steps = len(new)
        self._token.fill_(token)
        self._temperature.fill_(temperature or 1.0)
        self._positions[0, :steps].copy_(torch.tensor([rows.position(row) for row in new]))
        self._keys[:steps].copy_(torch.tensor(list(keys)))
        own = seen_rows(rows, new)
        buffers = self._masks[length]
        pairs = [(buffers.full, own)]
        if buffers.sliding is not None:
            pairs.append((buffers.sliding, near_rows(own, rows, new, self._passes.lm.sliding_window)))
        for buffer, seen in pairs:
            mask = torch.zeros(steps, length, dtype=torch.bool)
            mask[:, : rows.used] = seen
            buffer[0, 0, :steps].copy_(mask)
        for segment, (targets, seen) in zip(self._passes.cache.segments, self._indices, strict=True):
            if segment.first >= length:
                break
            targets[:steps].copy_(torch.tensor([segment.index(slot, row, segment.sink) for row in new]))
            num_seen = min(length, segment.end) - segment.first
            index = torch.full((steps, num_seen), segment.blank)
            first = slot * segment.num_rows
            for step, row in enumerate(new):
                # Rows of later steps hold what an earlier chain has left there: they are not seen, nor gathered.
                in_use = max(0, min(row + 1 - segment.first, num_seen))
                index[step, :in_use] = torch.arange(first, first + in_use)
            seen[:steps, :num_seen].copy_(index)

    def _fill_padding(self, length: int, steps: int) -> None:
        """Write inputs that touch no row of any slot."""
        self._token.zero_()
        self._positions.zero_()
        self._keys.zero_()
        self._temperature.fill_(1.0)
        buffers = self._masks[length]
        for mask in (buffers.full, buffers.sliding):
            if mask is not None:
                mask.zero_()
                mask[..., 0] = True
        for segment, (targets, seen) in zip(self._passes.cache.segments, self._indices, strict=True):
            targets.fill_(segment.sink)
            seen.fill_(segment.blank)
