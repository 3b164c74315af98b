import random

import pytest

from engine.errors import CacheError
from engine.rows import SlotRows


def make_rows(capacity: int = 16, max_length: int = 12) -> SlotRows:
    return SlotRows(capacity=capacity, max_length=max_length)


def state(rows: SlotRows) -> tuple[object, ...]:
    return rows.length, tuple(rows.tree)


def test_c022_rewind_by_0_changes_nothing_and_by_all_empties() -> None:
    rows = make_rows()
    rows.extend(4)
    rows.rewind(0)
    assert rows.length == 4
    rows.rewind(4)
    assert rows.used == 0


@pytest.mark.parametrize("num_rows", [6, 5, -1])
def test_c022_rewind_out_of_bounds_raises_and_changes_nothing(num_rows: int) -> None:
    rows = make_rows()
    rows.extend(4)
    with pytest.raises(CacheError, match=f"rewind by {num_rows}.* holds 4 rows"):
        rows.rewind(num_rows)
    assert rows.used == rows.length == 4


def test_rewind_drops_tree_rows_before_committed_ones() -> None:
    rows = make_rows()
    rows.extend(3)
    rows.append([2, 3])
    rows.rewind(1)
    assert (rows.length, len(rows.tree)) == (3, 1)
    rows.rewind(2)
    assert (rows.length, len(rows.tree)) == (2, 0)


def test_tree_rows_know_position_and_ancestors() -> None:
    rows = make_rows()
    rows.extend(2)
    assert rows.append([1, 2, 2, 1]) == range(2, 6)
    assert [row.position for row in rows.tree] == [2, 3, 3, 2]
    assert [row.ancestors for row in rows.tree] == [0b1, 0b11, 0b101, 0b1000]
    assert rows.append([4]) == range(6, 7)
    assert rows.tree[4].ancestors == 0b10101
    assert rows.position(6) == 4


def test_a_tree_can_grow_from_an_empty_slot() -> None:
    rows = make_rows()
    rows.append([-1, 0])
    assert [row.position for row in rows.tree] == [0, 1]


@pytest.mark.parametrize("parents", [[0], [2], [1, 3], [-1]])
def test_parents_are_the_last_committed_row_or_earlier_tree_rows(parents: list[int]) -> None:
    rows = make_rows()
    rows.extend(2)
    before = state(rows)
    with pytest.raises(CacheError, match="parent of row"):
        rows.append(parents)
    assert state(rows) == before


def test_c023_nothing_is_cached_beyond_capacity_or_length() -> None:
    rows = make_rows(capacity=6, max_length=4)
    with pytest.raises(CacheError, match="position 4 is beyond the limit of 4"):
        rows.extend(5)
    rows.extend(2)
    with pytest.raises(CacheError, match="position 4 is beyond"):
        rows.append([1, 2, 3])
    with pytest.raises(CacheError, match="do not fit"):
        rows.append([1] * 5)
    assert rows.used == 2
    rows.append([1] * 4)
    with pytest.raises(CacheError, match="behind 4 tree rows"):
        rows.extend(1)


def test_keep_commits_the_path_and_moves_the_rest_up() -> None:
    rows = make_rows()
    rows.extend(2)
    rows.append([1, 1, 3, 4, 4, 2])  # rows 2..7; path 3-4, live 5 and 6 below 4
    moves = rows.keep([3, 4], [5, 6])
    assert moves == [(3, 2), (4, 3), (5, 4), (6, 5)]
    assert rows.length == 4
    assert [(row.parent, row.position, row.ancestors) for row in rows.tree] == [(3, 4, 0b1), (3, 4, 0b10)]


def test_keep_without_rows_forgets_the_tree_without_a_move() -> None:
    rows = make_rows()
    rows.extend(2)
    rows.append([1, 2])
    assert rows.keep([]) == []
    assert (rows.length, rows.used) == (2, 2)


@pytest.mark.parametrize(
    ("path", "rest"),
    [([3], []), ([2, 4], []), ([9], []), ([1], []), ([2], [2]), ([2], [4]), ([], [3]), ([4], [3])],
)
def test_keep_refuses_broken_paths_and_orphans(path: list[int], rest: list[int]) -> None:
    rows = make_rows()
    rows.extend(2)
    rows.append([1, 2, 1])  # 2 - 3, 4
    before = state(rows)
    with pytest.raises(CacheError):
        rows.keep(path, rest)
    assert state(rows) == before


def test_random_operations_keep_the_bookkeeping_whole() -> None:
    """Every row carries the token path it was made for; moves are applied to a list as the storage would be."""
    rng = random.Random(5)
    for _ in range(200):
        rows = make_rows(capacity=40, max_length=30)
        store: list[tuple[int, ...]] = [()] * 40  # the path that each row stands for
        rows.extend(3)
        store[:3] = [(0,), (0, 1), (0, 1, 2)]
        for step in range(12):
            try:
                parents = [rng.randrange(rows.length - 1, rows.used)]
                new = rows.append(parents)
            except CacheError:
                break
            for row, parent in zip(new, parents, strict=True):
                store[row] = (*store[parent], 100 * step + row)
            if rng.random() < 0.3:
                path: list[int] = []
                tip = rows.length - 1
                while rng.random() < 0.6:
                    below = [row for row in range(rows.length, rows.used) if rows.tree[row - rows.length].parent == tip]
                    if not below:
                        break
                    tip = rng.choice(below)
                    path.append(tip)
                kept, alive = [], {tip}
                for row in range(max(tip + 1, rows.length), rows.used):
                    if rows.tree[row - rows.length].parent in alive and rng.random() < 0.7:
                        kept.append(row)
                        alive.add(row)
                for source, to in rows.keep(path, kept):
                    store[to] = store[source]
            assert all(len(store[row]) == rows.position(row) + 1 for row in range(rows.used))
            for i, row in enumerate(rows.tree):
                own = store[rows.length + i]
                above = [store[rows.length + j] for j in range(len(rows.tree)) if row.ancestors >> j & 1]
                assert sorted(above) == [own[:n] for n in range(rows.length + 1, len(own) + 1)]
                assert store[row.parent] == own[:-1]
