"""Recorded answers played back, and the emulated drafter: its hit rates are those it claims."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from engine.errors import EngineError
from engine.replay import (
    Pace,
    Recording,
    ReplayDrafter,
    ReplayTarget,
    emulated,
    from_trace,
    load_recordings,
    save_recordings,
)
from engine.timing import measure_pass_costs
from speculation.passes import Child, DraftResult, DraftStep, NodeRow, Sampling, VerifyPass, VerifyResult

RNG = random.Random(5)
RECORDING = Recording(
    kind="chat",
    prompt=tuple(RNG.randrange(32_000) for _ in range(12)),
    answer=tuple(RNG.randrange(32_000) for _ in range(4000)),
    tops=tuple((i, i + 1) for i in range(4000)),
    drafted=tuple(((i, -0.5), (i + 1, -1.5)) for i in range(4000)),
)


def test_the_emulated_drafter_has_the_hit_rates_and_the_calibration_it_claims() -> None:
    propose = emulated(RECORDING)
    hits, bins = {1: 0, 4: 0}, {}
    for index, token in enumerate(RECORDING.answer):
        children = propose(index, True, 0)
        for best in hits:
            hits[best] += any(child.token == token for child in children[:best])
        for child in children:
            said, right, num = bins.setdefault(round(math.exp(child.logprob) * 5), [0.0, 0, 0])
            bins[round(math.exp(child.logprob) * 5)] = [
                said + math.exp(child.logprob), right + (child.token == token), num + 1,
            ]  # fmt: skip
    assert hits[1] / len(RECORDING.answer) == pytest.approx(0.735, abs=0.03)
    assert hits[4] / len(RECORDING.answer) == pytest.approx(0.924, abs=0.02)
    for said, right, num in bins.values():
        if num > 200:
            assert right / num == pytest.approx(said / num, abs=0.05)


def test_what_is_proposed_depends_on_the_path_alone() -> None:
    one, other = emulated(RECORDING), emulated(RECORDING)
    assert one(7, True, 1) == other(7, True, 2)
    assert one(7, False, 1) == other(7, False, 1)
    assert one(7, False, 1) != one(7, False, 2)


def test_off_the_true_path_a_recorded_drafter_is_as_sure_and_wrong() -> None:
    propose = from_trace(RECORDING)
    assert propose(3, True, 0) == (Child(token=3, logprob=-0.5), Child(token=4, logprob=-1.5))
    off = propose(3, False, 99)
    assert [child.logprob for child in off] == [-0.5, -1.5]
    assert {child.token for child in off}.isdisjoint({3, 4})


def test_the_target_commits_its_recorded_answer_and_its_tops() -> None:
    target = ReplayTarget([RECORDING], pace=Pace(0.0), real_time=False)
    prompt, answer = RECORDING.prompt, RECORDING.answer
    target.open(0, sampling=Sampling(), tokens=prompt, num_prompt=len(prompt), stop_ids=())
    target.prefill(0, 0, len(prompt) - 1)
    tokens = (prompt[-1], answer[0], 5, answer[1])
    request = VerifyPass(slot=0, start=len(prompt), tokens=tokens, parents=(-1, 0, 1, 1), max_tokens=9, num_tops=1)
    (result,) = target.verify([request])
    assert isinstance(result, VerifyResult)
    assert (result.tokens, result.rows) == (answer[:3], (1, 3))
    assert result.tops == ((0,), (1,), (2,))


def test_the_drafter_follows_accepted_nodes_and_commits() -> None:
    drafter = ReplayDrafter([RECORDING], from_trace, pace=Pace(0.0), real_time=False)
    prompt, answer = RECORDING.prompt, RECORDING.answer
    drafter.open(0, sampling=Sampling(), num_prompt=len(prompt))
    common = {"slot": 0, "num_children": 1}
    (first,) = drafter.step(
        [DraftStep(accepted=(), keep=frozenset(), commit_start=0, commit=prompt, nodes=(), expand_root=True, **common)]
    )
    assert isinstance(first, DraftResult)
    assert first.children == {-1: (Child(token=0, logprob=-0.5),)}
    row = NodeRow(node=7, parent=-1, token=answer[0])
    (second,) = drafter.step(
        [DraftStep(accepted=(), keep=frozenset(), commit_start=len(prompt), commit=(), nodes=(row,),
                   expand_root=False, **common)]
    )  # fmt: skip
    assert isinstance(second, DraftResult)
    assert second.children == {7: (Child(token=1, logprob=-0.5),)}
    (third,) = drafter.step(
        [DraftStep(accepted=(7,), keep=frozenset(), commit_start=len(prompt) + 1, commit=(answer[1],), nodes=(),
                   expand_root=True, **common)]
    )  # fmt: skip
    assert isinstance(third, DraftResult)
    assert third.children == {-1: (Child(token=2, logprob=-0.5),)}


def test_recordings_survive_the_file_and_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "recordings.json.gz"
    save_recordings(path, [RECORDING])
    assert load_recordings(path) == [RECORDING]
    (tmp_path / "other").write_text("{}")
    for bad in (tmp_path / "other", tmp_path / "none"):
        with pytest.raises(EngineError, match="holds no recordings"):
            load_recordings(bad)


def test_a_pace_is_read_from_its_name() -> None:
    pace = Pace.parse("34+0.1/16")
    assert pace.seconds(16) == pytest.approx(0.034)
    assert pace.seconds(26) == pytest.approx(0.035)
    assert Pace.parse("3").seconds(9) == pytest.approx(0.003)
    for text in ("", "x", "3+", "3+x", "-1", "3+0.1/0"):
        if text == "3+":
            continue
        with pytest.raises(ValueError, match="pace must"):
            Pace.parse(text)


def test_pass_costs_are_measured_for_powers_of_two_up_to_the_limit() -> None:
    target = ReplayTarget([], pace=Pace(0.0), max_rows=12, max_length=500, real_time=False)
    costs = measure_pass_costs(target)
    assert sorted(costs) == [1, 2, 4, 8, 12]
    assert min(costs.values()) > 0
    target.open(0, sampling=Sampling(), tokens=(1,), num_prompt=1, stop_ids=())  # the slot is free again
