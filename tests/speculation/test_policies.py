"""Growth and selection: budgets are kept, the best candidates are chosen, parents come before children."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.costs import PassCosts
from speculation.growth import ChainGrowth, Expansion, FlushState, Frontier, TreeGrowth, parse_growth
from speculation.local import LocalDrafter
from speculation.selection import MIN_LOGPROB, BestFirst, Estimates, Pick
from speculation.tree import ROOT, Arrival, Tree


def grown(tree: Tree, policy: ChainGrowth, *, limit: int) -> int:
    """Grow until the policy waits; returns the number of nodes."""
    for node in range(1000):
        expansion = policy.expand(tree, Frontier(), root_is_new=False, limit=limit, room=64)
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
    assert policy.expand(tree, Frontier(), root_is_new=False, limit=99, room=8) == Expansion((ROOT,), 1, num_ahead=3)
    tree.add(0, -1, 5, -0.1)
    tree.add(1, 0, 6, -0.1)
    assert policy.expand(tree, Frontier(), root_is_new=False, limit=99, room=8) == Expansion((1,), 1, num_ahead=1)


def test_a_frame_goes_out_when_it_is_full_or_when_nothing_more_will_come() -> None:
    policy = ChainGrowth(4, 0)
    assert policy.flush(FlushState(num_unsent=4, can_grow=True))
    assert not policy.flush(FlushState(num_unsent=3, can_grow=True))
    assert policy.flush(FlushState(num_unsent=3, can_grow=False))
    assert not policy.flush(FlushState(num_unsent=0, can_grow=False))


@pytest.mark.parametrize(("num_sessions", "cadence_s"), [(1, 0.010), (2, 0.010), (4, 0.020), (8, 0.040), (64, 0.040)])
def test_frames_of_many_sessions_go_out_less_often_and_once_a_pass_at_least(
    num_sessions: int, cadence_s: float
) -> None:
    policy = TreeGrowth(rows=2, num_children=3)
    for since_s, due in ((cadence_s - 0.001, False), (cadence_s + 0.001, True)):
        state = FlushState(
            num_unsent=3, can_grow=True, num_live_sent=9, since_flush_s=since_s, verify_s=0.040,
            num_sessions=num_sessions,
        )  # fmt: skip
        assert policy.flush(state) is due


@pytest.mark.parametrize(
    "text",
    [
        "chain", "chain:0", "chain:4+x", "tree:3", "chain:65", "chain:4+9999", "chain:-1", "tree:0x4", "tree:8x17",
        "tree:8x4@99", "tree:8x4@", "",
    ],
)  # fmt: skip
def test_a_growth_that_cannot_be_read_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"chain:K|1\.\.64|1\.\.128"):
        parse_growth(text)


def test_growth_is_read_from_its_name() -> None:
    assert parse_growth("chain:8") == ChainGrowth(8, 0)
    assert parse_growth("chain:4+24") == ChainGrowth(4, 24)
    assert parse_growth("tree:16x4") == TreeGrowth(16, 4, -7.0)
    assert parse_growth("tree:8x2@9.5") == TreeGrowth(8, 2, -9.5)


def test_a_tree_policy_runs_the_root_first_then_the_best_nodes() -> None:
    tree, frontier = Tree([1, 2]), Frontier()
    policy = TreeGrowth(rows=2, num_children=3)
    assert policy.expand(tree, frontier, root_is_new=True, limit=99, room=8) == Expansion((ROOT,), 3)
    for node, logprob in enumerate((-0.3, -2.0, -1.0)):
        tree.add(node, -2, node + 10, logprob)
        frontier.push(tree, node)
    assert policy.expand(tree, frontier, root_is_new=False, limit=99, room=8) == Expansion((0, 2), 3)
    assert policy.expand(tree, frontier, root_is_new=False, limit=99, room=8) == Expansion((1,), 3)
    assert policy.expand(tree, frontier, root_is_new=False, limit=99, room=8) is None


def test_a_path_too_improbable_to_pay_is_grown_once_the_root_has_moved_towards_it() -> None:
    tree, frontier = Tree([1]), Frontier()
    policy = TreeGrowth(rows=4, num_children=2, min_logprob=-2.0)
    tree.add(0, -1, 5, -1.5)
    tree.add(1, 0, 6, -1.0)
    frontier.push(tree, 1)
    assert not policy.sendable(tree, 1)
    assert policy.expand(tree, frontier, root_is_new=False, limit=99, room=8) is None
    tree.commit((5,))
    assert policy.sendable(tree, 1)
    assert policy.expand(tree, frontier, root_is_new=False, limit=99, room=8) == Expansion((1,), 2)


@pytest.mark.parametrize("remaining", [1, 2, 3])
def test_c003_a_tree_has_no_node_that_the_budget_has_no_room_for(remaining: int) -> None:
    tree, frontier = Tree([1, 2]), Frontier()
    policy = TreeGrowth(rows=4, num_children=2)
    expansion = policy.expand(tree, frontier, root_is_new=True, limit=tree.length + remaining, room=8)
    assert (expansion is None) == (remaining == 1)
    tree.add(0, -2, 7, -0.1)
    frontier.push(tree, 0)
    expansion = policy.expand(tree, frontier, root_is_new=False, limit=tree.length + remaining, room=8)
    assert (expansion is None) == (remaining <= 2)


@pytest.mark.parametrize(
    ("state", "due"),
    [
        (FlushState(num_unsent=0, can_grow=False), False),
        (FlushState(num_unsent=3, can_grow=False, num_live_sent=9, since_flush_s=0.0), True),
        (FlushState(num_unsent=3, can_grow=True, num_live_sent=0, since_flush_s=0.0), True),
        (FlushState(num_unsent=3, can_grow=True, num_live_sent=9, since_flush_s=0.009, verify_s=0.04), False),
        (FlushState(num_unsent=3, can_grow=True, num_live_sent=9, since_flush_s=0.011, verify_s=0.04), True),
        (FlushState(num_unsent=3, can_grow=True, num_live_sent=9, since_flush_s=0.011), True),
    ],
)
def test_frames_are_coalesced_within_a_part_of_a_pass_but_the_first_goes_at_once(state: FlushState, due: bool) -> None:
    assert TreeGrowth(rows=4, num_children=2).flush(state) == due


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(-5.0, 0.0)), min_size=1, max_size=60), st.integers(1, 6))
def test_the_frontier_gives_live_nodes_best_first_and_each_once(nodes: list[tuple[int, float]], moves: int) -> None:
    tree, frontier = Tree([0]), Frontier()
    for node, (token, logprob) in enumerate(nodes):
        parent = node // 3 - 1
        if tree.add(node, parent if parent >= 0 else -1, token, logprob) is Arrival.LIVE:
            frontier.push(tree, node)
    for _ in range(moves):
        if tree.roots:
            tree.commit((max(tree.roots),))
    taken = []
    while (node_id := frontier.pop(tree)) is not None:
        taken.append(node_id)
    assert sorted(taken) == sorted(tree.nodes)
    logprobs = [tree.logprob(node) for node in taken]
    assert logprobs == sorted(logprobs, reverse=True)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree = Tree([0])
    for node in range(draw(st.integers(0, 40))):
        parent = draw(st.integers(-1, node - 1))
        tree.add(node, parent, draw(st.integers(0, 9)), -draw(st.floats(0.0, 1.5)))
    return tree


def paths(picks: list[Pick]) -> list[tuple[int, ...]]:
    """The tokens from below the pending one down to each pick."""
    found: list[tuple[int, ...]] = []
    for pick in picks:
        found.append((*(found[pick.parent] if pick.parent >= 0 else ()), pick.token))
    return found


@given(trees(), st.integers(0, 20), st.integers(0, 6), st.integers(2, 24))
def test_selection_keeps_its_budgets_and_takes_the_most_probable(
    tree: Tree, max_candidates: int, max_depth: int, max_rows: int
) -> None:
    picks = BestFirst(max_rows).select(tree, Estimates(), max_candidates=max_candidates, max_depth=max_depth)
    by_path = {
        tuple(tree.nodes[n].token for n in tree.path(node)): tree.logprob(node)
        for node in tree.nodes
        if tree.depth(node) <= max_depth
    }
    chosen = paths(picks)
    assert len(set(chosen)) == len(chosen) == min(max_candidates, max_rows - 1, len(by_path))
    assert [len(path) for path in chosen] == [pick.depth for pick in picks]
    left_out = by_path.keys() - set(chosen)
    if chosen and left_out:
        assert min(by_path[path] for path in chosen) >= max(by_path[path] for path in left_out) - 1e-9


# Cheaper rows than these would have paths beyond MIN_LOGPROB pay, which nobody looks at.
@given(trees(), st.floats(math.exp(MIN_LOGPROB), 0.2))
def test_no_row_is_scored_that_costs_more_than_it_brings(tree: Tree, row_cost: float) -> None:
    costs = PassCosts({1: 1.0, 64: 1.0 + 63 * row_cost})
    picks = BestFirst(64).select(tree, Estimates(costs=costs), max_candidates=63, max_depth=40)
    everything = BestFirst(64).select(tree, Estimates(), max_candidates=63, max_depth=40)
    assert picks == everything[: len(picks)]
    likely = {tuple(tree.nodes[n].token for n in tree.path(node)): tree.logprob(node) for node in tree.nodes}
    expected, rates = 1.0, [1.0]
    for n, path in enumerate(paths(everything), 1):
        expected += math.exp(likely[path])
        rates.append(expected / costs.seconds(1 + n))
    assert rates[len(picks)] == pytest.approx(max(rates))


def test_far_and_local_candidates_share_one_ranking_and_one_tree() -> None:
    tree = Tree([1, 2, 3, 1, 2])
    tree.add(0, -5, 7, -1.2)
    local = LocalDrafter([1, 2, 3, 1, 2], recycled=None, suffix=True)
    estimates = Estimates(local=local)
    picks = BestFirst(8).select(tree, estimates, max_candidates=7, max_depth=2)
    assert [(pick.token, pick.source, pick.depth) for pick in picks] == [
        (3, "local", 1),
        (7, "draft", 1),
        (1, "local", 2),
    ]
    assert [pick.parent for pick in picks] == [-1, -1, 0]


def test_a_token_that_both_propose_is_scored_once_and_counts_as_the_far_drafters() -> None:
    tree = Tree([1, 2, 3, 1, 2])
    tree.add(0, -5, 3, -0.1)
    estimates = Estimates(local=LocalDrafter([1, 2, 3, 1, 2], recycled=None, suffix=True))
    picks = BestFirst(8).select(tree, estimates, max_candidates=7, max_depth=1)
    assert [(pick.token, pick.source) for pick in picks] == [(3, "draft")]


def test_a_tree_stays_bounded_over_ten_thousand_tokens() -> None:
    """Half of the commits miss; dead nodes leave the tree at once and the frontier in time."""
    rng = random.Random(1)
    tree, frontier, policy = Tree([0]), Frontier(), TreeGrowth(rows=4, num_children=3, max_nodes=64)
    node = most = most_entries = 0
    root_is_new = True
    for _ in range(10_000):
        expansion = policy.expand(tree, frontier, root_is_new=root_is_new, limit=1 << 20, room=8)
        root_is_new = False
        for parent in expansion.nodes if expansion else ():
            for token in range(3):
                anchor = parent if parent != ROOT else -tree.length
                if tree.add(node, anchor, token, -0.2 - token) is Arrival.LIVE:
                    frontier.push(tree, node)
                node += 1
        most, most_entries = max(most, len(tree)), max(most_entries, len(frontier))
        hit = rng.random() < 0.5 and tree.roots
        root_is_new = not hit or bool(tree.nodes[tree.roots[0]].children == {})
        tree.commit((0 if hit else 99,))
    assert most <= 64 + 4 * 3
    assert most_entries <= 2 * most + 256 + 12
