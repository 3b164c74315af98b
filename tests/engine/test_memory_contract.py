"""The memory contract over many steps, and that the start-up self-check notices when it is broken."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache import KVCache
from engine.checkpoint import Checkpoint
from engine.drafter import HFDrafter
from engine.eager import EagerPasses
from engine.errors import CheckpointError
from engine.hf import CausalLM, FixedLayer
from engine.model import CachedModel
from engine.rows import SlotRows
from engine.selfcheck import self_check
from engine.target import HFTarget
from speculation.passes import DraftStep, Sampling, VerifyPass, VerifyResult


def make_model(lm: CausalLM, **sizes: int) -> CachedModel:
    return CachedModel(lm, **({"num_slots": 2, "max_length": 160, "max_tree_rows": 16} | sizes))


def test_a_thousand_mixed_steps_leave_addresses_and_logits_right(lm: CausalLM) -> None:
    model = make_model(lm)
    addresses = model.addresses()
    rng = random.Random(1)
    committed: dict[int, list[int]] = {0: [], 1: []}
    for number in range(1000):
        slot = rng.randrange(2)
        rows = model.rows[slot]
        if rows.length > 120:
            model.clear(slot)
            committed[slot] = []
        step = rng.random()
        if step < 0.3 or rows.length == 0:
            new = [rng.randrange(4, 300) for _ in range(rng.randint(1, 6))]
            logits = model.forward(slot, new, num_committed=len(new), num_logits=1)
            committed[slot] += new
        elif step < 0.8:
            n = rng.randint(1, 8)
            new = [rng.randrange(4, 300) for _ in range(n)]
            base = rows.length
            parents = [rng.choice([base - 1, *range(base, base + i)]) for i in range(n)]
            logits = model.forward(slot, new, parents=parents)
            path: list[int] = []
            tip = base - 1
            for i, parent in enumerate(parents):
                if parent == tip and rng.random() < 0.6:
                    path.append(base + i)
                    tip = base + i
            model.keep(slot, path)
            committed[slot] += [new[row - base] for row in path]
            continue
        else:
            drop = rng.randint(0, min(4, rows.length))
            model.rewind(slot, drop)
            committed[slot] = committed[slot][: len(committed[slot]) - drop]
            continue
        if number % 20 == 0:
            fresh = make_model(lm, num_slots=1)
            whole = committed[slot]
            expected = fresh.forward(0, whole, num_committed=len(whole), num_logits=1)
            assert torch.allclose(logits, expected, atol=1e-5 * expected.abs().max().item())
    assert model.addresses() == addresses


def test_memory_after_a_hundred_requests_is_that_after_three(lm: CausalLM) -> None:
    target = HFTarget(make_model(lm), vocab_size=320)
    drafter = HFDrafter(make_model(lm), vocab_size=320)

    def request(seed: int) -> None:
        sampling = Sampling(temperature=0.8, seed=seed)
        prompt = [4 + (seed + i) % 300 for i in range(12)]
        target.open(0, sampling=sampling, tokens=prompt, num_prompt=12, stop_ids=())
        target.prefill(0, 0, 11)
        drafter.open(0, sampling=sampling, num_prompt=12)
        step = DraftStep(
            slot=0, accepted=(), keep=frozenset(), commit_start=0, commit=tuple(prompt), nodes=(), expand_root=True,
            num_children=3,
        )  # fmt: skip
        (proposed,) = drafter.step([step])
        assert not isinstance(proposed, Exception)
        tokens = list(prompt)
        for _ in range(6):
            children = [child.token for child in proposed.children[-1]]
            rows = (tokens[-1], *children)
            (result,) = target.verify(
                [VerifyPass(slot=0, start=len(tokens), tokens=rows, parents=(-1, 0, 0, 0), max_tokens=3)]
            )
            assert isinstance(result, VerifyResult)
            tokens += result.tokens
        target.close(0)
        drafter.close(0)

    def resident_kb() -> int:
        gc.collect()
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    for seed in range(3):
        request(seed)
    after_three = resident_kb()
    for seed in range(3, 100):
        request(seed)
    assert resident_kb() <= 1.01 * after_three


def test_the_self_check_passes_and_leaves_the_slot_as_it_was(lm: CausalLM) -> None:
    model = make_model(lm)
    self_check(model)
    assert model.rows[0].used == 0
    assert all(not tensor[:, :64].any() for pair in model.cache.rows_of(0) for tensor in pair)


def _concatenate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that grows its cache, as DynamicCache does, and keeps rejected rows."""

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        grown = getattr(self, "grown", None)
        self.grown = (keys, values) if grown is None else tuple(
            torch.cat([old, new], 2) for old, new in zip(grown, (keys, values), strict=True)
        )  # fmt: skip
        length = self.attached.window.length
        return self.grown[0][:, :, -length:], self.grown[1][:, :, -length:]

    monkeypatch.setattr(FixedLayer, "update", update)


