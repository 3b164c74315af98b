"""Which candidates a verify pass scores, of one session or of all that share it.

Candidates come from two sources: nodes of the tree that a far drafter sent, and proposals of the local drafter for any
place in it or beyond it. Both are ranked together, by the probability of their path, each step of which is rated by
how often its kind has been right. A row is worth its cost while it raises the expected tokens per second of the pass:

    rate(n) = (1 + p_1 + ... + p_n) / seconds(1 + n)        p_i: path probability of the i-th best candidate

as a candidate is committed if and only if its whole path is what the target says. Where S sessions share a pass,
each brings its pending token first, and the candidates of all are ranked together, by the expected tokens of all:
(S + p_1 + ... + p_n) / seconds(S + n). So a row goes to whoever makes the most of it, and no session's answer stands
still for another's candidates.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
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
    """A candidate to score: `parent` is an index of the list it stands in, -1 for the pending token.

    `logprob` is of its path, in nats.
    """

    token: int
    parent: int
    source: str
    depth: int
    logprob: float


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
    """In which order a session's candidates are worth a row."""

    def candidates(self, tree: Tree, estimates: Estimates, *, max_depth: int) -> Iterator[Pick]:
        """All that could be scored, the best first and so parents before children, none deeper than `max_depth`.

        They are found as they are asked for; tree and estimates must stay as they are until then.
        """
        ...


@dataclass(frozen=True, slots=True)
class BestFirst:
    """The candidates with the highest path probability first; `max_rows` bounds one session's pass."""

    max_rows: int

    def candidates(self, tree: Tree, estimates: Estimates, *, max_depth: int) -> Iterator[Pick]:
        """See `SelectionPolicy`."""
        if max_depth < 1:
            return
        order = count()
        local = estimates.local
        # A child is never more probable than its parent, so taking the best of the frontier keeps parents first.
        frontier: list[_Entry] = []
        _push_children(frontier, order, tree, estimates, ROOT, local.root if local else None, 0.0, -1, 1)
        for index in range(self.max_rows - 1):
            if not frontier:
                return
            minus_logprob, _, node, place, token, source, parent, depth = heapq.heappop(frontier)
            yield Pick(token, parent, source, depth, -minus_logprob)
            if depth < max_depth:
                _push_children(frontier, order, tree, estimates, node, place, -minus_logprob, index, depth + 1)

    def select(self, tree: Tree, estimates: Estimates, *, max_candidates: int, max_depth: int) -> list[Pick]:
        """The candidates of a session that has the pass to itself."""
        offers = [self.candidates(tree, estimates, max_depth=max_depth)]
        return share_rows(offers, max_rows=1 + max(0, max_candidates), costs=estimates.costs)[0]


def share_rows(offers: Sequence[Iterator[Pick]], *, max_rows: int, costs: PassCosts | None) -> list[list[Pick]]:
    """Fill a pass that several sessions share: a row for each pending token, then the best candidates of all.

    Args:
        offers: of each session what it could have scored, the best first. Of equals the earlier session's goes first.
        max_rows: of the whole pass, pending tokens included; there are at least as many as sessions.
        costs: of a pass; None where rows are free up to the limit.

    Returns:
        For each session the candidates to score: a first part of what it offers.
    """
    shares: list[list[Pick]] = [[] for _ in offers]
    best: list[tuple[float, int, Pick]] = []
    for which, offer in enumerate(offers):
        _offer_next(best, which, offer)
    num_rows, expected = len(offers), float(len(offers))
    best_rate = expected / costs.seconds(num_rows) if costs and offers else 0.0
    taken: list[int] = []
    num_best = 0
    while best and num_rows < max_rows:
        minus_logprob, which, pick = heapq.heappop(best)
        shares[which].append(pick)
        taken.append(which)
        num_rows += 1
        if costs is not None:
            expected += math.exp(-minus_logprob)
            rate = expected / costs.seconds(num_rows)
            if rate >= best_rate:
                best_rate, num_best = rate, len(taken)
        _offer_next(best, which, offers[which])
    if costs is not None:
        for which in reversed(taken[num_best:]):
            shares[which].pop()
    return shares


def _offer_next(best: list[tuple[float, int, Pick]], which: int, offer: Iterator[Pick]) -> None:
    pick = next(offer, None)
    if pick is not None:
        heapq.heappush(best, (-pick.logprob, which, pick))


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
