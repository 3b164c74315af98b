"""The walk commits what decoding one token at a time would, whatever the candidates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.walk import Walk, walk


@st.composite
def trees(draw: st.DrawFn, max_rows: int = 12, num_tokens: int = 3) -> tuple[list[int], list[int]]:
    """Any tree of candidates, siblings with the same token included: parents and tokens of its rows."""
    num_rows = draw(st.integers(1, max_rows))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, num_rows)]
    return parents, [draw(st.integers(0, num_tokens - 1)) for _ in range(num_rows)]


def sequential(seed: int, max_tokens: int, stop_ids: set[int]) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while len(tokens) < max_tokens:
        tokens += (target(seed, tokens),)
        if tokens[-1] in stop_ids:
            break
    return tokens


def target(seed: int, path: tuple[int, ...]) -> int:
    return hash((seed, path)) % 3


@given(trees(), st.integers(0, 1000), st.integers(1, 8), st.sets(st.integers(0, 2)))
def test_any_tree_commits_a_start_of_sequential_decoding(
    tree: tuple[list[int], list[int]], seed: int, max_tokens: int, stop_ids: set[int]
) -> None:
    parents, tokens = tree
    asked: list[int] = []

    def choose(row: int, path: tuple[int, ...]) -> int:
        asked.append(row)
        ancestors = []
        while row != 0:
            ancestors.append(tokens[row])
            row = parents[row]
        assert path == tuple(ancestors[::-1])
        return target(seed, path)

    result = walk(parents, tokens, choose, max_tokens=max_tokens, stop_ids=stop_ids)
    alone = sequential(seed, max_tokens, stop_ids)
    assert result.tokens == alone[: len(result.tokens)]
    assert [tokens[row] for row in result.rows] == list(result.tokens[: len(result.rows)])
    assert [parents[row] for row in result.rows] == [0, *result.rows[:-1]][: len(result.rows)]
    ended = len(result.tokens) == len(alone)
    assert len(result.tokens) - len(result.rows) in ((0, 1) if ended else (1,))
    # Where it went on nowhere, no candidate had the token.
    if len(result.rows) < len(result.tokens):
        last = result.rows[-1] if result.rows else 0
        assert all(
            parent != last or token != result.tokens[-1] for parent, token in zip(parents[1:], tokens[1:], strict=True)
        )
    assert asked == [0, *result.rows][: len(result.tokens)]


def test_a_row_alone_is_plain_decoding() -> None:
    assert walk([-1], [7], lambda row, path: 5, max_tokens=9) == Walk((5,), ())


def test_the_bonus_token_follows_the_last_candidate() -> None:
    assert walk([-1, 0, 1], [7, 5, 5], lambda row, path: 5, max_tokens=9) == Walk((5, 5, 5), (1, 2))


def test_the_walk_follows_the_branch_that_is_right() -> None:
    answers = {(): 4, (4,): 6, (4, 6): 1}
    result = walk([-1, 0, 0, 1, 2], [7, 3, 4, 6, 6], lambda row, path: answers[path], max_tokens=9)
    assert result == Walk((4, 6, 1), (2, 4))


def test_stopped_on_a_candidate_its_row_counts_as_accepted() -> None:
    for limits in ({"max_tokens": 1}, {"max_tokens": 9, "stop_ids": {5}}):
        assert walk([-1, 0, 1], [7, 5, 5], lambda row, path: 5, **limits) == Walk((5,), (1,))


def test_of_equal_siblings_the_first_is_followed() -> None:
    assert walk([-1, 0, 0], [7, 5, 5], lambda row, path: 5, max_tokens=9).rows == (1,)


@pytest.mark.parametrize(
    ("parents", "tokens", "max_tokens"),
    [([-1], [7], 0), ([], [], 1), ([0], [7], 1), ([-1, 1], [7, 7], 1), ([-1, -1], [7, 7], 1), ([-1, 0], [7], 1)],
)
def test_what_is_no_tree_is_refused(parents: list[int], tokens: list[int], max_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"max_tokens|parent"):
        walk(parents, tokens, lambda row, path: 0, max_tokens=max_tokens)
