"""Drafting and verification overlap, and nobody waits who need not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from engine.scripted_logits import agreeing, hash_logits, hopeless
from scripts.simulation import Simulation, Times
from wire.messages import OpenSession

VOCAB_SIZE = 32
Simulate = Callable[..., Simulation]


def test_a_perfect_drafter_keeps_the_verifier_busy_across_86_ms(simulate: Simulate) -> None:
    target = hash_logits(VOCAB_SIZE, 1)
    simulation = simulate(target, target, growth="chain:2+46", max_tokens=600, times=Times(rtt_s=0.086, verify_s=0.034))
    answer = simulation.answers["s"]
    # Steady state: from the first pass that had candidates to the last token.
    steady_from = answer.token_times[answer.sources.index("draft")]
    assert simulation.busy_share("verify", steady_from, answer.token_times[-1]) > 0.95
    # Drafts are verified as fast as they are made, not one window a round trip.
    assert answer.tokens_per_s > 0.8 / simulation.times.draft_s


def test_the_next_round_is_drafted_while_a_round_is_verified(simulate: Simulate) -> None:
    target = hash_logits(VOCAB_SIZE, 1)
    simulation = simulate(target, agreeing(target, 0.9), growth="chain:4+20", max_tokens=100)
    passes = [busy for busy in simulation.busy if busy.kind == "verify"]
    steps = [busy for busy in simulation.busy if busy.kind == "draft"]
    ahead = [
        step
        for step in steps
        for verify in passes
        if verify.start_s <= step.start_s and step.end_s <= verify.end_s and step.position > verify.position
    ]
    assert len(ahead) > len(steps) / 2


def test_with_no_candidates_the_verifier_decodes_on(simulate: Simulate) -> None:
    target = hash_logits(VOCAB_SIZE, 1)
    simulation = simulate(target, hopeless(target), growth="chain:4+20", max_tokens=60, rtt_s=0.5)
    answer = simulation.answers["s"]
    passes = [busy for busy in simulation.busy if busy.kind == "verify"]
    assert simulation.busy_share("verify", passes[0].start_s, passes[-1].end_s) > 0.9999
    assert set(answer.sources) == {"plain"}


def test_c070_the_first_token_does_not_wait_for_the_drafter(simulate: Simulate) -> None:
    target = hash_logits(VOCAB_SIZE, 1)
    times = Times(rtt_s=0.086, verify_s=0.034, prefill_token_s=0.003, draft_prefill_token_s=0.02)
    simulation = simulate(target, target, prompt=[1] * 101, times=times, growth="chain:2+14", max_tokens=150)
    answer = simulation.answers["s"]
    link_s = 2 * times.rtt_s / 4  # the request goes one leg, the text comes back over it
    assert answer.token_times[0] == pytest.approx(100 * times.prefill_token_s + times.verify_s + link_s, abs=1e-6)
    assert any(source == "draft" for source in answer.sources)


def test_a_long_prompt_is_prefilled_between_the_passes_of_others(simulate: Simulate) -> None:
    """Session `s` streams while another's 2,000-token prompt comes in: no gap longer than a chunk and two passes."""
    target = hash_logits(VOCAB_SIZE, 1)
    times = Times(rtt_s=0.0, verify_s=0.03, prefill_token_s=0.001)

    def other(simulation: Simulation) -> None:
        simulation.open(OpenSession(session="long", prompt_ids=(1,) * 2000, max_tokens=5), at_s=0.3)

    simulation = simulate(target, hopeless(target), max_tokens=100, times=times, prepare=other)
    stream = simulation.answers["s"].token_times
    chunk_s = simulation.verify.prefill_chunk * times.prefill_token_s
    gaps = [b - a for a, b in itertools.pairwise(stream)]
    assert max(gaps) <= chunk_s + 2 * times.verify_s + 1e-9
    assert simulation.answers["long"].finish_reason == "length"


def test_two_data_frames_make_a_synchronous_round(simulate: Simulate) -> None:
    target = hash_logits(VOCAB_SIZE, 1)
    simulation = simulate(target, agreeing(target, 0.7), growth="chain:4", patience_s=5.0, max_tokens=200)
    done = simulation.answers["s"].done
    assert done is not None
    frames = simulation.num_frames
    assert frames["draft>relay"] == done.report["rounds"]
    # One Prefix, one acceptance a pass except the last, which ends the session instead.
    assert frames["relay>draft"] - 3 <= done.report["passes"] <= frames["relay>draft"]
