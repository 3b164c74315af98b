"""What a pass costs by its number of rows: measured at the start, then followed.

On a GPU a pass takes the same time up to dozens of rows, on a CPU each row costs; which it is decides how many
candidates are worth scoring.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

FOLLOW = 0.05
"""Weight of a new observation."""


class PassCosts:
    """Seconds of a pass, interpolated between buckets of rows and never falling with more rows.

    Args:
        measured: rows to seconds, at least one entry.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        if not measured or min(measured) < 1 or min(measured.values()) <= 0:
            raise ValueError(f"pass costs must map rows >= 1 to seconds > 0, got {dict(measured)!r}")
        self._rows = sorted(measured)
        self._seconds = [measured[rows] for rows in self._rows]
        self._table: list[float] = []

    def seconds(self, num_rows: int) -> float:
        """Expected duration of a pass over so many rows; beyond the last bucket by its slope."""
        if not 0 < num_rows < len(self._table):
            self._tabulate(max(num_rows, self._rows[-1]))
        return self._table[num_rows]

    def observe(self, num_rows: int, seconds: float) -> None:
        """A pass has taken so long; the buckets around its rows move towards that."""
        right = bisect_left(self._rows, num_rows)
        expected = self.seconds(num_rows)
        # A pause of the machine is no news about passes of this size.
        ratio = min(max(seconds / expected, 0.25), 4.0)
        for index, weight in self._around(num_rows, right):
            self._seconds[index] *= 1.0 + FOLLOW * weight * (ratio - 1.0)
        self._table = []

    def _around(self, num_rows: int, right: int) -> list[tuple[int, float]]:
        if right == len(self._rows):
            return [(right - 1, 1.0)]
        if self._rows[right] == num_rows or right == 0:
            return [(right, 1.0)]
        share = (num_rows - self._rows[right - 1]) / (self._rows[right] - self._rows[right - 1])
        return [(right - 1, 1.0 - share), (right, share)]

    def _tabulate(self, most: int) -> None:
        """Fill the table 0..most; a pass is asked about far more often than the buckets move."""
        table = [0.0]
        for num_rows in range(1, most + 1):
            right = bisect_left(self._rows, num_rows)
            around = self._around(num_rows, right)
            seconds = sum(self._seconds[index] * weight for index, weight in around)
            if right == len(self._rows) and right > 1:
                slope = (self._seconds[-1] - self._seconds[-2]) / (self._rows[-1] - self._rows[-2])
                seconds += slope * (num_rows - self._rows[-1])
            table.append(max(seconds, table[-1]))
        self._table = table
