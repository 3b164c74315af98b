import math
import random

import pytest

from engine.drafter import HFDrafter
from engine.errors import CacheError
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.target import HFTarget
from speculation.passes import DraftResult, DraftStep, NodeRow, Sampling, VerifyPass, VerifyResult

VOCAB = 320


def make_drafter(lm: CausalLM, *, max_tree_rows: int = 24, max_length: int = 320) -> tuple[HFDrafter, CachedModel]:
    model = CachedModel(lm, num_slots=1, max_length=max_length, max_tree_rows=max_tree_rows)
    return HFDrafter(model, vocab_size=VOCAB), model


def step(drafter: HFDrafter, **fields: object) -> DraftResult:
    defaults: dict[str, object] = {
        "slot": 0,
        "accepted": (),
        "keep": frozenset(),
        "commit_start": 0,
        "commit": (),
        "nodes": (),
        "expand_root": bool(fields.get("commit")),
        "num_children": 2,
    }
    (result,) = drafter.step([DraftStep(**(defaults | fields))])  # type: ignore[arg-type]
    if isinstance(result, Exception):
        raise result
    return result


def rows(*nodes: tuple[int, int, int]) -> tuple[NodeRow, ...]:
    return tuple(NodeRow(node=node, parent=parent, token=token) for node, parent, token in nodes)


def children_from_scratch(lm: CausalLM, tokens: list[int], sampling: Sampling) -> list[tuple[int, float]]:
    drafter, _ = make_drafter(lm)
    drafter.open(0, sampling=sampling, num_prompt=3)
    children = step(drafter, commit=tuple(tokens)).children[-1]
    return [(child.token, child.logprob) for child in children]


def assert_children(lm: CausalLM, result: DraftResult, node: int, tokens: list[int], sampling: Sampling) -> None:
    expected = children_from_scratch(lm, tokens, sampling)
    given = result.children[node]
    assert [child.token for child in given] == [token for token, _ in expected]
    assert [child.logprob for child in given] == pytest.approx([logprob for _, logprob in expected], abs=1e-4)


SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=4, repetition_penalty=1.3, frequency_penalty=0.4)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_children_are_those_of_the_path_alone_through_acceptance_and_rewind(lm: CausalLM, sampling: Sampling) -> None:
    drafter, model = make_drafter(lm)
    addresses = model.cache.addresses()
    drafter.open(0, sampling=sampling, num_prompt=3)
    tokens = [5, 9, 200]
    first = step(drafter, commit=(5, 9, 200), nodes=rows((0, -1, 20), (1, 0, 21), (2, 0, 22), (3, -1, 23), (4, 2, 24)))
    assert set(first.children) == {-1, 0, 1, 2, 3, 4}
    for node, path in {-1: [], 0: [20], 1: [20, 21], 2: [20, 22], 3: [23], 4: [20, 22, 24]}.items():
        assert_children(lm, first, node, tokens + path, sampling)
    # 20 and 22 are accepted; node 4 lives on, 1 and 3 die; a new node grows from 4 and one from the root.
    second = step(
        drafter, accepted=(0, 2), keep=frozenset({4}), commit_start=5, nodes=rows((5, 4, 25), (6, -1, 26), (7, 5, 27))
    )
    tokens += [20, 22]
    assert set(second.children) == {5, 6, 7}
    for node, path in {5: [24, 25], 6: [26], 7: [24, 25, 27]}.items():
        assert_children(lm, second, node, tokens + path, sampling)
    # A miss: everything is dropped, the correction is fed.
    third = step(drafter, commit_start=5, commit=(40,), nodes=rows((8, -1, 41)))
    tokens += [40]
    assert_children(lm, third, -1, tokens, sampling)
    assert_children(lm, third, 8, [*tokens, 41], sampling)
    # Accepted further than the cache holds: node 9 was never run, its token comes with the commit.
    fourth = step(drafter, accepted=(8, 9), commit_start=7, commit=(42, 43))
    assert_children(lm, fourth, -1, [*tokens, 41, 42, 43], sampling)
    assert model.rows[0].used == model.rows[0].length == 9
    assert model.cache.addresses() == addresses


