"""The acceptance rule: follow the candidates for as long as they are what the target says anyway.

The target's token after a row is a function of the row, the request and the position alone (docs/design.md, section
2). So the walk decodes exactly as without candidates; what they change is how many rows one pass has scored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Walk:
    """What a pass commits.

    Attributes:
        tokens: the target's tokens, at least one.
        rows: rows of the candidates among them: tokens[i] is the token of rows[i]. One less than tokens (the last
            is a correction, bonus or plain token), or as many when the walk was stopped on a candidate.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]


def walk(
    parents: Sequence[int],
    tokens: Sequence[int],
    choose: Callable[[int, tuple[int, ...]], int],
    *,
    max_tokens: int,
    stop_ids: Collection[int] = (),
) -> Walk:
    """Walk from row 0, the pending token, down the tree of candidates.

    Args:
        parents: row of each row's parent, an earlier row; -1 for row 0.
        tokens: token of each row.
        choose: `choose(row, path)` is the target's token after `row`, where `path` is the tokens of the candidates
            from below row 0 down to `row`. Called once for each row that the walk reaches, in order.
        max_tokens: the walk stops after that many tokens, at least 1.
        stop_ids: the walk stops after any of these.

    Of siblings with the same token, the first is followed.

    Raises:
        ValueError: max_tokens is below 1, or the rows are not a tree as described.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    children = _children(parents, tokens)
    row = 0
    path: tuple[int, ...] = ()
    rows: list[int] = []
    while True:
        token = choose(row, path)
        path = (*path, token)
        follow = children.get((row, token))
        if follow is not None:
            rows.append(follow)
        if follow is None or token in stop_ids or len(path) >= max_tokens:
            return Walk(path, tuple(rows))
        row = follow


def _children(parents: Sequence[int], tokens: Sequence[int]) -> dict[tuple[int, int], int]:
    """(row, token) to the first child of that row with that token."""
    if len(parents) != len(tokens) or not parents or parents[0] != -1:
        raise ValueError(f"rows must have a parent each, -1 for row 0; got {len(tokens)} tokens, parents {parents!r}")
    children: dict[tuple[int, int], int] = {}
    for row in range(1, len(parents)):
        if not 0 <= parents[row] < row:
            raise ValueError(f"parent of row {row} must be an earlier row, got {parents[row]}")
        children.setdefault((parents[row], tokens[row]), row)
    return children
