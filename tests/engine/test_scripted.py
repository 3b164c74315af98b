"""The scripted runners: a scripted target is exact over any tree, and both refuse what a cache could not do."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CacheError, NumericalError
from engine.runner import DraftRunner, TargetRunner
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import agreeing, hash_logits, hopeless, ranking, reference, text_logits
from speculation.passes import DraftStep, NodeRow, Sampling, VerifyPass, VerifyResult

torch.set_num_threads(1)
PROMPT = (1, 2, 3)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1234),
    Sampling(
        temperature=1.0, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3, min_tokens=5
    ),
]


def one(results: list[VerifyResult | Exception]) -> VerifyResult:
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result


def open_target(target: TargetRunner, sampling: Sampling, stop_ids: tuple[int, ...] = ()) -> None:
    target.open(0, sampling=sampling, tokens=PROMPT, num_prompt=len(PROMPT), stop_ids=stop_ids)
    target.prefill(0, 0, len(PROMPT) - 1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SAMPLINGS),
    st.integers(0, 10**6),
    st.sets(st.integers(0, 3), max_size=1),
    st.sampled_from([3.0, 9.0]),
)
def test_any_tree_gives_the_tokens_of_the_target_alone(
    sampling: Sampling, seed: int, stops: set[int], sharpness: float
) -> None:
    rng = random.Random(seed)
    logits_fn = hash_logits(4, seed, sharpness)
    stop_ids = tuple(stops)
    expected = reference(logits_fn, sampling, PROMPT, 30, stop_ids)
    target = ScriptedTarget(logits_fn, max_rows=24)
    open_target(target, sampling, stop_ids)
    tokens = list(PROMPT)
    answer: list[int] = []
    num_accepted = 0
    while len(answer) < 30 and not (answer and answer[-1] in stop_ids):
        num_rows = rng.randint(1, 24)
        request = VerifyPass(
            slot=0,
            start=len(tokens),
            tokens=(tokens[-1], *(rng.randrange(4) for _ in range(num_rows - 1))),
            parents=(-1, *(rng.randint(max(0, row - 5), row - 1) for row in range(1, num_rows))),
            max_tokens=30 - len(answer),
            num_logprobs=2 if seed % 2 else None,
        )
        result = one(target.verify([request]))
        assert [request.tokens[row] for row in result.rows] == list(result.tokens[: len(result.rows)])
        assert (result.logprobs is not None and len(result.logprobs)) == (len(result.tokens) if seed % 2 else False)
        answer += result.tokens
        tokens += result.tokens
        num_accepted += len(result.rows)
    assert tuple(answer) == expected
    assert len(target.passes) == len(answer) - num_accepted + (len(result.rows) == len(result.tokens))


def test_a_right_chain_is_accepted_whole_with_a_bonus_token() -> None:
    logits_fn = hash_logits(4)
    expected = reference(logits_fn, Sampling(), PROMPT, 9)
    target = ScriptedTarget(logits_fn)
    open_target(target, Sampling())
    chain = VerifyPass(
        slot=0, start=3, tokens=(3, *expected[:8]), parents=tuple(range(-1, 8)), max_tokens=99, num_logprobs=None
    )
    assert one(target.verify([chain])).tokens == expected


def test_a_pass_asks_only_for_rows_that_the_walk_reaches() -> None:
    asked: list[tuple[int, ...]] = []
    logits_fn = text_logits([7, 8, 9], 10, num_prompt=len(PROMPT))

    def recording(prefix: tuple[int, ...]) -> torch.Tensor:
        asked.append(prefix)
        return logits_fn(prefix)

    target = ScriptedTarget(recording)
    open_target(target, Sampling())
    result = one(
        target.verify([VerifyPass(slot=0, start=3, tokens=(3, 6, 7, 7, 1), parents=(-1, 0, 0, 1, 2), max_tokens=9)])
    )
    assert (result.tokens, result.rows) == ((7, 8), (2,))
    assert asked == [PROMPT, (*PROMPT, 7)]


def test_a_walk_stopped_on_a_candidate_can_go_on() -> None:
    target = ScriptedTarget(text_logits([7, 8, 9], 10, num_prompt=len(PROMPT)))
    open_target(target, Sampling(), stop_ids=(7,))
    first = one(target.verify([VerifyPass(slot=0, start=3, tokens=(3, 7, 8), parents=(-1, 0, 1), max_tokens=9)]))
    assert (first.tokens, first.rows) == ((7,), (1,))
    second = one(target.verify([VerifyPass(slot=0, start=4, tokens=(7,), parents=(-1,), max_tokens=9)]))
    assert second.tokens == (8,)


def test_logits_that_are_no_numbers_fail_their_session_alone() -> None:
    target = ScriptedTarget(lambda prefix: [float("nan")] * 2 if prefix[0] == 1 else [0.0, 1.0], num_slots=2)
    target.open(0, sampling=Sampling(), tokens=[1], num_prompt=1, stop_ids=())
    target.open(1, sampling=Sampling(), tokens=[0], num_prompt=1, stop_ids=())
    passes = [VerifyPass(slot=slot, start=1, tokens=(1 - slot,), parents=(-1,), max_tokens=1) for slot in (0, 1)]
    bad, good = target.verify(passes)
    assert isinstance(bad, NumericalError)
    assert isinstance(good, VerifyResult)
    assert good.tokens == (1,)


GOOD_PASS = {"slot": 0, "start": 3, "tokens": (3, 1, 1), "parents": (-1, 0, 1), "max_tokens": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot": 1},
        {"start": 4},
        {"start": 2},
        {"tokens": (2, 1, 1)},
        {"tokens": (), "parents": ()},
        {"tokens": (3, 1)},
        {"tokens": (3,) * 9, "parents": tuple(range(-1, 8))},
        {"parents": (-1, 1, 0)},
        {"parents": (0, 0, 0)},
        {"max_tokens": 0},
        {"max_tokens": 14},
    ],
)
def test_a_pass_that_does_not_fit_the_cache_is_refused_and_changes_nothing(wrong: dict[str, object]) -> None:
    target = ScriptedTarget(hash_logits(4), max_length=16, max_rows=8)
    open_target(target, Sampling())
    with pytest.raises(CacheError):
        target.verify([VerifyPass(**(GOOD_PASS | wrong))])
    assert target.passes == []
    assert one(target.verify([VerifyPass(**GOOD_PASS)])).tokens


def test_target_slots_and_prefill_are_guarded() -> None:
    target = ScriptedTarget(hash_logits(4), max_length=8)
    with pytest.raises(CacheError, match="not open"):
        target.prefill(0, 0, 1)
    with pytest.raises(CacheError, match="does not exist"):
        target.open(1, sampling=Sampling(), tokens=PROMPT, num_prompt=3, stop_ids=())
    with pytest.raises(CacheError, match="do not fit"):
        target.open(0, sampling=Sampling(), tokens=[1] * 8, num_prompt=3, stop_ids=())
    target.open(0, sampling=Sampling(), tokens=PROMPT, num_prompt=3, stop_ids=())
    with pytest.raises(CacheError, match="taken"):
        target.open(0, sampling=Sampling(), tokens=PROMPT, num_prompt=3, stop_ids=())
    with pytest.raises(CacheError, match="with 0 cached"):
        target.verify([VerifyPass(**GOOD_PASS)])
    for start, end in ((1, 2), (0, 3)):
        with pytest.raises(CacheError, match="prefill"):
            target.prefill(0, start, end)
    target.prefill(0, 0, 1)
    target.prefill(0, 1, 2)
    with pytest.raises(CacheError, match="twice"):
        target.verify([VerifyPass(**GOOD_PASS)] * 2)
    target.close(0)
    target.close(0)
    target.open(0, sampling=Sampling(), tokens=PROMPT, num_prompt=3, stop_ids=())


def step(**fields: object) -> DraftStep:
    base = {"slot": 0, "accepted": (), "keep": frozenset(), "commit_start": 0, "commit": (), "nodes": ()}
    return DraftStep(**(base | {"expand_root": False, "num_children": 2} | fields))


def started() -> ScriptedDrafter:
    """A drafter with three committed tokens and nodes 0 - 1, and 2 beside 1."""
    drafter = ScriptedDrafter(hash_logits(4), max_length=8, max_rows=5, max_children=3)
    drafter.open(0, sampling=Sampling(), num_prompt=3)
    drafter.step([step(commit=PROMPT, expand_root=True)])
    nodes = (
        NodeRow(node=0, parent=-1, token=1),
        NodeRow(node=1, parent=0, token=2),
        NodeRow(node=2, parent=0, token=3),
    )
    drafter.step([step(commit_start=3, nodes=nodes)])
    return drafter


def test_children_are_those_of_their_whole_prefix() -> None:
    logits_fn = hash_logits(4)
    drafter = started()
    nodes = (NodeRow(node=5, parent=2, token=0),)
    (result,) = drafter.step([step(accepted=(0,), keep=frozenset({2}), commit_start=4, nodes=nodes)])
    assert not isinstance(result, Exception)
    ranked = logits_fn((*PROMPT, 1, 3, 0)).sort(descending=True).indices
    assert [child.token for child in result.children[5]] == ranked[:2].tolist()
    assert set(result.children) == {5}


def test_a_drafter_penalises_what_is_committed_and_what_is_drafted() -> None:
    drafter = ScriptedDrafter(lambda prefix: [2.0, 1.5, 1.2])
    drafter.open(0, sampling=Sampling(presence_penalty=1.0), num_prompt=1)
    nodes = (NodeRow(node=0, parent=-1, token=1),)
    (result,) = drafter.step([step(commit=(2, 0), expand_root=True, nodes=nodes)])
    assert not isinstance(result, Exception)
    assert [child.token for child in result.children[-1]] == [1, 2]
    assert [child.token for child in result.children[0]] == [2, 0]


def test_fixed_candidates_are_proposed_as_they_are() -> None:
    drafter = ScriptedDrafter(next_tokens=lambda prefix: [len(prefix), 9, 8])
    drafter.open(0, sampling=Sampling(temperature=1.0), num_prompt=3)
    (result,) = drafter.step([step(commit=PROMPT, expand_root=True)])
    assert not isinstance(result, Exception)
    assert [child.token for child in result.children[-1]] == [3, 9]


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot": 1},
        {"commit_start": 4},  # a gap
        {"commit_start": 2},  # fed twice
        {"accepted": (0,), "commit_start": 3},
        {"accepted": (1,), "commit_start": 4},  # its parent was not accepted
        {"keep": frozenset({7})},  # never run
        {"keep": frozenset({1})},  # its parent is dropped
        {"accepted": (0, 1), "commit_start": 5, "keep": frozenset({2})},  # beside the committed path
        {"commit": (1,), "keep": frozenset({0})},  # committed without its row being accepted
        {"nodes": (NodeRow(node=9, parent=1, token=0),)},  # the parent was not kept
        {"keep": frozenset({0}), "nodes": (NodeRow(node=0, parent=-1, token=0),)},
        {"nodes": tuple(NodeRow(node=10 + i, parent=-1, token=i) for i in range(6))},
        {"commit": (0,) * 6},
        {
            "commit": (0,) * 3,
            "nodes": tuple(NodeRow(node=10 + i, parent=9 + i if i else -1, token=0) for i in range(3)),
        },
        {"num_children": 4},
        {"expand_root": True},
    ],
)
def test_a_step_that_does_not_fit_the_cache_is_refused_and_changes_nothing(wrong: dict[str, object]) -> None:
    drafter = started()
    with pytest.raises(CacheError):
        drafter.step([step(**({"commit_start": 3} | wrong))])
    drafter.step([step(commit_start=3, keep=frozenset({0, 1, 2}))])


def test_a_runner_is_what_the_nodes_expect() -> None:
    target: TargetRunner = ScriptedTarget(hash_logits(4))
    drafter: DraftRunner = ScriptedDrafter(hash_logits(4))
    assert target.max_rows <= drafter.max_rows
    with pytest.raises(ValueError, match="exactly one"):
        ScriptedDrafter()


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_text_logits_say_the_text_then_eos(sampling: Sampling) -> None:
    assert reference(text_logits([4, 5, 6], 9, num_prompt=2), sampling, (1, 1), 10, (9,)) == (4, 5, 6, 9)


def test_agreeing_agrees_as_often_as_asked_and_hopeless_never() -> None:
    target = hash_logits(50)
    prefixes = [(i, 3 * i, 7 * i) for i in range(2000)]
    best = [int(target(prefix).argmax()) for prefix in prefixes]
    for probability in (0.0, 0.8, 1.0):
        drafter = agreeing(target, probability, seed=5)
        agreed = [int(drafter(prefix).argmax()) == token for prefix, token in zip(prefixes, best, strict=True)]
        assert sum(agreed) / len(prefixes) == pytest.approx(probability, abs=0.04 if 0 < probability < 1 else 0.0)
        assert [int(drafter(prefix).argmax()) == best[i] for i, prefix in enumerate(prefixes)] == agreed
    assert all(int(hopeless(target)(prefix).argmax()) != token for prefix, token in zip(prefixes, best, strict=True))


def test_a_delay_is_slept_and_reported() -> None:
    num_rows: list[int] = []

    def delay(rows: int) -> float:
        num_rows.append(rows)
        return 0.002

    target = ScriptedTarget(hash_logits(4), delay_s=delay)
    open_target(target, Sampling())
    assert one(target.verify([VerifyPass(**GOOD_PASS)])).compute_s >= 0.002
    assert num_rows == [2, 3]


@pytest.mark.parametrize("probability", [0.3, 0.735, 1.0])
def test_ranking_puts_the_targets_token_where_its_scores_say(probability: float) -> None:
    target = hash_logits(64, 3, 4.0)
    drafter = ranking(target, probability, seed=5)
    places = [0] * 5
    prefixes = [(i % 61, i // 61, i % 7) for i in range(4000)]
    for prefix in prefixes:
        best = int(torch.as_tensor(target(prefix)).argmax())
        scores = torch.as_tensor(drafter(prefix))
        assert float(scores.exp().sum()) == pytest.approx(1.0, abs=0.02)
        top = scores.topk(4).indices.tolist()
        places[top.index(best) if best in top else 4] += 1
    misses = 1 - probability
    for place, share in enumerate([probability, 0.4 * misses, 0.2 * misses, 0.1 * misses, 0.3 * misses]):
        assert places[place] / len(prefixes) == pytest.approx(share, abs=0.03)
