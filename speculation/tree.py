"""The tree of candidates, addressed by absolute position.

Both nodes hold one for each session: the draft node grows it, the verify node receives it. Its root is the last
committed token. A commit moves the root: the matching child becomes the new root and its siblings die. Nothing
in here decides anything; `growth` and `selection` do.

A node arrives in one of these states, and only the last is the sender's fault:

    LIVE        attached to the root or to a live node
    PASSED      late: what it proposes has been committed meanwhile, so its children may still be live
    STALE       its parent is dead, or what it proposes disagrees with what is committed
    DUPLICATE   its id is known, or a sibling proposes the same token (its children attach to that sibling)
    ORPHAN      its parent was never seen: a frame was lost or is late
    FULL        the tree holds `max_nodes`
    (raises)    MalformedCandidate: the parent is not earlier, or the root lies beyond what is committed
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

ROOT = -1
"""Stands for the last committed token where a node id is expected."""
SCORE_STEPS_PER_NAT = 16
MAX_PASSED = 2048
MAX_GAPS = 64


def score_byte(logprob: float) -> int:
    """A token's log-probability given its parent, in steps of 1/16 nat below 0, as the wire has it (0..255)."""
    return max(0, min(255, round(-logprob * SCORE_STEPS_PER_NAT)))


def score_logprob(score: int) -> float:
    """The inverse of `score_byte`, in nats."""
    return -score / SCORE_STEPS_PER_NAT


class MalformedCandidate(ValueError):
    """A node that no correct drafter sends."""


class Arrival(Enum):
    """What became of an added node; see the module's docstring."""

    LIVE = auto()
    PASSED = auto()
    STALE = auto()
    DUPLICATE = auto()
    ORPHAN = auto()
    FULL = auto()


