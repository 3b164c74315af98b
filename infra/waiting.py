"""Bounded waits with jitter. The clock is an argument, so tests wait without waiting."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from infra.errors import ProviderError

T = TypeVar("T")


class Clock(Protocol):
    """Time as this package sees it."""

    def now(self) -> float:
        """Seconds, monotonic."""
        ...

    def utc(self) -> datetime.datetime: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's."""

    def now(self) -> float:
        return time.monotonic()

    def utc(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Waiter:
    """Waits that grow, with jitter: two runs, or twenty nodes, do not ask in step."""

    def __init__(self, clock: Clock, rng: random.Random, *, first_s: float = 1.0, cap_s: float = 15.0) -> None:
        self.clock = clock
        self._rng = rng
        self._first_s = first_s
        self._cap_s = cap_s

    def pause_s(self, attempt: int) -> float:
        """Between half of and the whole growing step."""
        whole = min(self._cap_s, self._first_s * 2.0 ** min(attempt, 30))
        return whole * self._rng.uniform(0.5, 1.0)

    def until(self, done: Callable[[], T | None], *, deadline_s: float) -> T | None:
        """Ask until the answer is not None; None when the time is up. Asks at least once."""
        end = self.clock.now() + deadline_s
        attempt = 0
        while True:
            answer = done()
            if answer is not None:
                return answer
            pause = self.pause_s(attempt)
            if self.clock.now() + pause > end:
                return None
            self.clock.sleep(pause)
            attempt += 1

    def retry(self, call: Callable[[], T], *, on: tuple[type[ProviderError], ...], deadline_s: float) -> T:
        """Call until it succeeds.

        Raises:
            ProviderError: another error at once, one of `on` when the time is up.
        """
        last: list[ProviderError] = []

        def attempt() -> tuple[T] | None:
            try:
                return (call(),)
            except on as exc:
                last.append(exc)
                return None

        answer = self.until(attempt, deadline_s=deadline_s)
        if answer is None:
            raise last[-1]
        return answer[0]
