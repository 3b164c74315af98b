"""Which live candidates one verify pass scores."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

from speculation.tree import ROOT, Tree


class SelectionPolicy(Protocol):
    """How rows of a pass are filled."""

    def select(self, tree: Tree, *, max_candidates: int, max_depth: int) -> list[int]:
        """Live nodes to score, parents before children, at most `max_candidates`, none deeper than `max_depth`."""
        ...


@dataclass(frozen=True, slots=True)
class BestFirst:
    """The candidates with the highest path probability; `max_rows` bounds the pass, pending token included."""

    max_rows: int

    def select(self, tree: Tree, *, max_candidates: int, max_depth: int) -> list[int]:
        budget = min(max_candidates, self.max_rows - 1)
        if max_depth < 1:
            return []
        # A child is never more probable than its parent, so taking the best of the frontier keeps parents first.
        frontier = [(-tree.logprob(node), node) for node in tree.children(ROOT).values()]
        heapq.heapify(frontier)
        chosen: list[int] = []
        while frontier and len(chosen) < budget:
            _, node = heapq.heappop(frontier)
            chosen.append(node)
            if tree.depth(node) < max_depth:
                for child in tree.children(node).values():
                    heapq.heappush(frontier, (-tree.logprob(child), child))
        return chosen
