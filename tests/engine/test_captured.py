"""Captured passes give the logits of passes that run as they come, at fixed addresses, with a fixed number of graphs.

The graphs are those of `TapeCapturer`, which repeats recorded operations on recorded memory. So an input that is not
written anew for each pass, an output that is handed out itself, a padding row that writes where it should not, shows.
"""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import pytest
import torch

from engine.buckets import Shape
from engine.captured import CapturedPasses
from engine.capturer import CannotCapture, Capturer, Replay, TapeCapturer
from engine.drafter import HFDrafter
from engine.eager import EagerPasses
from engine.errors import CacheError, CheckpointError
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.selfcheck import self_check
from engine.shared import SharedPasses
from engine.target import HFTarget
from speculation.passes import DraftStep, Sampling, VerifyPass, VerifyResult

VOCAB = 320


def make_captured(lm: CausalLM, capturer: Capturer | None = None, **sizes: int) -> CachedModel:
    """Buckets up to 128 rows, up to 8 with all logits; lengths 64 and 168, which are the ends of the segments too."""
    sizes = {"num_slots": 2, "max_length": 160, "max_tree_rows": 8, "first_segment": 64} | sizes
    plain = CausalLM(lm.model, lean=False)
    model = CachedModel(plain, capturer=capturer or TapeCapturer(), **sizes)  # type: ignore[arg-type]
    assert isinstance(model._passes, CapturedPasses)
    return model


def make_eager(lm: CausalLM, **sizes: int) -> CachedModel:
    model = CachedModel(lm, **({"num_slots": 2, "max_length": 160, "max_tree_rows": 8} | sizes))
    assert isinstance(model._passes, EagerPasses)
    return model


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max().item() <= 1e-5 * max(1.0, expected.abs().max().item())


def test_random_work_gives_the_logits_of_eager_passes_and_captures_nothing_twice(lm: CausalLM) -> None:
    """Rows of all numbers, trees, rewinds, compactions on two slots, with NaN in every row that is not in use."""
    capturer = TapeCapturer()
    captured, eager = make_captured(lm, capturer, max_tree_rows=16), make_eager(lm, max_tree_rows=16)
    captured.warm_up()
    num_captures, addresses = captured.num_captures, captured.addresses()
    rng = random.Random(4)
    num_passes = 0
    for _ in range(220):
        slot = rng.randrange(2)
        rows = captured.rows[slot]
        for other in range(2):
            captured.cache.fill(other, captured.rows[other].used, captured.cache.capacity, math.nan)
        if rows.used > 45:
            captured.clear(slot)
            eager.clear(slot)
        if rows.length and rng.random() < 0.2:
            number = rng.randint(0, min(3, rows.length - 1))
            captured.rewind(slot, number)
            eager.rewind(slot, number)
        linear = rng.randint(0 if rows.length else 1, 6)
        num_tree = rng.randint(0 if linear else 1, 6)
        start = rows.length + linear
        parents = [rng.choice([start - 1, *range(start, start + i)]) for i in range(num_tree)]
        tokens = [rng.randrange(VOCAB) for _ in range(linear + num_tree)]
        num_logits = rng.randint(1, len(tokens))
        one, other_one = (
            model.forward(slot, tokens, num_committed=linear, parents=parents, num_logits=num_logits)
            for model in (captured, eager)
        )
        assert_close(one, other_one)
        num_passes += 1
        path, rest, tip = [], [], start - 1
        for row, parent in enumerate(parents, start):
            if parent == tip and rng.random() < 0.5:
                path.append(row)
                tip = row
        kept = {tip}
        for row, parent in enumerate(parents, start):
            if row > tip and parent in kept and row not in path:
                rest.append(row)
                kept.add(row)
        for model in (captured, eager):
            model.keep(slot, path, rest)
            if rest:  # committed rows do not follow tree rows, so these are only compared
                model.rewind(slot, len(rest))
    assert captured.num_captures == num_captures == capturer.num_captures
    assert captured.addresses() == addresses
    assert capturer.num_replays > num_passes


def test_padding_rows_write_into_no_slot(lm: CausalLM) -> None:
    model = make_captured(lm)
    model.warm_up()
    for slot in range(2):
        model.cache.fill(slot, 0, model.cache.capacity, 0.0)
        model.forward(slot, [5 + slot, 9, 200], num_committed=3)
    before = [tensor.clone() for segment in model.cache.segments for tensor in segment.tensors]
    model.forward(1, [11, 12, 13, 14, 15], parents=[2, 3, 3, 2, 6])  # five rows in a bucket of eight
    segment = model.cache.segments[0]
    new = set(range(segment.num_rows + 3, segment.num_rows + 8))
    for old, tensor in zip(before, segment.tensors, strict=True):
        changed = {int(i) for i in (old != tensor).any(-1).any(0).nonzero().flatten()}
        assert changed - {segment.sink} == new
        assert not tensor[:, segment.blank].any()


