"""Which candidates one verify pass scores.

Candidates come from two sources: nodes of the tree that a far drafter sent, and proposals of the local drafter for any
place in it or beyond it. Both are ranked together, by the probability of their path, each step of which is rated by
how often its kind has been right. A row is worth its cost while it raises the expected tokens per second of the pass:

    rate(n) = (1 + p_1 + ... + p_n) / seconds(1 + n)        p_i: path probability of the i-th best candidate

as a candidate is committed if and only if its whole path is what the target says.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from speculation.costs import PassCosts
from speculation.local import LocalDrafter, Place
from speculation.rates import HitRates, score_key
from speculation.tree import ROOT, Tree

MIN_LOGPROB = -6.5
"""Paths less probable than e to this are not looked at where a row has a price: none costs so little."""


@dataclass(frozen=True, slots=True)
class Pick:
    """A candidate to score: `parent` is an index of the list it stands in, -1 for the pending token."""

    token: int
    parent: int
    source: str
    depth: int


@dataclass(slots=True)
class Estimates:
    """What a session knows about its candidates.

    Attributes:
        far: rates of the far drafter's candidates by `score_key`; None to take its estimates at their word.
        local: proposals of the local drafter.
        costs: of a pass; None where rows are free up to the limit.
    """

    far: HitRates | None = None
    local: LocalDrafter | None = None
    costs: PassCosts | None = None


class SelectionPolicy(Protocol):
    """How rows of a pass are filled."""

    def select(self, tree: Tree, estimates: Estimates, *, max_candidates: int, max_depth: int) -> list[Pick]:
        """Candidates to score, parents before children, at most `max_candidates`, none deeper than `max_depth`."""
        ...


@dataclass(frozen=True, slots=True)
class BestFirst:
    """The candidates with the highest path probability, as many as pay; `max_rows` bounds the pass."""

    max_rows: int

    def select(self, tree: Tree, estimates: Estimates, *, max_candidates: int, max_depth: int) -> list[Pick]:
        budget = min(max_candidates, self.max_rows - 1)
        if max_depth < 1 or budget < 1:
            return []
        costs = estimates.costs
        picks: list[Pick] = []
        order = count()
        local = estimates.local
        # A child is never more probable than its parent, so taking the best of the frontier keeps parents first.
        frontier: list[_Entry] = []
        _push_children(frontier, order, tree, estimates, ROOT, local.root if local else None, 0.0, -1, 1)
        expected, best_rate, num_best = 1.0, 1.0 / costs.seconds(1) if costs else 0.0, 0
        while frontier and len(picks) < budget:
            minus_logprob, _, node, place, token, source, parent, depth = heapq.heappop(frontier)
            picks.append(Pick(token, parent, source, depth))
            if costs is not None:
                expected += math.exp(-minus_logprob)
                rate = expected / costs.seconds(1 + len(picks))
                if rate >= best_rate:
                    best_rate, num_best = rate, len(picks)
            if depth < max_depth:
                index = len(picks) - 1
                _push_children(frontier, order, tree, estimates, node, place, -minus_logprob, index, depth + 1)
        return picks[:num_best] if costs is not None else picks


_Entry = tuple[float, int, int | None, Place | None, int, str, int, int]
"""(minus path log-probability, tie-break, node or None, place, token, source, parent's index, depth)"""


def _push_children(
    frontier: list[_Entry],
    order: count[int],
    tree: Tree,
    estimates: Estimates,
    node: int | None,
    place: Place | None,
    logprob: float,
    index: int,
    depth: int,
) -> None:
    """Put what may follow on the frontier: the node's children, and what the local drafter proposes besides."""
    local, far = estimates.local, estimates.far
    least = MIN_LOGPROB if estimates.costs is not None else -math.inf
    children = tree.children(node) if node is not None else {}
    above = 0.0
    if children:
        above = tree.root_logprob if node == ROOT or node is None else tree.nodes[node].path_logprob
    for token, child in children.items():
        step = tree.nodes[child].path_logprob - above
        if far is not None:
            step = far.logprob(score_key(step))
        if logprob + step >= least:
            after = local.follow(place, token) if local is not None and place is not None else None
            heapq.heappush(frontier, (-logprob - step, next(order), child, after, token, "draft", index, depth))
    if local is None or place is None:
        return
    for token, key in local.proposals(place):
        step = local.rates.logprob(key)
        if logprob + step >= least and token not in children:
            after = local.follow(place, token)
            heapq.heappush(frontier, (-logprob - step, next(order), None, after, token, "local", index, depth))
