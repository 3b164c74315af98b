"""The candidate tree: what is live, what is stale, and that no sequence of arrivals contradicts a commit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.tree import MAX_PASSED, ROOT, Arrival, MalformedCandidate, Tree


def chain(tree: Tree, tokens: list[int], first: int = 0) -> list[Arrival]:
    parents = [-tree.length, *range(first, first + len(tokens) - 1)]
    return [tree.add(first + i, parents[i], token, -0.1) for i, token in enumerate(tokens)]


def test_chain_is_live_and_passes_as_it_is_committed() -> None:
    tree = Tree([7])
    assert chain(tree, [1, 2, 3]) == [Arrival.LIVE] * 3
    commit = tree.commit([1, 2])
    assert commit.passed == (0, 1)
    assert commit.died == ()
    assert tree.committed == [7, 1, 2]
    assert tree.depth(2) == 1
    assert tree.children(ROOT) == {3: 2}


def test_a_miss_kills_the_whole_subtree() -> None:
    tree = Tree([7])
    chain(tree, [1, 2, 3])
    tree.add(3, 0, 9, -1.0)
    commit = tree.commit([1, 5])
    assert commit.passed == (0,)
    assert sorted(commit.died) == [1, 2, 3]
    assert len(tree) == 0
    assert tree.add(4, 3, 8, 0.0) is Arrival.STALE


def test_branches_survive_when_the_other_child_is_committed() -> None:
    tree = Tree([7])
    assert tree.add(0, -1, 1, -0.2) is Arrival.LIVE
    assert tree.add(1, -1, 2, -1.8) is Arrival.LIVE
    assert tree.add(2, 1, 3, -0.1) is Arrival.LIVE
    commit = tree.commit([2])
    assert commit.died == (0,)
    assert tree.children(ROOT) == {3: 2}
    assert tree.logprob(2) == pytest.approx(-0.1)


def test_late_nodes_that_agree_with_the_committed_tokens_carry_their_children() -> None:
    tree = Tree([7])
    tree.commit([1, 2])
    assert tree.add(0, -1, 1, 0.0) is Arrival.PASSED
    assert tree.add(1, 0, 2, 0.0) is Arrival.PASSED
    assert tree.add(2, 1, 3, 0.0) is Arrival.LIVE
    assert tree.depth(2) == 1


def test_late_nodes_that_disagree_are_stale_with_their_descendants() -> None:
    tree = Tree([7])
    tree.commit([1, 2])
    assert tree.add(0, -1, 4, 0.0) is Arrival.STALE
    assert tree.add(1, 0, 2, 0.0) is Arrival.STALE


def test_children_of_a_lost_frame_are_orphans_and_so_are_theirs() -> None:
    tree = Tree([7])
    tree.add(0, -1, 1, 0.0)
    assert tree.add(5, 4, 2, 0.0) is Arrival.ORPHAN
    assert tree.add(6, 5, 3, 0.0) is Arrival.ORPHAN
    assert tree.add(7, 0, 2, 0.0) is Arrival.LIVE


def test_a_repeated_node_changes_nothing() -> None:
    tree = Tree([7])
    chain(tree, [1, 2])
    before = {node: (n.parent, n.token) for node, n in tree.nodes.items()}
    assert chain(tree, [1, 2]) == [Arrival.DUPLICATE] * 2
    assert {node: (n.parent, n.token) for node, n in tree.nodes.items()} == before


def test_a_second_node_for_the_same_token_is_an_alias_of_the_first() -> None:
    tree = Tree([7])
    tree.add(0, -1, 1, -0.5)
    assert tree.add(1, -1, 1, -0.1) is Arrival.DUPLICATE
    assert tree.add(2, 1, 5, 0.0) is Arrival.LIVE
    assert tree.path(2) == [0, 2]
    tree.commit([1])
    assert tree.add(3, 1, 6, 0.0) is Arrival.LIVE
    assert tree.children(ROOT) == {5: 2, 6: 3}


@pytest.mark.parametrize(("node", "parent"), [(3, 3), (3, 4), (0, -2), (0, -1000)])
def test_c047_impossible_parents_are_malformed(node: int, parent: int) -> None:
    tree = Tree([7])
    with pytest.raises(MalformedCandidate, match=str(abs(parent))):
        tree.add(node, parent, 1, 0.0)
    assert len(tree) == 0


def test_the_tree_is_bounded() -> None:
    tree = Tree([7], max_nodes=3)
    arrivals = chain(tree, [1, 2, 3, 4, 5])
    assert arrivals[:3] == [Arrival.LIVE] * 3
    assert arrivals[3] is Arrival.FULL
    assert len(tree) == 3


def test_memory_stays_bounded_over_a_long_answer() -> None:
    tree = Tree([0])
    for i in range(10_000):
        tree.add(2 * i, -tree.length, i % 50, 0.0)
        tree.add(2 * i + 1, -tree.length, 99, -1.0)
        tree.commit([i % 50])
    assert len(tree) == 0
    assert len(tree._passed) <= MAX_PASSED
    assert not tree._alias


@st.composite
def events(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    return draw(
        st.lists(
            st.one_of(
                st.tuples(st.just("add"), st.integers(-6, 30), st.integers(0, 2)),
                st.tuples(st.just("skip"), st.integers(1, 3), st.just(0)),
                st.tuples(st.just("repeat"), st.integers(0, 30), st.integers(0, 2)),
                st.tuples(st.just("commit"), st.integers(0, 2), st.just(0)),
            ),
            max_size=60,
        )
    )


@given(events())
def test_no_sequence_of_arrivals_breaks_the_tree(script: list[tuple[str, int, int]]) -> None:
    """Every live node hangs below the root at its true depth, under the one parent that lists it."""
    tree = Tree([9])
    next_node = 0
    for kind, a, b in script:
        if kind == "skip":
            next_node += a
        elif kind == "commit":
            live = set(tree.nodes)
            commit = tree.commit([a])
            assert live == set(tree.nodes) | set(commit.passed) | set(commit.died)
        else:
            node = next_node if kind == "add" else a
            next_node = max(next_node, node + 1)
            try:
                tree.add(node, a if kind == "add" else -1, b, -0.5)
            except MalformedCandidate:
                assert (a if kind == "add" else -1) >= node or -a > tree.length
        listed = list(tree.roots.values()) + [c for n in tree.nodes.values() for c in n.children.values()]
        assert sorted(listed) == sorted(tree.nodes)
        for node in tree.nodes:
            path = tree.path(node)
            assert tree.nodes[path[0]].position == tree.length
            assert tree.depth(node) == len(path)
            assert tree.logprob(node) == pytest.approx(-0.5 * len(path))


def test_a_drafter_that_repeats_itself_fills_no_memory() -> None:
    tree = Tree([0], max_nodes=8)
    for node in range(1000):
        tree.add(node, -1, 5, -0.5)
    assert len(tree) == 1
    assert len(tree._alias) <= 8
    assert tree.add(1000, 8, 6, -0.5) is Arrival.LIVE
    assert tree.add(1001, 999, 7, -0.5) is Arrival.STALE
    tree.commit([5])
    assert not tree._alias
