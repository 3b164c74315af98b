"""Log lines that cannot flood: each kind of event is told a few times, then counted and told with its count.

A peer that is turned away a thousand times a second, or a link that breaks as often as it is made, must not fill a
disk; but that it happens, and how often, has to be in the log.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

INTERVAL_S = 60.0
MAX_BURST = 5
MAX_KEYS = 1024


class RateLimited:
    """Logs at most `MAX_BURST` lines of one key in `INTERVAL_S`; the next line says how many were left out.

    Args:
        clock: in seconds.
    """

    def __init__(self, log: logging.Logger, level: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._level = level
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __call__(self, key: str, text: str, *values: object) -> None:
        """Log a line, unless there were too many with this key."""
        now = self._clock()
        since, num = self._seen.pop(key, (now, 0))
        left_out = 0
        if now - since >= INTERVAL_S:
            left_out, since, num = max(0, num - MAX_BURST), now, 0
        self._seen[key] = (since, num + 1)
        if len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
        if num < MAX_BURST:
            if left_out:
                text, values = f"{text} (and {left_out} times more in the last minute)", values
            self._log.log(self._level, text, *values)