@dataclass(slots=True)
class Node:
    """A live candidate: `token` at `position`, after `parent` (a node id or ROOT).

    `path_logprob` adds up the log-probabilities from the tree's first root; differences are what counts.
    """

    id: int
    parent: int
    token: int
    position: int
    path_logprob: float
    source: str
    children: dict[int, int] = field(default_factory=dict)  # token -> node id
    aliases: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit did to the tree.

    Attributes:
        passed: the nodes that became committed, in path order.
        died: those that can no longer become it.
        judged: of every node that stood for a committed position, its log-probability given its parent, in nats, and
            whether its token was the one.
    """

    passed: tuple[int, ...]
    died: tuple[int, ...]
    judged: tuple[tuple[float, bool], ...] = ()


class Tree:
    """Candidates behind a growing list of committed tokens.

    Args:
        committed: prompt + answer so far, at least one token. The list is shared, not copied: `commit` appends to it.
        max_nodes: bound on live nodes.
    """

    def __init__(self, committed: list[int], *, max_nodes: int = 4096) -> None:
        if not committed:
            raise ValueError("a tree needs at least one committed token")
        self.committed = committed
        self.max_nodes = max_nodes
        self.nodes: dict[int, Node] = {}
        self.roots: dict[int, int] = {}  # token -> node id, the children of the last committed token
        self.root_logprob = 0.0
        self._passed: OrderedDict[int, int] = OrderedDict()  # committed node -> its position
        self._alias: dict[int, int] = {}
        self._next_node = 0
        self._gaps: list[tuple[int, int]] = []  # id ranges never seen, or seen as orphans

    @property
    def length(self) -> int:
        """Committed length: the position that the children of the root propose for."""
        return len(self.committed)

    def __len__(self) -> int:
        return len(self.nodes)

    def children(self, node: int) -> dict[int, int]:
        """Token to node id, of a live node or of ROOT."""
        return self.roots if node == ROOT else self.nodes[node].children

    def depth(self, node: int) -> int:
        """1 for a child of the root."""
        return self.nodes[node].position - self.length + 1

    def logprob(self, node: int) -> float:
        """Log-probability of the path from the present root to the node, in nats, by the drafter's estimate."""
        return self.nodes[node].path_logprob - self.root_logprob

    def step_logprob(self, node: int) -> float:
        """Log-probability of the node's token given its parent, in nats."""
        parent = self.nodes[node].parent
        above = self.root_logprob if parent == ROOT else self.nodes[parent].path_logprob
        return self.nodes[node].path_logprob - above

    def path(self, node: int) -> list[int]:
        """Node ids from the root's child down to `node`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.nodes[node].parent
        return nodes[::-1]

    def add(self, node: int, parent: int, token: int, logprob: float, source: str = "draft") -> Arrival:
        """Add a node. `parent` is a node id, or minus the committed length that a root follows.

        Args:
            node: ids grow by one from 0 in each epoch; a jump is remembered as a gap.
            logprob: of the token given its parent, <= 0.

        Raises:
            MalformedCandidate: see the module's docstring.
        """
        if parent >= node:
            raise MalformedCandidate(f"parent of node {node} must be an earlier node, got {parent}")
        if parent < 0 and -parent > self.length:
            raise MalformedCandidate(
                f"node {node} follows {-parent} committed tokens, but only {self.length} are committed"
            )
        if node > self._next_node:
            self._remember_gap(self._next_node, node)
        self._next_node = max(self._next_node, node + 1)
        if node in self.nodes or node in self._passed or node in self._alias:
            return Arrival.DUPLICATE
        parent = self._alias.get(parent, parent)
        if parent < 0:
            return self._attach(node, ROOT, -parent, token, logprob, source)
        if parent in self.nodes:
            return self._attach(node, parent, self.nodes[parent].position + 1, token, logprob, source)
        if parent in self._passed:
            return self._attach(node, ROOT, self._passed[parent] + 1, token, logprob, source)
        if any(start <= parent < end for start, end in self._gaps):
            self._remember_gap(node, node + 1)
            return Arrival.ORPHAN
        return Arrival.STALE

    def grow(self, first: int, parent: int, children: Sequence[tuple[int, float]], source: str = "draft") -> list[int]:
        """Attach children of our own making to a live node or to ROOT; `add` without what only a peer can get wrong.

        Args:
            first: the id of the first child, beyond all known ones; the others follow.
            children: (token, log-probability given the parent) of each.

        Returns:
            The ids of those that live; the others repeat a sibling's token, or the tree is full.
        """
        nodes = self.nodes
        if parent == ROOT:
            siblings, above, position = self.roots, self.root_logprob, len(self.committed)
        else:
            node = nodes[parent]
            siblings, above, position = node.children, node.path_logprob, node.position + 1
        live: list[int] = []
        for child, (token, logprob) in enumerate(children, first):
            if token in siblings:
                self._alias[child] = siblings[token]
                nodes[siblings[token]].aliases += (child,)
            elif len(nodes) < self.max_nodes:
                nodes[child] = Node(child, parent, token, position, above + min(logprob, 0.0), source)
                siblings[token] = child
                live.append(child)
        self._next_node = max(self._next_node, first + len(children))
        return live

    def commit(self, tokens: tuple[int, ...] | list[int]) -> Commit:
        """Append committed tokens and move the root along them."""
        passed: list[int] = []
        died: list[int] = []
        judged: list[tuple[float, bool]] = []
        for token in tokens:
            for proposed, node_id in self.roots.items():
                judged.append((self.nodes[node_id].path_logprob - self.root_logprob, proposed == token))
            follow = self.roots.pop(token, None)
            for other in self.roots.values():
                self._kill(other, died)
            self.roots = {}
            if follow is not None:
                node = self.nodes.pop(follow)
                self._pass(follow, node.position, node.aliases)
                self.root_logprob = node.path_logprob
                self.roots = node.children
                for child in node.children.values():
                    self.nodes[child].parent = ROOT
                passed.append(follow)
            self.committed.append(token)
        return Commit(tuple(passed), tuple(died), tuple(judged))

    def _attach(self, node: int, parent: int, position: int, token: int, logprob: float, source: str) -> Arrival:
        """Attach to a live parent, or to the committed tokens before `position`."""
        if position < self.length:
            if self.committed[position] != token:
                return Arrival.STALE
            self._pass(node, position, ())
            return Arrival.PASSED
        siblings = self.children(parent)
        if token in siblings:
            # A drafter that repeats itself fills no memory: beyond the bound its children are dropped with it.
            if len(self._alias) < self.max_nodes:
                self._alias[node] = siblings[token]
                self.nodes[siblings[token]].aliases += (node,)
            return Arrival.DUPLICATE
        if len(self.nodes) >= self.max_nodes:
            return Arrival.FULL
        above = self.root_logprob if parent == ROOT else self.nodes[parent].path_logprob
        self.nodes[node] = Node(node, parent, token, position, above + min(logprob, 0.0), source)
        siblings[token] = node
        return Arrival.LIVE

    def _pass(self, node: int, position: int, aliases: tuple[int, ...]) -> None:
        for known in (node, *aliases):
            self._alias.pop(known, None)
            self._passed[known] = position
        while len(self._passed) > MAX_PASSED:
            self._passed.popitem(last=False)

    def _kill(self, node: int, died: list[int]) -> None:
        stack = [node]
        while stack:
            dead = self.nodes.pop(stack.pop())
            for alias in dead.aliases:
                self._alias.pop(alias, None)
            stack.extend(dead.children.values())
            died.append(dead.id)

    def _remember_gap(self, start: int, end: int) -> None:
        if self._gaps and self._gaps[-1][1] == start:
            self._gaps[-1] = (self._gaps[-1][0], end)
        else:
            self._gaps.append((start, end))
            del self._gaps[:-MAX_GAPS]
