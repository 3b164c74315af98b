"""What tracing adds: pairs of turns are compared, and the difference comes with its interval."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.trace_turns import Turn, comparison, processor_s


def turn(traced: bool, processor_us: float, wall_us: float = 1000.0) -> Turn:
    return Turn(traced=traced, processor_s=processor_us * 1e-6, wall_s=wall_us * 1e-6, num_passes=10)


def test_each_pair_of_turns_is_compared_whichever_comes_first() -> None:
    # The machine gets slower by a half over the turns; within a pair tracing adds 20, 30 and 25 microseconds.
    turns = [turn(True, 120), turn(False, 100), turn(False, 125), turn(True, 155), turn(True, 175), turn(False, 150)]
    found = comparison(turns)
    assert (found["turns of each"], found["passes"]) == (3, 60)
    processor = found["processor time of a pass, us"]
    assert (processor["traced"], processor["untraced"]) == pytest.approx((155, 125))
    assert processor["difference"] == pytest.approx(25)
    low, high = processor["difference_95"]
    # Student's t of two degrees: 4.303 × 5 / √3.
    assert (low, high) == pytest.approx((25 - 12.42, 25 + 12.42), abs=0.01)
    assert found["wall time of a pass, us"]["difference"] == pytest.approx(0)


def test_a_turn_without_its_other_is_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        comparison([turn(True, 1), turn(False, 1), turn(True, 1)])


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the figures are Linux's")
def test_processor_time_grows_with_work() -> None:
    before = processor_s([os.getpid()])
    assert before > 0
    while processor_s([os.getpid()]) == before:  # the system counts it now and then
        sum(range(100_000))
