"""Where the drafter grows its tree, and when it sends what it has grown.

A policy sees the tree and answers two questions; it holds no state of a session. Policies are named on the command
line (`--growth chain:8`), see `parse_growth`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from speculation.tree import ROOT, Tree


@dataclass(frozen=True, slots=True)
class Expansion:
    """Nodes (or ROOT) to run through the draft model next, and how many children to take of each.

    `num_ahead`: how many more steps may follow along the best child before the policy is to be asked again.
    """

    nodes: tuple[int, ...]
    num_children: int
    num_ahead: int = 0


class GrowthPolicy(Protocol):
    """How one session's tree grows."""

    def expand(self, tree: Tree, *, expanded: Collection[int], limit: int, max_rows: int) -> Expansion | None:
        """What to run next; None to wait.

        Args:
            expanded: live nodes that have been run already.
            limit: positions at or beyond limit - 1 need no candidates.
            max_rows: most rows that the runner takes in one step.
        """
        ...

    def flush(self, *, num_unsent: int, can_grow: bool) -> bool:
        """Whether the unsent nodes should go out now. `can_grow` is False when `expand` answered None."""
        ...


@dataclass(frozen=True, slots=True)
class ChainGrowth:
    """A single chain, sent in frames of `frame_size` tokens.

    With `ahead` = 0 the drafter waits for the acceptance of each frame: the classic synchronous round of K tokens
    (Leviathan et al. 2023). With `ahead` > 0 it drafts on past the frame in flight, up to that many further
    tokens, so that round n+1 is drafted while round n is verified.
    """

    frame_size: int
    ahead: int

    def expand(self, tree: Tree, *, expanded: Collection[int], limit: int, max_rows: int) -> Expansion | None:
        tip, depth = ROOT, 0
        while children := tree.children(tip):
            tip = next(iter(children.values()))
            depth += 1
        # The position after the tip must be worth a candidate: the target decides the last one by itself.
        room = min(self.frame_size + self.ahead - depth, limit - 1 - tree.length - depth)
        if room < 1:
            return None
        # No further than a frame, so that each is sent as soon as it is full.
        return Expansion((tip,), 1, num_ahead=min(self.frame_size, room) - 1)

    def flush(self, *, num_unsent: int, can_grow: bool) -> bool:
        return num_unsent >= self.frame_size or (num_unsent > 0 and not can_grow)


def parse_growth(text: str) -> GrowthPolicy:
    """`chain:K` is a synchronous chain of K tokens, `chain:K+A` drafts A tokens ahead of it.

    Raises:
        ValueError: naming the value and the form.
    """
    name, _, rest = text.partition(":")
    size, _, ahead = rest.partition("+")
    if name != "chain" or not size.isdecimal() or not (ahead or "0").isdecimal():
        raise ValueError(f"growth must be chain:K or chain:K+AHEAD, for example chain:4+24; got {text!r}")
    if not 1 <= int(size) <= 64 or int(ahead or 0) > 1024:
        raise ValueError(f"growth must have K in 1..64 and AHEAD in 0..1024; got {text!r}")
    return ChainGrowth(int(size), int(ahead or 0))
