"""`foredraft-profile`: its cycles are real ones, nothing is blamed for another's work, and bad terms are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.capturer import TapeCapturer
from engine.checkpoint import Checkpoint
from engine.drafter import HFDrafter
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.replay import Pace
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.target import HFTarget
from engine.tiny import tiny_checkpoint
from scripts import profile_passes
from scripts.profile_models import LOGITS, VOCAB_SIZE
from scripts.profile_passes import CONTEXT_TOKENS, Cycles, figures_of, main, profile_rows, profile_text
from speculation.passes import DraftResult, DraftStep, VerifyPass, VerifyResult

LENGTH = 300


class FakeDevice:
    """A virtual clock and a queue: launching is free, draining takes the queued time."""

    def __init__(self) -> None:
        self.now = self.idle_at = 0.0
        self.num_drained = 0

    def launch(self, seconds: float) -> None:
        self.idle_at = max(self.idle_at, self.now) + seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.idle_at)
        self.num_drained += 1

    def clock(self) -> float:
        return self.now


class Launching:
    """A runner that takes so much host time and queues so much device time, and waits for nothing."""

    def __init__(self, runner: Any, device: FakeDevice, *, host_s: float, device_s: Callable[[int], float]) -> None:
        self.runner, self.device, self.host_s, self.device_s = runner, device, host_s, device_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def _work(self, num_rows: int) -> None:
        self.device.now += self.host_s
        self.device.launch(self.device_s(num_rows))

    def verify(self, batch: Sequence[VerifyPass]) -> list[VerifyResult | Exception]:
        self._work(len(batch[0].tokens))
        return list(self.runner.verify(batch))

    def step(self, batch: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        self._work(1)
        return list(self.runner.step(batch))


def scripted() -> tuple[ScriptedTarget, ScriptedDrafter]:
    sizes = {"max_length": LENGTH, "vocab_size": VOCAB_SIZE}
    return ScriptedTarget(LOGITS, max_rows=32, **sizes), ScriptedDrafter(LOGITS, max_rows=LENGTH, **sizes)


def launching(device: FakeDevice, host_s: float = 0.0) -> tuple[Any, Any]:
    target, drafter = scripted()
    return (
        Launching(target, device, host_s=host_s, device_s=lambda rows: 0.030 + 0.001 * rows),
        Launching(drafter, device, host_s=host_s, device_s=lambda rows: 0.004),
    )


def test_drafting_is_not_blamed_for_the_verification_still_in_the_queue() -> None:
    device = FakeDevice()
    profile = profile_rows(
        *launching(device), 5, turns=2, cycles=4, synchronize=device.synchronize, clock=device.clock
    )  # fmt: skip
    assert profile.draft_s == pytest.approx(4 * 0.004)
    assert profile.draft_token_s == pytest.approx(0.004)
    assert profile.verify_s == pytest.approx(0.035)
    # The device is the limit either way, so the timers change nothing.
    assert profile.cost.profiled_s == pytest.approx(0.051)
    assert profile.cost.difference_s == pytest.approx(0)


def test_what_the_timers_take_from_a_run_that_overlaps_is_printed() -> None:
    device = FakeDevice()
    target, drafter = launching(device, host_s=0.002)
    profiles = [
        profile_rows(target, drafter, rows, turns=2, cycles=20, synchronize=device.synchronize, clock=device.clock)
        for rows in (2, 3, 5)
    ]
    # Unprofiled, the host's 2 ms a call are hidden behind the device; drained at each end they are not.
    for profile, num_calls in zip(profiles, (2, 3, 5), strict=True):
        assert 0 < profile.cost.difference_s <= num_calls * 0.002
    text = profile_text(figures_of(profiles), profiles)
    assert text.count("profiling changes a cycle by +") == 3
    assert "doubtful: cycles of 5 rows: profiled they take +8%" in text


def test_unprofiled_cycles_drain_the_queue_only_at_the_ends_of_a_turn() -> None:
    device = FakeDevice()
    profile_rows(*launching(device), 5, turns=3, cycles=7, synchronize=device.synchronize, clock=device.clock)
    # Of each of 3 profiled turns 8 cycles of two stretches with two drains each, and two at the ends of all turns.
    assert device.num_drained == 3 * 8 * 2 * 2 + 6 * 2


def test_profiled_and_unprofiled_turns_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[bool] = []
    enter = Cycles.__enter__

    def noted(self: Cycles) -> Cycles:
        order.append(self.timer is not None)
        return enter(self)

    monkeypatch.setattr(Cycles, "__enter__", noted)
    target, drafter = scripted()
    device = FakeDevice()
    device.launch(1.0)
    with pytest.raises(ZeroDivisionError):  # nothing moves this clock
        str(profile_rows(target, drafter, 2, turns=3, cycles=1, synchronize=lambda: None, clock=device.clock).cost)
    assert order == [True, False, False, True, True, False]


def model(lm: CausalLM, **more: Any) -> CachedModel:
    made = CachedModel(lm, num_slots=1, max_length=LENGTH, max_tree_rows=24, **more)
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("profile") / "model", seed=7, arch="qwen2")


@pytest.mark.parametrize("chains", [False, True])
def test_a_model_that_drafts_for_itself_has_every_candidate_accepted(checkpoint: Path, chains: bool) -> None:
    loaded = Checkpoint(str(checkpoint))
    lm, vocab_size = loaded.load(), loaded.tokenizer.vocab_size
    more = {"capturer": TapeCapturer(), "chain_vocab": vocab_size} if chains else {}
    plain = CausalLM(lm.model, lean=False)
    drafter = HFDrafter(model(plain, **more), vocab_size=vocab_size)
    assert (drafter.max_ahead > 0) == chains
    with Cycles(HFTarget(model(plain), vocab_size=vocab_size), drafter, 8) as session:
        for number in range(1, 6):
            session.run()
            assert len(session.accepted) == 7
            assert len(session.tokens) == CONTEXT_TOKENS + 8 * number


def test_candidates_that_are_rejected_leave_the_drafter_where_the_target_is() -> None:
    target, _ = scripted()
    # Right at even positions only; a step that does not fit what the drafter's cache holds would raise.
    drafter = ScriptedDrafter(
        next_tokens=lambda prefix: [int(LOGITS(prefix).argmax()) if len(prefix) % 2 else 0], max_length=LENGTH
    )
    with Cycles(target, drafter, 6) as session:
        for _ in range(8):
            session.run()
        assert drafter.steps[-1].commit_start + len(drafter.steps[-1].commit) <= len(session.tokens)
        assert 0 < sum(len(step.accepted) for step in drafter.steps) < 8 * 5


def costs_of(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], *flags: str) -> int:
    """Run the command over passes that take what is given, on a virtual clock."""
    device = FakeDevice()

    def paced(pace: Pace, **sizes: Any) -> Any:
        target, _ = scripted()
        return Launching(target, device, host_s=0, device_s=seconds.__getitem__)

    monkeypatch.setattr(profile_passes, "paced_target", paced)
    monkeypatch.setattr(profile_passes, "synchronizer", lambda: device.synchronize)
    defaults = dict(profile_rows.__kwdefaults__ or {}) | {"clock": device.clock}
    monkeypatch.setattr(profile_rows, "__kwdefaults__", defaults)
    rows = ",".join(map(str, seconds))
    return main(["--target-pace", "1", "--rows", rows, "--turns", "1", "--cycles", "2", *flags])


def test_the_line_through_the_passes_is_what_they_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert costs_of(monkeypatch, {rows: 0.034 + 0.0005 * rows for rows in (1, 2, 4, 8)}, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verify_fit"]["pass_ms"] == pytest.approx(34)
    assert found["verify_fit"]["row_ms"] == pytest.approx(0.5)
    assert found["refused"] == found["doubtful"] == []
    assert found["verify_costs"] == "1:34.5,2:35,4:36,8:38"
    assert [row["draft_ms"] for row in found["rows"]] == [None] * 4


def test_an_intercept_with_an_error_larger_than_its_value_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noisy = {1: 0.0013, 2: 0.0016, 3: 0.0045, 4: 0.0037}
    assert costs_of(monkeypatch, noisy, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verify_fit"]["pass_ms"] is None
    assert found["verify_fit"]["pass_ms_error"] > 0
    assert found["verify_fit"]["row_ms"] > 0
    assert costs_of(monkeypatch, noisy) == 0
    text = capsys.readouterr().out
    assert "refused: pass_ms, the intercept of the line over all rows" in text
    assert "the error exceeds the value, so this is no answer" in text
    assert "a pass before its first row" not in text


def test_a_checkpoint_is_profiled(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", str(checkpoint), "--drafter", str(checkpoint), "--rows", "1,2,4", "--turns", "1"]
    assert main([*words, "--cycles", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["rows"] for row in found["rows"]] == [1, 2, 4]
    assert all(row["verify_ms"] > 0 and row["unprofiled_cycle_ms"] > 0 for row in found["rows"])
    assert [row["draft_token_ms"] is not None for row in found["rows"]] == [False, True, True]


def test_wrong_flags_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, named in (
        (["--target-pace", "1", "--rows", "1,2"], "at least 3 numbers of rows"),
        (["--target-pace", "x"], "pace must be MS"),
        (["--target-pace", "1", "--cycles", "0"], "--cycles must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert named in capsys.readouterr().err
    assert main(["--target", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("profile: ")