def test_warming_up_again_while_sessions_are_open_touches_none_of_their_rows(lm: CausalLM) -> None:
    """That is what a growing cache does."""
    model = make_captured(lm)
    model.warm_up()
    model.forward(0, list(range(40, 100)), num_committed=60, num_logits=1)
    before = [tensor[:, :60].clone() for tensor in model.cache.segments[0].tensors]
    model.forward(1, list(range(40, 100)), num_committed=60, num_logits=1)
    model.forward(1, [7] * 8, num_committed=8, num_logits=1)
    assert len(model.cache.segments) == 2
    after = [tensor[:, :60] for tensor in model.cache.segments[0].tensors]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_logits_of_one_replay_are_not_overwritten_by_the_next(lm: CausalLM) -> None:
    model = make_captured(lm)
    first = model.forward(0, [1, 2], num_committed=2)
    copy = first.clone()
    model.forward(0, [3, 4], num_committed=2)
    assert first.dtype == torch.float32
    assert torch.equal(first, copy)


def test_the_cache_grows_by_segments_moves_nothing_and_counts_its_captures(lm: CausalLM) -> None:
    capturer = TapeCapturer()
    model, eager = make_captured(lm, capturer), make_eager(lm)
    assert model.cache.bounds == (64, 168)
    model.warm_up()
    num_bytes, addresses, at_start = model.cache.num_bytes, model.addresses(), model.num_captures
    counts, segments = [], []
    rng = random.Random(9)
    for _ in range(20):
        tokens = [rng.randrange(VOCAB) for _ in range(8)]
        assert_close(*(m.forward(0, tokens, num_committed=8) for m in (model, eager)))
        counts.append(model.num_captures)
        segments.append(len(model.cache.segments))
    assert set(addresses) <= set(model.addresses())
    # Eight passes fit in the first segment; with the ninth the cache has grown to the end.
    assert segments == [1] * 8 + [2] * 12
    assert counts[:8] == [at_start] * 8
    assert len(set(counts[8:])) == 1
    # Two lengths of eleven shapes, and a compaction for each number of segments; three shapes that two slots share.
    assert (at_start, counts[-1]) == (12 + 3, 24 + 3)
    assert counts[-1] == capturer.num_captures
    assert model.cache.num_bytes > 2 * num_bytes
    # Behind the edge of a segment: a tree across it, compacted, and a rewind back over it.
    for m in (model, eager):
        m.rewind(0, 98)
    for m in (model, eager):
        assert m.rows[0].length == 62
    tree = [(3, 61), (4, 61), (5, 63), (6, 64), (7, 62)]
    assert_close(*(m.forward(0, [t for t, _ in tree], parents=[p for _, p in tree]) for m in (model, eager)))
    for m in (model, eager):
        m.keep(0, [63, 64, 65])
    model.cache.fill(0, 65, 168, math.nan)
    assert_close(*(m.forward(0, [8], num_committed=1) for m in (model, eager)))


