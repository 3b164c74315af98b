"""Which rows of one cache slot hold what. Pure bookkeeping: tensors live in `engine/cache.py`.

    row      0 ... length-1 | length ... used-1     | used ... capacity-1
    holds    committed      | tree rows             | stale, never read
             position = row | parent before child   |

Rows in use are always contiguous, so the part of the storage that a forward pass looks at ends at the last used row.
Each operation either succeeds or raises `CacheError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import CacheError


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A row behind the committed ones.

    `parent` is a row; the last committed row for the children of the root (-1 when nothing is committed).
    `ancestors` has bit i set for the tree row `length + i`, if that is the row itself or above it.
    """

    parent: int
    position: int
    ancestors: int


class SlotRows:
    """Rows of one slot.

    Args:
        capacity: rows in the slot.
        max_length: positions are below it.
    """

    def __init__(self, *, capacity: int, max_length: int) -> None:
        self.capacity = capacity
        self.max_length = max_length
        self.length = 0
        self.tree: list[TreeRow] = []

    @property
    def used(self) -> int:
        """Rows in use, committed and tree."""
        return self.length + len(self.tree)

    def position(self, row: int) -> int:
        """Position in prompt + answer of a used row; -1 for row -1, before the first."""
        return row if row < self.length else self.tree[row - self.length].position

    def extend(self, num_rows: int) -> range:
        """Add committed rows at the next positions; there must be no tree rows. Returns the new rows."""
        if self.tree:
            raise CacheError(f"cannot extend the committed rows behind {len(self.tree)} tree rows")
        self._check_space(num_rows)
        if self.length + num_rows > self.max_length:
            raise CacheError(f"position {self.length + num_rows - 1} is beyond the limit of {self.max_length} tokens")
        self.length += num_rows
        return range(self.length - num_rows, self.length)

    def append(self, parents: Sequence[int]) -> range:
        """Add tree rows, parents before children. Returns the new rows.

        Args:
            parents: for each new row its parent's row: length - 1 for the root, or a tree row (also a new one).
        """
        self._check_space(len(parents))
        added: list[TreeRow] = []
        for row, parent in enumerate(parents, self.used):
            if not self.length - 1 <= parent < row:
                raise CacheError(f"parent of row {row} must be in {self.length - 1}..{row - 1}, got {parent}")
            index = row - self.length
            if parent < self.length:
                position, above = self.length, 0
            else:
                up = parent - self.length
                above_row = self.tree[up] if up < len(self.tree) else added[up - len(self.tree)]
                position, above = above_row.position + 1, above_row.ancestors
            if position >= self.max_length:
                raise CacheError(f"position {position} is beyond the limit of {self.max_length} tokens")
            added.append(TreeRow(parent, position, above | 1 << index))
        start = self.used
        self.tree.extend(added)
        return range(start, self.used)

    def rewind(self, num_rows: int) -> None:
        """Drop the newest rows: 0 changes nothing, `used` empties the slot."""
        if not 0 <= num_rows <= self.used:
            raise CacheError(f"cannot rewind by {num_rows}: the slot holds {self.used} rows")
        from_tree = min(num_rows, len(self.tree))
        del self.tree[len(self.tree) - from_tree :]
        self.length -= num_rows - from_tree

    def keep(self, path: Sequence[int], rest: Sequence[int] = ()) -> list[tuple[int, int]]:
        """Commit a path of tree rows, keep some rows below its end, drop all other tree rows.

        Args:
            path: tree rows that become the committed rows length, length + 1, ...; each the parent of the next,
                the first a child of the root.
            rest: tree rows, ascending, that become the new tree rows in this order; parents with their children.

        Returns:
            Moves (from row, to row), in an order in which no move overwrites a row that is still to be moved.
        """
        old_length = self.length
        tip = old_length - 1
        for row in path:
            if not old_length <= row < self.used or self.tree[row - old_length].parent != tip:
                raise CacheError(f"row {row} is not a child of row {tip}; the path is {list(path)}")
            tip = row
        new_length = old_length + len(path)
        new_row = {tip: new_length - 1}
        kept: list[TreeRow] = []
        for row in rest:
            if not tip < row < self.used or row in new_row:
                raise CacheError(f"row {row} cannot be kept below row {tip}; the slot holds {self.used} rows")
            old = self.tree[row - old_length]
            if old.parent not in new_row:
                raise CacheError(f"row {row} cannot be kept without its parent, row {old.parent}")
            parent = new_row[old.parent]
            above = kept[parent - new_length].ancestors if parent >= new_length else 0
            new_row[row] = new_length + len(kept)
            kept.append(TreeRow(parent, old.position, above | 1 << len(kept)))
        # Rows ascend along path and rest, and none moves up: done in order, a move never hits a later source.
        moves = [(row, to) for to, row in enumerate((*path, *rest), old_length) if row != to]
        self.length, self.tree = new_length, kept
        return moves

    def clear(self) -> None:
        """Empty the slot."""
        self.length, self.tree = 0, []

    def _check_space(self, num_rows: int) -> None:
        if num_rows < 0 or self.used + num_rows > self.capacity:
            raise CacheError(f"{num_rows} more rows do not fit: {self.used} of {self.capacity} are in use")
