"""The explicit list of shapes that passes are captured for."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import CacheError

FIRST_LENGTH = 512
"""The shortest view of the cache that passes are captured for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is fixed in a captured pass: rows run, rows seen, of how many last rows logits are computed."""

    num_rows: int
    length: int
    num_logits: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rows run and rows seen are rounded up to these.

    Attributes:
        rows: numbers of rows of a pass, ascending.
        full_rows: passes up to so many rows are also captured with logits of all rows, others with those of the last.
        lengths: numbers of rows seen, ascending; the last is the capacity of a slot.
    """

    rows: tuple[int, ...]
    full_rows: int
    lengths: tuple[int, ...]

    @classmethod
    def powers(cls, *, max_rows: int, full_rows: int, first_length: int, capacity: int) -> Buckets:
        """Powers of two up to at least `max_rows` and `full_rows`; lengths doubling up to `capacity`."""
        largest = max(max_rows, full_rows)
        rows = tuple(1 << i for i in range((largest - 1).bit_length() + 1))
        full = next(bucket for bucket in rows if bucket >= full_rows)
        return cls(rows=rows, full_rows=full, lengths=doubling(first_length, capacity))

    def shapes(self, length: int) -> list[Shape]:
        """All shapes of one length."""
        wanted = [(n, k) for n in self.rows for k in {1, n if n <= self.full_rows else 1}]
        return [Shape(n, length, k) for n, k in wanted]

    def shape(self, num_rows: int, length: int, num_logits: int) -> Shape:
        """The smallest shape that a pass fits.

        Raises:
            CacheError: none is large enough.
        """
        rows = next((bucket for bucket in self.rows if bucket >= num_rows), 0)
        seen = next((bucket for bucket in self.lengths if bucket >= length), 0)
        if not rows or not seen or (num_logits > 1 and rows > self.full_rows):
            raise CacheError(
                f"a pass of {num_rows} rows with {num_logits} rows of logits over {length} rows exceeds the largest: "
                f"{self.rows[-1]} rows, {self.full_rows} of them with logits, over {self.lengths[-1]} rows"
            )
        return Shape(rows, seen, 1 if num_logits == 1 else rows)


def doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... and `last`, leaving out what is just below it."""
    steps = []
    while first <= 3 * last // 4:
        steps.append(first)
        first *= 2
    return (*steps, last)
