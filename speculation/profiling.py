"""Timing a device that works behind a queue, without blaming one stretch for another's work. Pure: the clock and the
device's `synchronize` are arguments.

Launches return at once, so a timer must drain the queue at both ends. The drain at the start is the work of whatever
ran before: it is kept apart (`drained_s`), because a leading synchronize inside the timed stretch makes drafting
look as slow as the verification that precedes it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class DeviceTimer:
    """Durations by name, in seconds of `clock`.

    Args:
        synchronize: returns when the device's queue is empty.
        clock: monotonic seconds.

    Attributes:
        durations: of each stretch: from an empty queue to an empty queue.
        drained_s: what was waited for before a stretch began, by the name of that stretch.
    """

    synchronize: Callable[[], None]
    clock: Callable[[], float]
    durations: dict[str, list[float]] = field(default_factory=dict)
    drained_s: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time the block; a block that raises is not counted."""
        arrived = self.clock()
        self.synchronize()
        began = self.clock()
        yield
        self.synchronize()
        ended = self.clock()
        self.drained_s.setdefault(name, []).append(began - arrived)
        self.durations.setdefault(name, []).append(ended - began)

    def forget_last(self) -> None:
        """Take back the last stretch of each name, as of a warm-up."""
        for values in (*self.durations.values(), *self.drained_s.values()):
            values.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingCost:
    """The same work with and without timers; medians in seconds."""

    profiled_s: float
    unprofiled_s: float

    @property
    def difference_s(self) -> float:
        """What the timers add: lost overlap and their own time. Negative is noise."""
        return self.profiled_s - self.unprofiled_s

    @property
    def share(self) -> float:
        """The difference, of an unprofiled cycle."""
        return self.difference_s / self.unprofiled_s

    def __str__(self) -> str:
        return (
            f"profiled {self.profiled_s * 1e3:.2f} ms, unprofiled {self.unprofiled_s * 1e3:.2f} ms: "
            f"profiling changes a cycle by {self.difference_s * 1e3:+.2f} ms ({self.share:+.1%})"
        )


def profiling_cost(profiled_s: Sequence[float], unprofiled_s: Sequence[float]) -> ProfilingCost:
    """Compare cycles of a profiled run with those of an unprofiled one."""
    if not profiled_s or not unprofiled_s:
        raise ValueError("both a profiled and an unprofiled run are needed, one of them has no cycle")
    return ProfilingCost(profiled_s=statistics.median(profiled_s), unprofiled_s=statistics.median(unprofiled_s))
