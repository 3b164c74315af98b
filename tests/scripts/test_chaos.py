"""Small worlds in which everything goes wrong; `scripts/chaos.py` runs large ones."""

from __future__ import annotations

from typing import Any

import pytest

from relay.stream import Stream
from scripts.chaos import faults_of
from scripts.chaos_answers import Expected, Got, Question
from scripts.chaos_virtual import Shape, run_world
from wire.messages import OpenSession
from wire.sampling import Sampling

BAD = Shape(num_sessions=60, arrive_s=20.0, num_clients=6, num_verify=3, num_draft=2, num_slots=8, event_every_s=0.4)


def test_c036_c040_whatever_goes_wrong_no_token_is_lost_or_doubled() -> None:
    total: dict[str, int] = {}
    for seed in (1, 2, 3):
        figures = run_world(seed, BAD)
        assert not faults_of(figures), f"seed {seed}: {figures}"
        for name, count in (figures["events"] | figures["at the relays"] | figures["outcomes"]).items():
            total[name] = total.get(name, 0) + count
    # What is said to go wrong does, and most answers come all the same.
    assert total["finished"] > 80
    assert min(total["moved"], total["resumed"], total["kill relay"], total["kill verify"], total["silence"]) > 0


def test_a_seed_is_a_run() -> None:
    first, again, other = run_world(5, BAD), run_world(5, BAD), run_world(6, BAD)
    assert first == again
    assert first["digest"] != other["digest"]


def test_a_client_that_loses_a_token_when_it_comes_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    reopen = Stream.reopen

    def forgetful(self: Stream) -> OpenSession:
        del self.tokens[-1:]
        return reopen(self)

    monkeypatch.setattr(Stream, "reopen", forgetful)
    assert "not their reference" in faults_of(run_world(2, BAD))


QUESTION = Question("q", (1,), Sampling(), 3)
EXPECTED = Expected((5, 6, 7), "abc", "length")


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (Got([5, 6, 7], "abc", "length", "finished"), ""),
        (Got([5, 6], "ab", "", "error: verify_lost"), ""),
        (Got([5, 6], "ab", "", "error: gap"), "not an error that a missing part explains"),
        (Got([5, 6, 6, 7], "abbc", "length", "finished"), "other tokens"),
        (Got([5, 6, 7], "abcc", "length", "finished"), "text"),
        (Got([5, 6], "ab", "length", "finished"), "only 2 of 3 tokens"),
        (Got([5, 6, 7], "abc", "stop", "finished"), "ended by 'stop' instead of 'length'"),
        (Got([5], "a", "", ""), "no end"),
        (Got([5], "a", "cancelled", "cancelled"), "cancelled by nobody"),
    ],
)
def test_the_verdict_on_an_answer(got: Got, wrong: str) -> None:
    verdict = got.judge(QUESTION, EXPECTED)
    assert verdict.startswith(wrong)
    assert bool(verdict) == bool(wrong)


def figures(**changes: Any) -> dict[str, Any]:
    return {"sessions": 2, "ended": 2, "num_wrong": 0, "died": [], "left": {"sessions": 0}} | changes


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"num_wrong": 1}, "not their reference"),
        ({"ended": 1}, "without an end"),
        ({"hung": 1}, "without an end"),
        ({"died": ["verify 3"]}, "died and were not killed"),
        ({"left": {"sessions": 1}}, "left behind"),
    ],
)
def test_every_kind_of_loss_is_a_fault_of_the_run(changes: dict[str, Any], fault: str) -> None:
    assert fault in faults_of(figures(**changes))
    assert bool(faults_of(figures(**changes))) == bool(fault)
