"""The answer is the target's own, whatever the drafter, the schedule, the link and its faults do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.scripted_logits import agreeing, hash_logits, hopeless, reference, text_logits
from scripts.simulation import Simulation
from speculation.growth import GrowthPolicy
from wire.messages import Acceptance, Candidates, Message, OpenSession, Paired, Prefix
from wire.sampling import Sampling

VOCAB_SIZE = 32
PROMPT = (1, 2, 3)
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=1234),
    "penalties": Sampling(
        temperature=1.0, top_p=0.9, seed=7, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3
    ),
}
Simulate = Callable[..., Simulation]


VARIATIONS: dict[str, dict[str, Any]] = {
    "chain of 1": {"growth": "chain:1"},
    "chain of 4": {"growth": "chain:4"},
    "chain of 8": {"growth": "chain:8"},
    "drafting ahead": {"growth": "chain:2+20"},
    "tree": {"growth": "tree:3x2"},
    "tree and local drafter": {"growth": "tree:4x3", "local": (True, True)},
    "local drafter": {"growth": "chain:1", "local": (True, True), "kind": "hopeless"},
    "priced rows": {"growth": "tree:4x3", "local": (True, True), "costs": {1: 0.034, 16: 0.06}},
    "no delay": {"rtt_s": 0.0},
    "30 ms": {"rtt_s": 0.03},
    "200 ms": {"rtt_s": 0.2},
    "hopeless drafter": {"kind": "hopeless"},
    "target as its own drafter": {"kind": "itself"},
    "waiting for drafts": {"growth": "chain:4", "patience_s": 1.0},
}


@pytest.mark.parametrize("variation", VARIATIONS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_many_prompts_are_answered_as_by_the_target_alone(simulate: Simulate, variation: str, sampling: str) -> None:
    target = hash_logits(VOCAB_SIZE, 17)
    how = {"kind": "half right", "rtt_s": 0.086, "growth": "chain:2+14"} | VARIATIONS[variation]
    kind, rtt_s = how.pop("kind"), how["rtt_s"]
    drafter = {"half right": agreeing(target, 0.5, 1), "hopeless": hopeless(target), "itself": target}[kind]
    jitter = random.Random(5).random

    def fault(leg: str, message: Message) -> tuple[float, ...]:
        # The streams to the client stay in order, as TCP keeps them.
        return (jitter() * rtt_s / 8 if isinstance(message, Candidates | Acceptance) else 0.0,)

    for number in range(8 if "tree" in how["growth"] else 40):
        prompt = tuple(random.Random(number).choices(range(VOCAB_SIZE), k=1 + number % 7))
        simulation = simulate(
            target, drafter, prompt=prompt, max_tokens=20, sampling=SAMPLINGS[sampling], fault=fault, **how
        )
        answer = simulation.answers["s"]
        assert tuple(answer.tokens) == reference(target, SAMPLINGS[sampling], prompt, 20)
        assert answer.finish_reason == "length"


@pytest.mark.parametrize("growth", ["chain:1", "chain:4", "chain:2+20", "tree:4x3"])
@pytest.mark.parametrize("kind", ["half right", "hopeless", "itself"])
@pytest.mark.parametrize("rtt_s", [0.0, 0.03, 0.2])
def test_no_combination_of_schedule_drafter_and_delay_changes_a_longer_answer(
    simulate: Simulate, growth: str | GrowthPolicy, kind: str, rtt_s: float
) -> None:
    for number, sampling in enumerate(SAMPLINGS.values()):
        target = hash_logits(VOCAB_SIZE, number)
        drafter = {"half right": agreeing(target, 0.5, 1), "hopeless": hopeless(target), "itself": target}[kind]
        simulation = simulate(target, drafter, growth=growth, sampling=sampling, rtt_s=rtt_s, max_tokens=60)
        assert tuple(simulation.answers["s"].tokens) == reference(target, sampling, PROMPT, 60)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    drop=st.floats(0.0, 0.6),
    repeat=st.floats(0.0, 0.5),
    slow_s=st.floats(0.0, 0.5),
    growth=st.sampled_from(["chain:1", "chain:4", "chain:1+10", "chain:3+9", "tree:2x2@4"]),
    patience_s=st.sampled_from([0.0, 0.3]),
    local=st.sampled_from([(False, False), (True, True)]),
    sampling=st.sampled_from(sorted(SAMPLINGS)),
)
def test_c038_faults_on_the_link_never_change_the_answer_and_never_stop_it(
    simulate: Simulate,
    seed: int,
    drop: float,
    repeat: float,
    slow_s: float,
    growth: str,
    patience_s: float,
    local: tuple[bool, bool],
    sampling: str,
) -> None:
    """Candidates are lost, repeated, delayed and reordered; acceptances are repeated and delayed."""
    rng = random.Random(seed)

    def fault(leg: str, message: Message) -> tuple[float, ...]:
        if isinstance(message, Candidates) and rng.random() < drop:
            return ()
        if isinstance(message, Candidates | Acceptance):
            copies = 2 if rng.random() < repeat else 1
            return tuple(rng.random() * slow_s for _ in range(copies))
        return (0.0,)

    target = hash_logits(VOCAB_SIZE, seed)
    simulation = simulate(
        target, agreeing(target, 0.8, seed), growth=growth, patience_s=patience_s, sampling=SAMPLINGS[sampling],
        fault=fault, local=local,
    )  # fmt: skip
    assert tuple(simulation.answers["s"].tokens) == reference(target, SAMPLINGS[sampling], PROMPT, 40)


def test_a_lost_frame_is_sent_again_and_drafting_pays_again(simulate: Simulate) -> None:
    """Without the resend every later candidate of a perfect drafter would hang on a parent that never came."""
    lost = []

    def fault(leg: str, message: Message) -> tuple[float, ...]:
        if isinstance(message, Candidates) and message.frame == 2 and leg == "draft>relay" and not lost:
            lost.append(message)
            return ()
        return (0.0,)

    target = hash_logits(VOCAB_SIZE, 3)
    simulation = simulate(target, target, growth="chain:2+14", max_tokens=120, fault=fault)
    answer = simulation.answers["s"]
    assert lost
    assert tuple(answer.tokens) == reference(target, Sampling(), PROMPT, 120)
    assert simulation.draft.counters.num_resends >= 1
    assert answer.sources[-60:].count("draft") > 40


def test_a_missing_acceptance_is_asked_for(simulate: Simulate) -> None:
    lost = []

    def fault(leg: str, message: Message) -> tuple[float, ...]:
        if isinstance(message, Acceptance) and leg == "relay>draft" and message.start == 9 and not lost:
            lost.append(message)
            return ()
        return (0.0,)

    target = hash_logits(VOCAB_SIZE, 3)
    drafter = hopeless(target)
    simulation = simulate(target, drafter, growth="chain:2", max_tokens=60, fault=fault)
    assert lost
    assert simulation.draft.counters.num_resyncs == 1
    assert tuple(simulation.answers["s"].tokens) == reference(target, Sampling(), PROMPT, 60)


def test_c015_a_seeded_answer_depends_on_the_seed_alone(simulate: Simulate) -> None:
    target = hash_logits(VOCAB_SIZE, 5, 4.0)
    drafter = agreeing(target, 0.6, 5)

    def answer(seed: int, temperature: float = 0.8, **how: object) -> tuple[int, ...]:
        sampling = Sampling(temperature=temperature, seed=seed)
        return tuple(simulate(target, drafter, sampling=sampling, **how).answers["s"].tokens)

    alone = answer(1234)
    assert answer(1234, rtt_s=0.0) == answer(1234, rtt_s=0.4) == alone
    assert answer(1234, growth="chain:7", patience_s=1.0) == alone
    assert answer(1235) != alone
    assert answer(1234, temperature=0.0) == answer(1235, temperature=0.0)

    def busy(simulation: Simulation) -> None:
        for i in range(20):
            simulation.open(OpenSession(session=f"other{i}", prompt_ids=(4, i), max_tokens=9), at_s=0.05 * i)

    assert answer(1234, prepare=busy) == alone


@pytest.mark.parametrize("offset", range(5))
def test_c001_nothing_follows_an_end_token_inside_a_block(simulate: Simulate, offset: int) -> None:
    eos = 31
    text = [10, 11, 12, 13][:offset]
    target = text_logits([*text, eos, 12, 13, 14], eos, num_prompt=3)
    simulation = simulate(target, target, growth="chain:4", patience_s=1.0, stop_ids=(eos,), max_tokens=30)
    answer = simulation.answers["s"]
    assert answer.tokens == [*text, eos]
    assert answer.finish_reason == "stop"
    assert answer.done is not None
    assert answer.done.completion_tokens == offset + 1
    assert answer.done.report["passes"] == 1
    assert not simulation.verify.sessions
    assert not simulation.draft.sessions


@pytest.mark.parametrize("size", [1, 3, 6])
def test_c028_any_of_several_end_tokens_ends_the_answer_inside_a_block(simulate: Simulate, size: int) -> None:
    ids = [ord(c) for c in "hello"] + [257] + [ord(c) for c in "second turn"]
    target = text_logits(ids, 256, num_prompt=3)
    simulation = simulate(
        target, target, growth=f"chain:{size}", patience_s=1.0, vocab_size=258, stop_ids=(256, 257), max_tokens=60
    )
    answer = simulation.answers["s"]
    assert answer.tokens == ids[:6]
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 9])
@pytest.mark.parametrize("growth", ["chain:4", "chain:4+20"])
def test_c003_the_budget_is_kept_to_the_token(simulate: Simulate, max_tokens: int, growth: str) -> None:
    target = hash_logits(VOCAB_SIZE, 1)
    simulation = simulate(target, target, growth=growth, patience_s=1.0, max_tokens=max_tokens)
    answer = simulation.answers["s"]
    assert tuple(answer.tokens) == reference(target, Sampling(), PROMPT, max_tokens)
    assert answer.finish_reason == "length"
    assert answer.done is not None
    # Candidates beyond the last but one position would be wasted.
    assert answer.done.report["candidates_received"] <= max_tokens - 1


@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_c005_a_stop_string_ends_the_answer_wherever_it_lies_in_a_block(simulate: Simulate, size: int) -> None:
    ids = [ord(c) for c in "abcSTOPdefghijklmnop"]
    target = text_logits(ids, 256, num_prompt=3)
    shown = [chr(0x100 + ord(c)) for c in "STOP"]
    simulation = simulate(
        target, target, growth=f"chain:{size}", patience_s=1.0, vocab_size=257, stop=("".join(shown),), max_rows=32
    )
    answer = simulation.answers["s"]
    assert [ord(c) - 0x100 for c in answer.text] == ids[:3]
    assert answer.finish_reason == "stop"
    assert answer.tokens == ids[:7]


@pytest.mark.parametrize("ending", ["stop string", "end token", "budget"])
def test_c007_ids_logprobs_and_usage_describe_the_same_tokens(simulate: Simulate, ending: str) -> None:
    eos = 256
    ids = [ord(c) for c in "abcdefghi"]
    if ending == "end token":
        ids[2] = eos
    request = {
        "stop string": {"stop": (chr(0x100 + ord("c")),)},
        "end token": {"stop_ids": (eos,)},
        "budget": {"max_tokens": 3},
    }[ending]
    target = text_logits(ids, eos, num_prompt=3)
    answers = []
    for speculate in (True, False):
        simulation = simulate(
            target, target, growth="chain:8", patience_s=1.0, vocab_size=257, max_rows=32, logprobs=2,
            speculate=speculate, **request,
        )  # fmt: skip
        answer = simulation.answers["s"]
        assert answer.done is not None
        assert answer.done.completion_tokens == len(answer.tokens) == 3
        counts = answer.done.report
        assert counts["tokens_draft"] + counts["tokens_plain"] == 3
        assert counts["accepted"] == counts["tokens_draft"] == answer.sources.count("draft") <= counts["drafted"]
        assert counts["accepted"] == (3 if speculate and ending != "budget" else 2 if speculate else 0)
        answers.append((answer.tokens, answer.text, answer.finish_reason, answer.logprobs))
        assert len(answer.logprobs) == 3
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_k=2, seed=5)], ids=["greedy", "sampled"]
)
def test_c008_logprobs_are_the_targets_for_accepted_corrected_and_bonus_tokens(
    simulate: Simulate, sampling: Sampling
) -> None:
    """They are of the logits before temperature and top-k, as `TokenLogprob` says."""
    row = [math.log(p) for p in (0.5, 0.3, 0.2)]
    passes: list[Acceptance] = []

    def fault(leg: str, message: Message) -> tuple[float, ...]:
        if isinstance(message, Acceptance) and leg == "verify>relay" and message.rounds:
            passes.append(message)
        return (0.0,)

    # Never right at every fifth position, the target itself at the others: blocks of four are accepted or corrected.
    def drafter(prefix: tuple[int, ...]) -> list[float]:
        return [-row[0], -row[1] - 9.0, -row[2]] if len(prefix) % 5 == 0 else row

    answers = []
    for speculate in (True, False):
        simulation = simulate(
            lambda prefix: row, drafter, growth="chain:3", patience_s=1.0, vocab_size=3, max_tokens=30, logprobs=2,
            sampling=sampling, fault=fault, speculate=speculate, prompt=(1, 2, 0),
        )  # fmt: skip
        answers.append(simulation.answers["s"])
    drafted, alone = answers
    assert drafted.tokens == alone.tokens
    assert len(drafted.logprobs) == len(alone.logprobs) == len(drafted.tokens) == 30
    for token, entry, reference_entry in zip(drafted.tokens, drafted.logprobs, alone.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=1e-5)
        assert entry.top_ids == reference_entry.top_ids == (0, 1)
        assert entry.top_logprobs == pytest.approx(row[:2], abs=1e-5)
        assert entry.logprob == pytest.approx(reference_entry.logprob, abs=1e-5)
    assert any(each.num_accepted > 0 for each in passes), "some accepted"
    assert any(len(each.tokens) <= 3 for each in passes), "some corrected"
    assert any(each.num_accepted == 3 and len(each.tokens) == 4 for each in passes), "some with a bonus token"


@pytest.mark.parametrize("num_prompt", [20, 27, 31])
def test_c023_prompt_and_answer_never_exceed_the_context(simulate: Simulate, num_prompt: int) -> None:
    target = hash_logits(VOCAB_SIZE, 1)
    simulation = simulate(
        target, target, growth="chain:5", patience_s=1.0, prompt=[1] * num_prompt, context=32, max_tokens=100
    )
    answer = simulation.answers["s"]
    assert len(answer.tokens) == 32 - num_prompt
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("size", range(1, 9))
def test_c020_a_drafter_that_is_the_target_is_always_accepted(simulate: Simulate, size: int) -> None:
    target = hash_logits(VOCAB_SIZE, 2)
    simulation = simulate(target, target, growth=f"chain:{size}", patience_s=5.0, max_tokens=200)
    done = simulation.answers["s"].done
    assert done is not None
    assert done.report["acceptance_rate"] == 1.0
    assert done.report["passes"] == -(-200 // (size + 1))


@pytest.mark.parametrize("bad", ["id", "parent", "root"])
def test_c047_malformed_candidates_cost_the_drafter_its_hearing_and_nobody_else(simulate: Simulate, bad: str) -> None:
    target = hash_logits(VOCAB_SIZE, 2)

    def attack(simulation: Simulation) -> None:
        message = Candidates(
            session="s", epoch=1, frame=999, first_node=0,
            parents=(-4000,) if bad == "root" else (-3,), tokens=(VOCAB_SIZE if bad == "id" else 1,), scores=(0,),
        )  # fmt: skip
        if bad == "parent":
            object.__setattr__(message, "parents", (0,))
        simulation.at(0.2, lambda: simulation._perform_verify(simulation.verify.on_message(message, simulation.now)))

    simulation = simulate(target, target, max_tokens=60, prepare=attack)
    answer = simulation.answers["s"]
    assert tuple(answer.tokens) == reference(target, Sampling(), PROMPT, 60)
    assert answer.done is not None
    assert answer.done.report["frames_malformed"] == 1


def test_a_second_drafter_takes_over_where_the_first_left(simulate: Simulate) -> None:
    """A new epoch starts node ids anew; frames of the old one are stale."""
    target = hash_logits(VOCAB_SIZE, 2)
    prefixes: list[Prefix] = []

    def fault(leg: str, message: Message) -> tuple[float, ...]:
        if isinstance(message, Prefix) and leg == "verify>relay":
            prefixes.append(message)
        return (0.0,)

    def repair(simulation: Simulation) -> None:
        paired = Paired(session="s", epoch=2, draft="other")
        simulation.at(0.5, lambda: simulation._perform_verify(simulation.verify.on_message(paired, simulation.now)))

    simulation = simulate(target, agreeing(target, 0.9), max_tokens=200, prepare=repair, fault=fault)
    assert tuple(simulation.answers["s"].tokens) == reference(target, Sampling(), PROMPT, 200)
    assert [prefix.epoch for prefix in prefixes] == [1, 2]
    assert prefixes[1].total > prefixes[0].total
    taken_over = prefixes[1].total - len(PROMPT)
    assert simulation.answers["s"].sources[taken_over + 10 :].count("draft") > 20
