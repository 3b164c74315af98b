"""Timers against a device whose launches return at once."""

from __future__ import annotations

import pytest

from speculation.profiling import DeviceTimer, profiling_cost


class FakeDevice:
    """A virtual clock and a queue: launching is free, draining takes the queued time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.idle_at = 0.0

    def launch(self, seconds: float) -> None:
        self.idle_at = max(self.idle_at, self.now) + seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.idle_at)

    def clock(self) -> float:
        return self.now


def test_the_verification_still_in_the_queue_is_not_taken_for_drafting() -> None:
    device = FakeDevice()
    timer = DeviceTimer(device.synchronize, device.clock)
    device.launch(0.034)
    with timer.measure("draft"):
        device.launch(0.016)
    assert timer.durations == {"draft": [pytest.approx(0.016)]}
    assert timer.drained_s == {"draft": [pytest.approx(0.034)]}


def test_work_that_is_launched_in_a_stretch_is_waited_for_in_it() -> None:
    device = FakeDevice()
    timer = DeviceTimer(device.synchronize, device.clock)
    for seconds in (0.001, 0.002):
        with timer.measure("step"):
            device.launch(seconds)
    with timer.measure("nothing"):
        pass
    assert timer.durations == {"step": [pytest.approx(0.001), pytest.approx(0.002)], "nothing": [0]}


def test_a_stretch_that_raises_is_not_counted() -> None:
    device = FakeDevice()
    timer = DeviceTimer(device.synchronize, device.clock)
    with pytest.raises(RuntimeError), timer.measure("draft"):
        raise RuntimeError
    assert timer.durations == {}


def test_profiled_and_unprofiled_runs_are_compared() -> None:
    cost = profiling_cost([0.100, 0.101, 0.250], [0.09, 0.1, 0.08])
    assert cost.difference_s == pytest.approx(0.011)
    assert str(cost).endswith("profiling changes a cycle by +11.00 ms (+12.2%)")
    with pytest.raises(ValueError, match="both"):
        profiling_cost([], [1.0])
