"""Switching a far drafter off that does not pay, and back on."""

from __future__ import annotations

from speculation.gate import COMPARE_PASSES, FIRST_PAUSE_PASSES, PATIENCE_PASSES, TRIAL_PASSES, Gate, GateState


def feed(gate: Gate, passes: int, *, far: float, tokens: float = 1.0, seconds: float = 0.03) -> None:
    """Passes with `far` of `tokens` tokens each from the far drafter, on average."""
    owed_far = owed = 0.0
    for _ in range(passes):
        owed += tokens
        owed_far += far
        num, num_far = int(owed), min(int(owed_far), int(owed))
        owed, owed_far = owed - num, owed_far - num_far
        gate.on_pass(num_tokens=num, num_far=num_far, seconds=seconds, candidates=True)


def test_a_drafter_that_pays_stays() -> None:
    gate = Gate()
    feed(gate, 5000, far=1.0, tokens=2.0)
    assert gate.state is GateState.ON
    assert gate.num_closed == 0


def test_c069_a_hopeless_drafter_is_off_within_one_trial_and_retried_ever_less_often() -> None:
    gate = Gate()
    feed(gate, TRIAL_PASSES, far=0.0)
    assert gate.state is GateState.OFF
    feed(gate, FIRST_PAUSE_PASSES, far=0.0)
    assert gate.wanted
    feed(gate, TRIAL_PASSES, far=0.0)
    assert gate.state is GateState.OFF
    feed(gate, FIRST_PAUSE_PASSES, far=0.0)
    assert gate.state is GateState.OFF  # the pause is twice as long now
    on = 0
    for _ in range(20_000):
        feed(gate, 1, far=0.0)
        on += gate.wanted
    assert on < 0.05 * 20_000


def test_c069_a_drafter_that_recovers_is_taken_back() -> None:
    gate = Gate()
    feed(gate, TRIAL_PASSES, far=0.0)
    feed(gate, FIRST_PAUSE_PASSES, far=0.0)
    feed(gate, 400, far=1.0, tokens=2.0)
    assert gate.state is GateState.ON
    assert gate.num_closed == 1


def test_a_drafter_whose_work_slows_the_passes_more_than_it_brings_is_off() -> None:
    gate = Gate()
    feed(gate, TRIAL_PASSES, far=0.05, tokens=1.05, seconds=0.033)
    assert gate.state is GateState.COMPARE
    assert not gate.wanted
    feed(gate, COMPARE_PASSES, far=0.0, seconds=0.030)
    assert gate.state is GateState.OFF


def test_a_drafter_that_brings_little_and_costs_nothing_stays() -> None:
    gate = Gate()
    feed(gate, TRIAL_PASSES, far=0.05, tokens=1.05, seconds=0.030)
    feed(gate, COMPARE_PASSES, far=0.0, seconds=0.030)
    assert gate.state is GateState.ON


def test_a_trial_begins_with_the_first_candidates_or_when_none_come() -> None:
    gate = Gate()
    for _ in range(PATIENCE_PASSES):
        gate.on_pass(num_tokens=1, num_far=0, seconds=0.03, candidates=False)
    assert gate.state is GateState.ON
    for _ in range(TRIAL_PASSES + 1):
        gate.on_pass(num_tokens=1, num_far=0, seconds=0.03, candidates=False)
    assert gate.state is GateState.OFF
