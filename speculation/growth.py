"""Where the drafter grows its tree, and when it sends what it has grown.

A policy sees the tree and the frontier (nodes that have not been run yet, best first) and answers three questions:
what to run next, what is good enough to be sent, and when. It holds no state of a session. Policies are named on the
command line (`--growth tree:16x4`), see `parse_growth`.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from speculation.tree import ROOT, Tree

DEFAULT_CADENCE_S = 0.010
SPARE_ENTRIES = 256
REACH_NATS = 1.5
"""How far below what is sent now a path may lie that the root may yet move towards."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Nodes (or ROOT) to run through the draft model next, and how many children to take of each.

    `num_ahead`: how many more steps may follow along the best child before the policy is to be asked again.
    """

    nodes: tuple[int, ...]
    num_children: int
    num_ahead: int = 0


@dataclass(slots=True)
class Frontier:
    """Nodes that have not been run, by path log-probability; the dead ones are dropped when they come up.

    A node's path log-probability counts from the tree's first root, so a commit changes no order.
    """

    _heap: list[tuple[float, int]] = field(default_factory=list)

    def push(self, tree: Tree, node: int) -> None:
        """Add a live node."""
        if len(self._heap) > 2 * len(tree) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in tree.nodes]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (-tree.nodes[node].path_logprob, node))

    def pop(self, tree: Tree) -> int | None:
        """Take the best live node; None if there is none."""
        while self._heap:
            _, node = heapq.heappop(self._heap)
            if node in tree.nodes:
                return node
        return None

    def __len__(self) -> int:
        """Entries, the dead ones included."""
        return len(self._heap)


@dataclass(frozen=True, slots=True)
class FlushState:
    """What decides whether unsent nodes go out now.

    Attributes:
        num_unsent: nodes that have not been sent.
        can_grow: False when nothing more will come before an acceptance does.
        num_live_sent: live nodes that were sent: what the verifier has, or will have.
        since_flush_s: since the last frame.
        verify_s: how long a pass of the target takes, as last reported; None if unknown.
        num_sessions: that the drafter serves.
    """

    num_unsent: int
    can_grow: bool
    num_live_sent: int = 0
    since_flush_s: float = math.inf
    verify_s: float | None = None
    num_sessions: int = 1


class GrowthPolicy(Protocol):
    """How one session's tree grows."""

    @property
    def rows(self) -> int:
        """Most nodes of one session that a step should run; of several, they share twice as many."""
        ...

    @property
    def least_logprob(self) -> float:
        """Children on paths less probable than e to this, from the present root, are not kept at all."""
        ...

    def expand(self, tree: Tree, frontier: Frontier, *, root_is_new: bool, limit: int, room: int) -> Expansion | None:
        """What to run next; None to wait. Nodes are taken from the frontier.

        Args:
            root_is_new: the last committed token has not been run, so ROOT has no children yet.
            limit: positions at or beyond limit - 1 need no candidates.
            room: most nodes that can be run in this step, besides the root.
        """
        ...

    def sendable(self, tree: Tree, node: int) -> bool:
        """Whether a node is good enough to be sent; never worse for a parent than for its child."""
        ...

    def flush(self, state: FlushState) -> bool:
        """Whether the unsent nodes should go out now."""
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

    @property
    def rows(self) -> int:
        return 1

    @property
    def least_logprob(self) -> float:
        return -math.inf

    def expand(self, tree: Tree, frontier: Frontier, *, root_is_new: bool, limit: int, room: int) -> Expansion | None:
        tip, depth = ROOT, 0
        while children := tree.children(tip):
            tip = next(iter(children.values()))
            depth += 1
        # The position after the tip must be worth a candidate: the target decides the last one by itself.
        room = min(self.frame_size + self.ahead - depth, limit - 1 - tree.length - depth)
        if room < 1:
            return None
        while frontier.pop(tree) is not None:
            pass
        # No further than a frame, so that each is sent as soon as it is full.
        return Expansion((tip,), 1, num_ahead=min(self.frame_size, room) - 1)

    def sendable(self, tree: Tree, node: int) -> bool:
        return True

    def flush(self, state: FlushState) -> bool:
        return state.num_unsent >= self.frame_size or (state.num_unsent > 0 and not state.can_grow)


