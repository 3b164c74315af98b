"""Growth and selection: budgets are kept, the best candidates are chosen, parents come before children."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.growth import ChainGrowth, Expansion, parse_growth
from speculation.selection import BestFirst
from speculation.tree import ROOT, Tree


def grown(tree: Tree, policy: ChainGrowth, *, limit: int) -> int:
    """Grow until the policy waits; returns the number of nodes."""
    for node in range(1000):
        expansion = policy.expand(tree, expanded=(), limit=limit, max_rows=64)
        if expansion is None:
            return node
        parent = expansion.nodes[0]
        tree.add(node, parent if parent != ROOT else -tree.length, node % 5, -0.1)
    raise AssertionError("the policy never waits")


@pytest.mark.parametrize(("size", "ahead", "nodes"), [(4, 0, 4), (1, 0, 1), (4, 8, 12)])
def test_a_chain_stops_at_its_frame_and_what_it_may_draft_ahead(size: int, ahead: int, nodes: int) -> None:
    assert grown(Tree([1, 2]), ChainGrowth(size, ahead), limit=1000) == nodes


@pytest.mark.parametrize("remaining", [1, 2, 3, 5])
def test_c003_no_candidate_is_drafted_that_the_budget_has_no_room_for(remaining: int) -> None:
    tree = Tree([1, 2])
    assert grown(tree, ChainGrowth(4, 8), limit=tree.length + remaining) == min(12, remaining - 1)


def test_a_chain_starts_at_the_root_and_goes_on_at_its_tip() -> None:
    tree = Tree([1])
    policy = ChainGrowth(4, 0)
    assert policy.expand(tree, expanded=(), limit=99, max_rows=8) == Expansion((ROOT,), 1, num_ahead=3)
    tree.add(0, -1, 5, -0.1)
    tree.add(1, 0, 6, -0.1)
    assert policy.expand(tree, expanded=(), limit=99, max_rows=8) == Expansion((1,), 1, num_ahead=1)


def test_a_frame_goes_out_when_it_is_full_or_when_nothing_more_will_come() -> None:
    policy = ChainGrowth(4, 0)
    assert policy.flush(num_unsent=4, can_grow=True)
    assert not policy.flush(num_unsent=3, can_grow=True)
    assert policy.flush(num_unsent=3, can_grow=False)
    assert not policy.flush(num_unsent=0, can_grow=False)


@pytest.mark.parametrize("text", ["chain", "chain:0", "chain:4+x", "tree:3", "chain:65", "chain:4+9999", "chain:-1"])
def test_a_growth_that_cannot_be_read_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"chain:K|1\.\.64"):
        parse_growth(text)


def test_growth_is_read_from_its_name() -> None:
    assert parse_growth("chain:8") == ChainGrowth(8, 0)
    assert parse_growth("chain:4+24") == ChainGrowth(4, 24)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree = Tree([0])
    for node in range(draw(st.integers(0, 40))):
        parent = draw(st.integers(-1, node - 1))
        tree.add(node, parent, draw(st.integers(0, 9)), -draw(st.floats(0.0, 3.0)))
    return tree


@given(trees(), st.integers(0, 20), st.integers(0, 6), st.integers(2, 24))
def test_selection_keeps_its_budgets_and_takes_the_most_probable(
    tree: Tree, max_candidates: int, max_depth: int, max_rows: int
) -> None:
    chosen = BestFirst(max_rows).select(tree, max_candidates=max_candidates, max_depth=max_depth)
    eligible = [node for node in tree.nodes if tree.depth(node) <= max_depth]
    assert len(chosen) == len(set(chosen)) == min(max_candidates, max_rows - 1, len(eligible))
    for i, node in enumerate(chosen):
        parent = tree.nodes[node].parent
        assert parent == ROOT or parent in chosen[:i]
    left_out = set(eligible) - set(chosen)
    if chosen and left_out:
        assert min(map(tree.logprob, chosen)) >= max(map(tree.logprob, left_out)) - 1e-9