def test_stale_rows_are_never_read(lm: CausalLM) -> None:
    drafter, model = make_drafter(lm)
    drafter.open(0, sampling=Sampling(), num_prompt=3)
    step(drafter, commit=(5, 9, 200), nodes=rows((0, -1, 20), (1, 0, 21), (2, -1, 22)))
    step(drafter, accepted=(0,), commit_start=4)
    model.cache.fill(0, model.rows[0].used, model.cache.capacity, math.nan)
    result = step(drafter, commit_start=4, commit=(30,))
    assert_children(lm, result, -1, [5, 9, 200, 20, 30], Sampling())


def test_long_commits_are_fed_in_several_passes(lm: CausalLM) -> None:
    drafter, model = make_drafter(lm)
    model.max_pass_rows = 8
    drafter.open(0, sampling=Sampling(), num_prompt=3)
    tokens = [i * 7 % VOCAB for i in range(40)]
    result = step(drafter, commit=tuple(tokens), nodes=rows((0, -1, 1), (1, 0, 2)))
    assert_children(lm, result, -1, tokens, Sampling())
    assert_children(lm, result, 1, [*tokens, 1, 2], Sampling())


@pytest.mark.parametrize("chain", range(1, 9))
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_c020_the_target_as_its_own_drafter_is_always_accepted(lm: CausalLM, chain: int, sampling: Sampling) -> None:
    """200 tokens by chains of K, without a hole in either cache: rounds = ceil(200 / (K + 1))."""
    total = 200 if chain in (1, 4, 8) else 60
    drafter, draft_model = make_drafter(lm)
    target_model = CachedModel(lm, num_slots=1, max_length=320, max_tree_rows=16)
    target = HFTarget(target_model, vocab_size=VOCAB)
    tokens = [5, 9, 200, 31]
    drafter.open(0, sampling=sampling, num_prompt=4)
    target.open(0, sampling=sampling, tokens=tokens, num_prompt=4, stop_ids=())
    target.prefill(0, 0, 3)
    next_node, accepted, num_rounds = 0, (), 0
    cached, rounds_expected = 0, math.ceil(total / (chain + 1))
    while len(tokens) < 4 + total:
        # Draft a chain; the last node of it is never run, as nothing is drafted behind it.
        result = step(drafter, accepted=accepted, commit_start=cached, commit=tuple(tokens[cached:]), num_children=1)
        child = result.children[-1][0]
        draft = [child.token]
        nodes = [next_node]
        cached = len(tokens)
        while len(draft) < chain:
            parent = nodes[-2] if len(nodes) > 1 else -1
            result = step(
                drafter,
                keep=frozenset(nodes),
                commit_start=cached,
                nodes=rows((nodes[-1], parent, draft[-1])),
                num_children=1,
            )
            draft.append(result.children[nodes[-1]][0].token)
            nodes.append(nodes[-1] + 1)
        request = VerifyPass(
            slot=0,
            start=len(tokens),
            tokens=(tokens[-1], *draft),
            parents=tuple(range(-1, len(draft))),
            max_tokens=4 + total - len(tokens),
        )
        (verified,) = target.verify([request])
        assert isinstance(verified, VerifyResult)
        assert list(verified.tokens[: len(draft)]) == draft[: len(verified.tokens)]
        tokens += verified.tokens
        accepted = tuple(nodes[: len(verified.rows)])
        next_node = nodes[-1] + 1
        num_rounds += 1
        assert target_model.rows[0].used == len(tokens) - 1
        # Rows that the drafter need not compute again: all accepted nodes but the last, which was never run.
        cached += min(len(verified.rows), chain - 1)
    assert num_rounds == rounds_expected
    assert draft_model.rows[0].length <= len(tokens)