@dataclass(frozen=True, slots=True)
class TreeGrowth:
    """The most probable paths first, several a step.

    Every step runs the `rows` best nodes that have not been run (fewer of each session, where there are several) and
    takes `num_children` children of each, whatever is in flight: the deepest candidates sent are those for positions
    that the verifier reaches a round trip later.
    Paths below `min_logprob` (nats, from the present root) are neither grown nor sent; they may be later, when the
    root has moved towards them.

    Frames are cut by time: nothing of what was sent is alive, or a quarter of a pass of the target has gone by since
    the last one. So the verifier is never short of what exists, and the relay carries three or four small frames a
    pass. With many sessions it is one of each a pass: what a frame costs, it costs on every hop.
    """

    rows: int
    num_children: int
    min_logprob: float = -7.0
    max_nodes: int = 2048

    @property
    def least_logprob(self) -> float:
        return self.min_logprob - REACH_NATS

    def expand(self, tree: Tree, frontier: Frontier, *, root_is_new: bool, limit: int, room: int) -> Expansion | None:
        if tree.length >= limit - 1:
            return None
        if root_is_new:
            return Expansion((ROOT,), self.num_children)
        nodes: list[int] = []
        back: list[int] = []
        while len(nodes) < min(self.rows, room) and len(tree) < self.max_nodes:
            node = frontier.pop(tree)
            if node is None:
                break
            if tree.logprob(node) < self.min_logprob:
                back.append(node)
                break
            # The position after the node must be worth a candidate; if it is not now it never will be.
            if tree.nodes[node].position + 1 < limit - 1:
                nodes.append(node)
        for node in back:
            frontier.push(tree, node)
        return Expansion(tuple(nodes), self.num_children) if nodes else None

    def sendable(self, tree: Tree, node: int) -> bool:
        return tree.logprob(node) >= self.min_logprob

    def flush(self, state: FlushState) -> bool:
        if state.num_unsent == 0:
            return False
        cadence_s = DEFAULT_CADENCE_S
        if state.verify_s is not None:
            cadence_s = state.verify_s / 4 * min(max(state.num_sessions / 2, 1), 4)
        return not state.can_grow or state.num_live_sent == 0 or state.since_flush_s >= cadence_s


_CHAIN = re.compile(r"chain:(\d+)(?:\+(\d+))?")
_TREE = re.compile(r"tree:(\d+)x(\d+)(?:@(\d+(?:\.\d+)?))?")
FORMS = "chain:K, chain:K+AHEAD or tree:ROWSxCHILDREN[@NATS], for example chain:4+24 or tree:16x4"


def parse_growth(text: str) -> GrowthPolicy:
    """`chain:K` is a synchronous chain of K tokens, `chain:K+A` drafts A tokens ahead of it; `tree:RxC` grows the R
    best nodes a step by C children each, `@N` down to a path probability of e^-N.

    Raises:
        ValueError: naming the value and the form.
    """
    if chain := _CHAIN.fullmatch(text):
        size, ahead = int(chain[1]), int(chain[2] or 0)
        if not 1 <= size <= 64 or ahead > 1024:
            raise ValueError(f"growth must have K in 1..64 and AHEAD in 0..1024; got {text!r}")
        return ChainGrowth(size, ahead)
    if tree := _TREE.fullmatch(text):
        rows, children, nats = int(tree[1]), int(tree[2]), float(tree[3] or 7.0)
        if not (1 <= rows <= 128 and 1 <= children <= 16 and 0.5 <= nats <= 20):
            raise ValueError(f"growth must have ROWS in 1..128, CHILDREN in 1..16 and NATS in 0.5..20; got {text!r}")
        return TreeGrowth(rows, children, -nats)
    raise ValueError(f"growth must be {FORMS}; got {text!r}")


def best_first(tree: Tree, nodes: Sequence[int]) -> Frontier:
    """A frontier of these live nodes."""
    frontier = Frontier()
    for node in nodes:
        frontier.push(tree, node)
    return frontier
