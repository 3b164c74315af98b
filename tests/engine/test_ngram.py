import math

import pytest

from engine.errors import CacheError
from engine.ngram import NgramDrafter
from speculation.passes import Child, DraftResult, DraftStep, NodeRow, Sampling


def make_drafter(**options: int) -> NgramDrafter:
    drafter = NgramDrafter(num_slots=1, max_length=64, **options)
    drafter.open(0, sampling=Sampling(), num_prompt=1)
    return drafter


def step(
    drafter: NgramDrafter,
    *,
    accepted: tuple[int, ...] = (),
    keep: tuple[int, ...] = (),
    start: int = 0,
    commit: tuple[int, ...] = (),
    nodes: tuple[NodeRow, ...] = (),
    num_children: int = 4,
) -> dict[int, tuple[Child, ...]]:
    request = DraftStep(
        slot=0,
        accepted=accepted,
        keep=frozenset(keep),
        commit_start=start,
        commit=commit,
        nodes=nodes,
        expand_root=bool(commit),
        num_children=num_children,
    )
    (result,) = drafter.step([request])
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, DraftResult)
    return result.children


def tokens(children: tuple[Child, ...]) -> list[int]:
    return [child.token for child in children]


def test_what_followed_the_longest_match_comes_first() -> None:
    drafter = make_drafter()
    children = step(drafter, commit=(1, 2, 3, 9, 2, 7, 9, 2, 7, 1, 2))
    assert tokens(children[-1])[0] == 3  # after (1, 2); shorter context (2,) prefers 7
    assert tokens(children[-1])[1] == 7


def test_estimates_are_probabilities_by_escape_method_c() -> None:
    drafter = make_drafter(max_order=1)
    children = step(drafter, commit=(5, 6, 5, 6, 5, 7, 5))
    assert children[-1] == (Child(token=6, logprob=math.log(2 / 5)), Child(token=7, logprob=math.log(1 / 5)))


def test_estimates_of_all_orders_together_stay_below_one() -> None:
    drafter = make_drafter()
    children = step(drafter, commit=tuple(i * i % 7 for i in range(40)), num_children=16)
    assert 0 < sum(math.exp(child.logprob) for child in children[-1]) < 1
    assert [child.logprob for child in children[-1]] == sorted((c.logprob for c in children[-1]), reverse=True)


def test_nodes_continue_along_their_path_and_unknown_contexts_have_no_children() -> None:
    drafter = make_drafter()
    children = step(
        drafter,
        commit=(1, 2, 3, 4, 9, 1),
        nodes=(
            NodeRow(node=0, parent=-1, token=2),
            NodeRow(node=1, parent=0, token=3),
            NodeRow(node=2, parent=1, token=50),
        ),
    )
    assert tokens(children[-1])[0] == 2
    assert tokens(children[0])[0] == 3
    assert tokens(children[1])[0] == 4
    assert children[2] == ()


def test_a_repetition_inside_the_path_is_found() -> None:
    drafter = make_drafter()
    path = (30, 31, 32, 30, 31)
    nodes = tuple(NodeRow(node=i, parent=i - 1, token=token) for i, token in enumerate(path))
    assert tokens(step(drafter, commit=(1,), nodes=nodes)[4])[0] == 32


def test_accepted_nodes_become_history_and_the_rest_is_kept_or_dropped() -> None:
    drafter = make_drafter()
    step(
        drafter,
        commit=(1, 2),
        nodes=(
            NodeRow(node=0, parent=-1, token=3),
            NodeRow(node=1, parent=0, token=4),
            NodeRow(node=2, parent=1, token=5),
            NodeRow(node=3, parent=-1, token=8),
        ),
    )
    step(drafter, accepted=(0, 1, 77), keep=(2,), start=4, nodes=(NodeRow(node=4, parent=2, token=3),))
    children = step(drafter, accepted=(2, 4), start=6)
    assert children == {}
    assert tokens(step(drafter, start=6, commit=(4,))[-1])[0] == 5  # 3 4 5 was committed from nodes
    with pytest.raises(CacheError, match="not known"):
        step(drafter, start=7, nodes=(NodeRow(node=9, parent=3, token=1),))


def test_children_are_limited_and_steps_are_checked() -> None:
    drafter = make_drafter(max_children=2, max_rows=1)
    assert len(step(drafter, commit=(1, 2, 1, 3, 1, 4, 1), num_children=9)[-1]) == 2
    with pytest.raises(CacheError, match="commit starts at 5"):
        step(drafter, start=5, commit=(1,))
    with pytest.raises(CacheError, match="more nodes exceed"):
        step(drafter, start=7, nodes=(NodeRow(node=0, parent=-1, token=1), NodeRow(node=1, parent=-1, token=2)))
    with pytest.raises(CacheError, match="exceed the limit of 64"):
        step(drafter, start=7, commit=(1,) * 58)
    with pytest.raises(CacheError, match="in use"):
        drafter.open(0, sampling=Sampling(), num_prompt=1)
    drafter.close(0)
    drafter.close(0)
    drafter.open(0, sampling=Sampling(), num_prompt=1)