def _no_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "move", lambda self, slot, moves: None)


def _no_rewind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotRows, "rewind", lambda self, num_rows: None)


def _see_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: EagerPasses, num_rows: int, length: int, num_logits: int) -> torch.Tensor:
        self._mask[:, :, :num_rows, :length] = True
        return original(self, num_rows, length, num_logits)

    original = EagerPasses._run
    monkeypatch.setattr(EagerPasses, "_run", run)


def _no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: EagerPasses, num_rows: int, length: int, num_logits: int) -> torch.Tensor:
        self._positions[:, :num_rows] = 0
        return original(self, num_rows, length, num_logits)

    original = EagerPasses._run
    monkeypatch.setattr(EagerPasses, "_run", run)


def _one_output_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.zeros(64, 512)

    def run(self: EagerPasses, num_rows: int, length: int, num_logits: int) -> torch.Tensor:
        logits = original(self, num_rows, length, num_logits)
        out = buffer[: logits.shape[0], : logits.shape[1]]
        return out.copy_(logits)

    original = EagerPasses._run
    monkeypatch.setattr(EagerPasses, "_run", run)


def _longer_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of a whole bucket, masked: 0 x NaN is NaN, so stale rows are read after all."""

    def run(self: EagerPasses, num_rows: int, length: int, num_logits: int) -> torch.Tensor:
        longer = length + 8
        self._mask[:, :, :num_rows, length:longer] = False
        self._window.length = longer
        return original(self, num_rows, longer, num_logits)

    original = EagerPasses._run
    monkeypatch.setattr(EagerPasses, "_run", run)


def _moving_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: EagerPasses, num_rows: int, length: int, num_logits: int) -> torch.Tensor:
        self._mask = self._mask.clone()
        return original(self, num_rows, length, num_logits)

    original = EagerPasses._run
    monkeypatch.setattr(EagerPasses, "_run", run)


@pytest.mark.parametrize(
    ("break_it", "lean", "told"),
    [
        (_concatenate, False, "scored"),
        (_no_move, True, "after the accepted rows were moved together"),
        (_no_rewind, True, "books do not add up"),
        (_see_everything, True, "differently than without it"),
        (_no_positions, True, "differently than without it"),
        (_one_output_buffer, True, "overwritten|not scored"),
        (_longer_view, False, "not in use are read"),
        (_moving_buffer, True, "another address"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_broken_promise_is_noticed_and_names_the_version(
    monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], Path], break_it: Any, lean: bool, told: str
) -> None:
    loaded = Checkpoint(str(tiny("llama"))).load()
    model = make_model(loaded if lean else CausalLM(loaded.model, lean=False))
    break_it(monkeypatch)
    with pytest.raises(CheckpointError, match=told) as caught:
        self_check(model)
    assert f"transformers {version('transformers')}" in str(caught.value)