def test_a_cache_that_cannot_grow_costs_the_pass_only(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_captured(lm)
    model.warm_up()
    model.forward(0, [1] * 60, num_committed=60, num_logits=1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("engine.cache.Segment", full)
    with pytest.raises(CacheError, match="no memory for a cache of 168 positions in 2 slots; it has 64"):
        model.forward(0, [1] * 8, num_committed=8, num_logits=1)
    assert model.rows[0].used == 60
    assert model.forward(0, [1] * 2, num_committed=2, num_logits=1).isfinite().all()


def test_the_number_of_captures_is_constant_over_a_hundred_requests(lm: CausalLM) -> None:
    """And so is where everything lies: the first request finds all that the hundredth does (C079)."""
    models = [make_captured(lm), make_captured(lm)]
    for model in models:
        self_check(model)
        model.warm_up()
    target, drafter = HFTarget(models[0], vocab_size=VOCAB), HFDrafter(models[1], vocab_size=VOCAB)
    before = [(model.num_captures, model.addresses()) for model in models]
    assert all(count > 0 for count, _ in before)
    for seed in range(100):
        sampling = Sampling(temperature=0.8, seed=seed)
        prompt = [4 + (seed + i) % 300 for i in range(3 + seed % 20)]
        num = len(prompt)
        target.open(0, sampling=sampling, tokens=prompt, num_prompt=num, stop_ids=())
        target.prefill(0, 0, num - 1)
        drafter.open(0, sampling=sampling, num_prompt=num)
        step = DraftStep(
            slot=0, accepted=(), keep=frozenset(), commit_start=0, commit=tuple(prompt), nodes=(), expand_root=True,
            num_children=3,
        )  # fmt: skip
        (proposed,) = drafter.step([step])
        assert not isinstance(proposed, Exception)
        candidates = [child.token for child in proposed.children[-1]][: 1 + seed % 3]
        request = VerifyPass(
            slot=0, start=num, tokens=(prompt[-1], *candidates), parents=(-1, *[0] * len(candidates)), max_tokens=3
        )
        (result,) = target.verify([request])
        assert isinstance(result, VerifyResult)
        target.close(0)
        drafter.close(0)
        assert [(model.num_captures, model.addresses()) for model in models] == before


def test_a_model_that_cannot_be_captured_is_served_without_and_says_why(
    lm: CausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def capture(self, fn: Any) -> Replay:
            raise CannotCapture("aten.nonzero.default waits for a result of the model")

    model, eager = make_captured(lm, Refusing()), make_eager(lm)
    with caplog.at_level(logging.WARNING):
        model.warm_up()
    assert "passes are not captured" in caplog.text
    assert "nonzero" in caplog.text
    assert model.num_captures == 0
    assert_close(*(m.forward(0, [3, 4, 5], num_committed=3) for m in (model, eager)))


def _stale_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CapturedPasses._write

    def write(self: CapturedPasses, shape: Shape, inputs: Any, mask: Any, sliding: Any, **where: Any) -> None:
        kept = self._masks[shape.length].full.clone()
        original(self, shape, inputs, mask, sliding, **where)
        if where["used"] > 6:
            self._masks[shape.length].full.copy_(kept)

    monkeypatch.setattr(CapturedPasses, "_write", write)


def _new_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask built anew: the graph goes on reading the old one."""
    original = CapturedPasses._fill

    def fill(self: CapturedPasses, shape: Shape, *args: Any) -> None:
        self._masks[shape.length] = type(self._masks[shape.length])(self._masks[shape.length].full.clone())
        original(self, shape, *args)

    monkeypatch.setattr(CapturedPasses, "_fill", fill)


def _shared_output(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CapturedPasses.run

    def run(self: CapturedPasses, *args: Any) -> torch.Tensor:
        logits = original(self, *args)
        end = self.buckets.shape(len(args[3]), args[2].used, args[4]).num_logits
        return self._logits[end - logits.shape[0] : end]

    monkeypatch.setattr(CapturedPasses, "run", run)


def _wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding behind the rows of the pass, logits taken from the end."""
    original = CapturedPasses.run

    def run(self: CapturedPasses, *args: Any) -> torch.Tensor:
        logits = original(self, *args)
        return self._logits[: logits.shape[0]].clone()

    monkeypatch.setattr(CapturedPasses, "run", run)


def _padding_into_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows go to row 0 of the first slot instead of SINK."""
    original = CapturedPasses._write

    def write(self: CapturedPasses, *args: Any, **where: Any) -> None:
        segment = self.cache.segments[0]
        sink, segment.sink = segment.sink, 0
        try:
            original(self, *args, **where)
        finally:
            segment.sink = sink

    monkeypatch.setattr(CapturedPasses, "_write", write)


def _stale_rows_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in use is gathered from the slot, and hidden by the mask alone."""
    original = CapturedPasses._write

    def write(self: CapturedPasses, *args: Any, **where: Any) -> None:
        original(self, *args, **(where | {"used": self.cache.segments[0].num_rows} if where["used"] else where))

    monkeypatch.setattr(CapturedPasses, "_write", write)


def _others_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a shared pass see what all its slots have in use."""
    original = SharedPasses._fill

    def fill(self: SharedPasses, num_rows: int, length: int, runs: Any) -> None:
        original(self, num_rows, length, runs)
        used = sum(run.rows.used for run in runs)
        self._masks[length].full[..., :used] |= bool(runs)

    monkeypatch.setattr(SharedPasses, "_fill", fill)


def _no_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedPasses, "move", lambda *args: None)


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (_stale_mask, "not scored|differently"),
        (_new_mask, "another address|differently"),
        (_shared_output, "overwritten|not scored"),
        (_wrong_rows, "differently|not scored"),
        (_padding_into_a_slot, "differently|not scored"),
        # What such a row holds before the check poisons it is anybody's guess.
        (_stale_rows_seen, "not in use are read|scores a text differently"),
        (_others_seen, "sessions that share a pass are scored differently"),
        (_no_compaction, "after the accepted rows were moved together"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_self_check_notices_each_way_to_break_a_captured_pass(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch, break_it: Any, told: str
) -> None:
    model = make_captured(lm)
    self_check(model)
    broken = make_captured(lm)
    break_it(monkeypatch)
    with pytest.raises(CheckpointError, match=told):
        self_check(broken)