def test_a_step_that_does_not_fit_the_cache_is_refused_and_the_session_can_go_on(lm: CausalLM) -> None:
    drafter, model = make_drafter(lm, max_tree_rows=4, max_length=16)
    with pytest.raises(CacheError, match="not open"):
        step(drafter, commit=(1,))
    drafter.open(0, sampling=Sampling(), num_prompt=1)
    with pytest.raises(CacheError, match="in use"):
        drafter.open(0, sampling=Sampling(), num_prompt=1)
    step(drafter, commit=(1, 2), nodes=rows((0, -1, 3), (1, 0, 4)))
    keep = frozenset({0, 1})
    bad: list[tuple[dict[str, object], str]] = [
        ({"commit_start": 3}, "cache holds 2 tokens"),
        ({"commit_start": 2, "commit": (5,)}, "do not follow the tokens"),
        ({"commit_start": 2, "expand_root": True}, "root are wanted"),
        ({"commit_start": 2, "nodes": rows((2, 9, 1))}, "parent 9 is not"),
        ({"commit_start": 2, "nodes": rows((1, 0, 1))}, "cached already"),
        ({"commit_start": 2, "nodes": rows((2, 1, 1), (3, 1, 1), (4, 1, 1))}, "do not fit"),
        ({"commit_start": 2, "nodes": rows((2, 1, VOCAB))}, "token ids"),
        ({"commit_start": 2, "keep": frozenset({1})}, "without its parent"),
    ]
    for fields, message in bad:
        with pytest.raises(CacheError, match=message):
            step(drafter, **({"keep": keep} | fields))
        assert model.rows[0].used == 4
    assert len(step(drafter, keep=keep, commit_start=2, nodes=rows((2, 1, 5))).children[2]) == 2
    with pytest.raises(CacheError, match="beyond the limit"):
        step(drafter, commit_start=2, commit=tuple(range(15)))
    drafter.close(0)
    drafter.close(0)
    drafter.open(0, sampling=Sampling(), num_prompt=1)
    assert model.rows[0].used == 0


def test_random_steps_equal_a_drafter_from_scratch(lm: CausalLM) -> None:
    """Trees grow, are accepted partly or missed, and every child list is that of the path alone."""
    rng = random.Random(8)
    sampling = SAMPLINGS[1]
    drafter, _ = make_drafter(lm)
    drafter.open(0, sampling=sampling, num_prompt=3)
    tokens = [5, 9, 200]
    paths: dict[int, list[int]] = {}
    step(drafter, commit=tuple(tokens))
    next_node = 0
    for _ in range(25):
        new = []
        for _ in range(rng.randint(1, 4)):
            parent = rng.choice([-1, *paths])
            token = rng.randrange(VOCAB)
            new.append((next_node, parent, token))
            paths[next_node] = [*paths.get(parent, []), token]
            next_node += 1
        result = step(drafter, keep=frozenset(paths), commit_start=len(tokens), nodes=rows(*new))
        node = rng.choice(new)[0]
        assert_children(lm, result, node, tokens + paths[node], sampling)
        if rng.random() < 0.5 or len(paths) > 14:
            end = paths[rng.choice(list(paths))]
            chosen = [next(n for n, p in paths.items() if p == end[: i + 1]) for i in range(len(end))]
            tokens += end
            paths = {n: p[len(end) :] for n, p in paths.items() if p[: len(end)] == end and len(p) > len(end)}
            commit: tuple[int, ...] = ()
            if rng.random() < 0.5:
                commit, paths = (rng.randrange(VOCAB),), {}
            result = step(
                drafter, accepted=tuple(chosen), keep=frozenset(paths), commit_start=len(tokens), commit=commit
            )
            tokens += commit
            if commit:
                assert_children(lm, result, -1, tokens, sampling)
