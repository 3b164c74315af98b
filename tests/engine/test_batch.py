"""Sessions that share passes get the tokens that each would get alone, whatever shares them and however it is run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.capturer import TapeCapturer, Uncaptured
from engine.checkpoint import Checkpoint
from engine.drafter import HFDrafter
from engine.eager import EagerPasses
from engine.errors import CacheError, NumericalError
from engine.hf import CausalLM
from engine.model import CachedModel, NewRows
from engine.shared import lengths_up_to
from engine.slots import together
from engine.target import HFTarget
from scripts.demo_model import MODEL_NAME, cache_directory
from speculation.passes import DraftResult, DraftStep, NodeRow, Sampling, VerifyPass, VerifyResult

SMOLLM2 = cache_directory() / MODEL_NAME
VOCAB = 320
NUM_SLOTS = 5
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.8, seed=5),
    Sampling(temperature=1.0, top_p=0.9, seed=9, repetition_penalty=1.2, frequency_penalty=0.3),
)


def lean(lm: CausalLM, **sizes: Any) -> CachedModel:
    model = CachedModel(lm, **({"num_slots": NUM_SLOTS, "max_length": 160, "max_tree_rows": 24} | sizes))
    assert lm.is_lean
    return model


def captured(lm: CausalLM, **sizes: Any) -> CachedModel:
    plain = CausalLM(lm.model, lean=False)
    return CachedModel(
        plain, capturer=TapeCapturer(),
        **({"num_slots": NUM_SLOTS, "max_length": 160, "max_tree_rows": 24, "first_segment": 128} | sizes),
    )  # fmt: skip


def uncaptured(lm: CausalLM, **sizes: Any) -> CachedModel:
    plain = CausalLM(lm.model, lean=False)
    return CachedModel(
        plain, capturer=Uncaptured(), **({"num_slots": NUM_SLOTS, "max_length": 160, "max_tree_rows": 24} | sizes)
    )


def eager(lm: CausalLM, **sizes: Any) -> CachedModel:
    plain = CausalLM(lm.model, lean=False)
    return CachedModel(plain, **({"num_slots": NUM_SLOTS, "max_length": 160, "max_tree_rows": 24} | sizes))


KINDS: dict[str, Callable[..., CachedModel]] = {
    "lean": lean, "captured": captured, "uncaptured": uncaptured, "transformers": eager,
}  # fmt: skip


class Answers:
    """Some sessions on one target, each with its own sampling and right candidates among wrong ones."""

    def __init__(
        self, target: HFTarget, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]] = ()
    ) -> None:
        self.target = target
        self.tokens = [list(prompt) for prompt in prompts]
        self.num_prompt = [len(prompt) for prompt in prompts]
        self.expected = expected
        self.rng = random.Random(3)
        for slot, prompt in enumerate(prompts):
            sampling = SAMPLINGS[slot % len(SAMPLINGS)]
            target.open(slot, sampling=sampling, tokens=prompt, num_prompt=len(prompt), stop_ids=())
            target.prefill(slot, 0, len(prompt) - 1)

    def request(self, slot: int, vocab: int) -> VerifyPass:
        tokens, rng = self.tokens[slot], self.rng
        candidates: list[int] = []
        parents: list[int] = []
        tip = 0
        right = self.expected[slot][len(tokens) - self.num_prompt[slot] :] if self.expected else []
        for token in right[: rng.randint(0, 3)]:
            for _ in range(rng.randint(0, 1)):
                candidates.append(rng.randrange(vocab))
                parents.append(rng.randrange(len(candidates)))
            candidates.append(token)
            parents.append(tip)
            tip = len(candidates)
        return VerifyPass(
            slot=slot, start=len(tokens), tokens=(tokens[-1], *candidates), parents=(-1, *parents), max_tokens=50,
        )  # fmt: skip

    def run(self, slots: Sequence[int], vocab: int = VOCAB) -> None:
        results = self.target.verify([self.request(slot, vocab) for slot in slots])
        for slot, result in zip(slots, results, strict=True):
            assert isinstance(result, VerifyResult), result
            self.tokens[slot] += result.tokens

    def answer(self, slot: int) -> list[int]:
        return self.tokens[slot][self.num_prompt[slot] :]


def prompts_of(rng: random.Random, vocab: int = VOCAB) -> list[list[int]]:
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, 30))] for _ in range(NUM_SLOTS)]


def solo(make: Callable[..., CachedModel], lm: CausalLM, prompts: Sequence[Sequence[int]], num: int) -> list[list[int]]:
    """The answers, each alone on a fresh target."""
    found = []
    for slot, prompt in enumerate(prompts):
        target = HFTarget(make(lm, num_slots=1), vocab_size=VOCAB)
        sampling, tokens = SAMPLINGS[slot % len(SAMPLINGS)], list(prompt)
        target.open(0, sampling=sampling, tokens=prompt, num_prompt=len(prompt), stop_ids=())
        target.prefill(0, 0, len(prompt) - 1)
        while len(tokens) < len(prompt) + num:
            request = VerifyPass(slot=0, start=len(tokens), tokens=(tokens[-1],), parents=(-1,), max_tokens=50)
            (result,) = target.verify([request])
            assert isinstance(result, VerifyResult)
            tokens += result.tokens
        found.append(tokens[len(prompt) :])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_batched_answers_are_the_solo_answers(lm: CausalLM, kind: str) -> None:
    """Greedy, sampled and penalised sessions of all lengths, in passes of random company, with trees of candidates."""
    make, rng = KINDS[kind], random.Random(11)
    prompts = prompts_of(rng)
    expected = solo(make, lm, prompts, 40)
    model = make(lm)
    answers = Answers(HFTarget(model, vocab_size=VOCAB), prompts, expected)
    addresses = model.addresses()
    while min(len(answers.answer(slot)) for slot in range(NUM_SLOTS)) < 30:
        going = [slot for slot in range(NUM_SLOTS) if len(answers.answer(slot)) < 30]
        answers.run(rng.sample(going, rng.randint(1, len(going))))
        for slot in range(NUM_SLOTS):
            assert model.rows[slot].used == model.rows[slot].length == len(answers.tokens[slot]) - 1
    for slot in range(NUM_SLOTS):
        assert answers.answer(slot) == expected[slot][: len(answers.answer(slot))]
    # Only the cache has grown, if at all.
    assert set(addresses) <= set(model.addresses())


@pytest.mark.parametrize("kind", ["lean", "captured", "uncaptured"])
def test_a_shared_pass_gives_the_logits_of_separate_ones(lm: CausalLM, kind: str) -> None:
    model, alone = KINDS[kind](lm), KINDS[kind](lm)
    rng = random.Random(5)
    for each in (model, alone):
        for slot in range(NUM_SLOTS):
            each.cache.fill(slot, 0, 128, math.nan)
            each.forward(slot, list(range(3 + 7 * slot)), num_committed=3 + 7 * slot, num_logits=1)
    batch = []
    for slot in range(NUM_SLOTS):
        last = 2 + 7 * slot
        parents = [rng.choice([last, *range(last + 1, last + 1 + i)]) for i in range(slot + 1)]
        tokens = [rng.randrange(VOCAB) for _ in parents]
        batch.append(NewRows(slot=slot, tokens=tokens, parents=parents, num_logits=rng.randint(1, slot + 1)))
    for new, shared in zip(batch, model.forward_batch(batch), strict=True):
        expected = alone.forward(new.slot, new.tokens, parents=new.parents, num_logits=new.num_logits)
        assert isinstance(shared, torch.Tensor)
        assert shared.shape == expected.shape
        assert (shared - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_weights_are_read_once_for_all_sessions(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lean(lm)
    sizes: list[int] = []
    original = type(lm._lean.layers[0].qkv).__call__  # type: ignore[union-attr]

    def counted(self: Any, rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return original(self, rows)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(lm._lean.layers[0].qkv), "__call__", counted)  # type: ignore[union-attr]
    model.forward_batch([NewRows(slot=slot, tokens=[1, 2], num_committed=2, num_logits=1) for slot in range(4)])
    num_layers = len(lm._lean.layers)  # type: ignore[union-attr]
    assert sizes == [8] * 4 * num_layers + [4]  # and the head for the rows that are asked for


@pytest.mark.parametrize("kind", ["lean", "captured"])
def test_a_batch_that_is_too_large_takes_several_passes(lm: CausalLM, kind: str) -> None:
    sizes = {"lean": {}, "captured": {"max_tree_rows": 8, "first_segment": 40, "max_length": 80}}[kind]
    model, alone = KINDS[kind](lm, **sizes), KINDS[kind](lm, **sizes)
    count = 100 if kind == "lean" else 7
    starts = [0, 5, 20, 41, 0]  # of the captured one the fourth has outgrown the first segment
    for each in (model, alone):
        for slot, start in enumerate(starts):
            if start:
                each.forward(slot, [3] * start, num_committed=start, num_logits=1)
    if kind == "lean":
        count = 60
    batch = [NewRows(slot=slot, tokens=[slot + 5] * count, num_committed=count, num_logits=1) for slot in range(5)]
    for new, shared in zip(batch, model.forward_batch(batch), strict=True):
        expected = alone.forward(new.slot, new.tokens, num_committed=count, num_logits=1)
        assert isinstance(shared, torch.Tensor)
        assert (shared - expected).abs().max() <= 1e-4 * expected.abs().max()
    if isinstance(model._passes, EagerPasses):
        assert 5 * count > model.max_pass_rows


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_one_session_costs_the_others_nothing(lm: CausalLM, kind: str) -> None:
    """Not even where their rows lie beside one another in the products."""
    prompts = prompts_of(random.Random(2))
    expected = solo(KINDS[kind], lm, prompts, 8)
    model = KINDS[kind](lm)
    answers = Answers(HFTarget(model, vocab_size=VOCAB), [[5, 9, 200], *prompts[1:]], [[], *expected[1:]])
    model.cache.fill(0, 0, 2, math.nan)
    results = answers.target.verify([answers.request(slot, VOCAB) for slot in range(NUM_SLOTS)])
    assert isinstance(results[0], NumericalError)
    for slot in range(1, NUM_SLOTS):
        result = results[slot]
        assert isinstance(result, VerifyResult)
        assert list(result.tokens) == expected[slot][: len(result.tokens)]
        assert model.rows[slot].used == len(answers.tokens[slot]) + len(result.tokens) - 1
    assert model.rows[0].used == 2


def test_what_does_not_fit_is_refused_beside_what_does(lm: CausalLM) -> None:
    target = HFTarget(lean(lm), vocab_size=VOCAB)
    answers = Answers(target, [[1, 2, 3], [4, 5, 6]])
    good = answers.request(1, VOCAB)
    bad = VerifyPass(slot=0, start=9, tokens=(3,), parents=(-1,), max_tokens=5)
    refused, served = target.verify([bad, good])
    assert isinstance(refused, CacheError)
    assert isinstance(served, VerifyResult)
    again = answers.request(0, VOCAB)
    with pytest.raises(CacheError, match="twice"):
        target.verify([again, again])
    assert isinstance(target.verify([again])[0], VerifyResult)


def test_what_fails_together_is_tried_one_by_one() -> None:
    calls: list[Sequence[int]] = []

    def run(requests: Sequence[int]) -> list[int | Exception]:
        calls.append(tuple(requests))
        if 2 in requests:
            raise ValueError("two")
        return [10 * request for request in requests]

    assert together([1, 3], run) == [10, 30]
    first, failed, last = together([1, 2, 3], run)
    assert (first, last) == (10, 30)
    assert isinstance(failed, ValueError)
    assert calls == [(1, 3), (1, 2, 3), (1,), (2,), (3,)]
    assert together([], run) == []


def draft_step(
    slot: int, tokens: Sequence[int], *, nodes: tuple[NodeRow, ...] = (), keep: Sequence[int] = ()
) -> DraftStep:
    return DraftStep(
        slot=slot, accepted=(), keep=frozenset(keep), commit_start=0, commit=tuple(tokens), nodes=nodes,
        expand_root=bool(tokens), num_children=3,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_step_proposes_for_each_session_what_it_would_alone(lm: CausalLM, kind: str) -> None:
    rng = random.Random(8)
    prompts = prompts_of(rng)
    together_, alone = (HFDrafter(KINDS[kind](lm), vocab_size=VOCAB) for _ in range(2))
    for drafter in (together_, alone):
        for slot, prompt in enumerate(prompts):
            drafter.open(slot, sampling=SAMPLINGS[slot % 3], num_prompt=len(prompt))
    steps = [draft_step(slot, prompt) for slot, prompt in enumerate(prompts)]
    held: list[list[NodeRow]] = [[] for _ in prompts]
    for round_ in range(3):
        results = together_.step(steps)
        expected = [alone.step([step])[0] for step in steps]
        next_steps = []
        for slot, (one, other) in enumerate(zip(results, expected, strict=True)):
            assert isinstance(one, DraftResult)
            assert isinstance(other, DraftResult)
            assert {n: [c.token for c in children] for n, children in one.children.items()} == {
                n: [c.token for c in children] for n, children in other.children.items()
            }
            parent = max(one.children)
            new = tuple(
                NodeRow(node=100 * round_ + i, parent=parent, token=child.token)
                for i, child in enumerate(one.children[parent][: 1 + slot % 3])
            )
            step = draft_step(slot, (), nodes=new, keep=[row.node for row in held[slot]])
            next_steps.append(replace(step, commit_start=len(prompts[slot])))
            held[slot] += new
        steps = next_steps


def test_a_step_that_cannot_be_done_leaves_the_others_theirs(lm: CausalLM) -> None:
    drafter = HFDrafter(lean(lm), vocab_size=VOCAB)
    for slot in range(2):
        drafter.open(slot, sampling=Sampling(), num_prompt=3)
    bad = DraftStep(
        slot=1, accepted=(), keep=frozenset(), commit_start=5, commit=(1,), nodes=(), expand_root=True, num_children=2
    )
    done, refused = drafter.step([draft_step(0, [1, 2, 3]), bad])
    assert isinstance(done, DraftResult)
    assert isinstance(refused, CacheError)
    with pytest.raises(CacheError, match="twice"):
        drafter.step([draft_step(1, [1]), draft_step(1, [1])])


@pytest.mark.parametrize(
    ("most", "lengths"), [(100, (100,)), (1500, (1500,)), (2048, (1024, 2048)), (16384, (1024, 4096, 16384))]
)
def test_lengths_of_shared_passes_are_few(most: int, lengths: tuple[int, ...]) -> None:
    assert lengths_up_to(most) == lengths


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not on this machine")
def test_smollm2_answers_the_same_in_company(tmp_path: Path) -> None:
    """The real model, in fp32: three prompts, 16 tokens each, alone and together."""
    checkpoint = Checkpoint(str(SMOLLM2), max_length=128)
    lm = checkpoint.load(dtype="float32")
    texts = ("The capital of France is", "def add(a, b):", "Once upon a time there was")
    prompts = [checkpoint.tokenizer.encode(text) for text in texts]
    model = CachedModel(lm, num_slots=3, max_length=128, max_tree_rows=16)
    vocab = checkpoint.tokenizer.vocab_size
    found: list[list[list[int]]] = []
    for company in (False, True):
        answers = Answers(HFTarget(model, vocab_size=vocab), prompts, found[0] if company else ())
        while len(answers.answer(0)) < 16:
            if company:
                answers.run(range(3), vocab)
            else:
                for slot in range(3):
                    answers.run([slot], vocab)
        found.append([answers.answer(slot) for slot in range(3)])
        for slot in range(3):
            answers.target.close(slot)
    for one, other in zip(*found, strict=True):
        assert one[: len(other)] == other[: len(one)]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_one_sessions_drafts_costs_the_others_nothing(lm: CausalLM, kind: str) -> None:
    prompts = prompts_of(random.Random(4))
    model = KINDS[kind](lm)
    drafter, alone = HFDrafter(model, vocab_size=VOCAB), HFDrafter(KINDS[kind](lm), vocab_size=VOCAB)
    expected: list[DraftResult | Exception] = []
    for slot, prompt in enumerate(prompts):
        for each in (drafter, alone):
            each.open(slot, sampling=SAMPLINGS[slot % 3], num_prompt=len(prompt))
            each.step([draft_step(slot, prompt[:-1])] if prompt[:-1] else [])
        step = replace(draft_step(slot, prompt[-1:]), commit_start=len(prompt) - 1)
        expected += alone.step([step])
    assert len(prompts[0]) > 1
    model.cache.fill(0, 0, 1, math.nan)
    steps = [replace(draft_step(s, prompts[s][-1:]), commit_start=len(prompts[s]) - 1) for s in range(NUM_SLOTS)]
    failed, *others = drafter.step(steps)
    assert isinstance(failed, NumericalError)
    for slot, (one, other) in enumerate(zip(others, expected[1:], strict=True), 1):
        assert isinstance(one, DraftResult)
        assert isinstance(other, DraftResult)
        assert [child.token for child in one.children[-1]] == [child.token for child in other.children[-1]]
        assert model.rows[slot].used == len(prompts[slot])


def test_a_compaction_that_fails_ends_that_session_alone(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = uncaptured(lm)
    target = HFTarget(model, vocab_size=VOCAB)
    answers = Answers(target, prompts_of(random.Random(6))[:3])
    keep = model.keep

    def fails(slot: int, *args: Any) -> None:
        if slot == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        keep(slot, *args)

    monkeypatch.setattr(model, "keep", fails)
    first, failed, last = together([answers.request(slot, VOCAB) for slot in range(3)], target.verify)
    assert isinstance(failed, torch.OutOfMemoryError)
    assert isinstance(first, VerifyResult)
    assert isinstance(last, VerifyResult)
