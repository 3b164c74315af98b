"""Traces are joined by session, parts add up, and every moment is on the path once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.ledger import Round
from speculation.stats import SessionStats
from speculation.trace_join import Joined, round_parts_s
from wire.messages import RoundTiming

durations = st.floats(0, 0.2)


def traced(
    session: str = "a", *, at: float = 0.0, flight: float = 0.1, frame: int = 0, **known: float
) -> dict[str, Any]:
    """A round of 20 ms drafting and `flight` until its answer, of which 80 ms are named."""
    given_s = {"draft_s": 0.018, "verify_s": 0.034, "queue_s": 0.004, "rtt": 0.020} | known
    finished = Round(
        started_at=at, sent_at=at + 0.020, received_at=at + 0.020 + flight, applied_at=at + 0.021 + flight,
        draft_s=given_s["draft_s"], relay_down_s=0.001, draft_hop_rtt_s=given_s["rtt"], verify_hop_rtt_s=given_s["rtt"],
        timing=RoundTiming(frame=frame, relay_s=0.001, queue_s=given_s["queue_s"], verify_s=given_s["verify_s"],
                           overhead_s=0.0),
    )  # fmt: skip
    return {"event": "round", "now": finished.applied_at, "session": session, **asdict(finished)}


def passed(session: str = "a", *, began: float, now: float, tokens: int, rows: int = 4) -> dict[str, Any]:
    return {
        "event": "verify", "session": session, "began": began, "now": now, "num_tokens": tokens, "num_rows": rows
    }  # fmt: skip


@given(durations, durations, durations, durations)
def test_parts_are_those_of_the_ledger(at: float, flight: float, verify_s: float, rtt: float) -> None:
    event = traced(at=at, flight=flight, verify_s=verify_s, rtt=rtt)
    fields = {name: value for name, value in event.items() if name not in ("event", "now", "session", "timing")}
    expected = Round(**fields, timing=RoundTiming(**event["timing"])).parts_s()
    assert round_parts_s(event) == pytest.approx(list(expected.values()))


def test_rounds_one_after_another_are_all_on_the_path() -> None:
    joined = Joined()
    for at in (0.0, 0.2, 0.4):
        joined.add("draft", traced(at=at))
    found = joined.figures()
    assert found["sum_s"] == pytest.approx(3 * 0.121)
    assert found["path_s"] == pytest.approx(found["sum_s"])
    assert found["overlapped_s"] == pytest.approx(0)
    assert found["no_round_on_the_path_s"] == pytest.approx(2 * (0.2 - 0.121))


def test_the_overlapped_part_of_a_round_is_not_on_the_path() -> None:
    joined = Joined()
    joined.add("draft", traced(at=0.0))
    joined.add("draft", traced(at=0.1))
    found = joined.figures()
    assert found["path_s"] == pytest.approx(0.221)
    assert found["overlapped_s"] == pytest.approx(0.021)
    # The second round was drafted within the first, so of drafting only the first is on the path.
    assert found["parts"]["draft compute"]["path_s"] == pytest.approx(0.018)
    assert found["parts"]["draft compute"]["sum_s"] == pytest.approx(0.036)


@given(st.lists(st.tuples(durations, durations), min_size=1, max_size=20))
def test_every_moment_is_on_the_path_once(steps: list[tuple[float, float]]) -> None:
    joined, at, covered, last = Joined(), 0.0, 0.0, float("-inf")
    rounds = []
    for step, flight in steps:
        at += step
        rounds.append(traced(at=at, flight=flight))
    for event in sorted(rounds, key=lambda event: event["applied_at"]):
        joined.add("draft", event)
        covered += max(0.0, event["applied_at"] - max(event["started_at"], last))
        last = max(last, event["applied_at"])
    assert sum(joined.path_s) == pytest.approx(covered)
    assert sum(joined.path_s) <= sum(joined.totals) + 1e-9


def test_clocks_of_different_processes_are_never_compared() -> None:
    first, second = Joined(), Joined()
    for joined, skew in ((first, 0.0), (second, 1e6)):
        joined.add("draft", traced(at=5.0))
        joined.add("verify", passed(began=skew, now=skew + 2, tokens=8))
    assert first.figures()["identity"] == pytest.approx(second.figures()["identity"])
    assert first.figures()["parts"] == second.figures()["parts"]


def test_the_identity_holds_on_the_same_passes_and_a_foreign_figure_is_named() -> None:
    joined = Joined()
    for n in range(4):
        joined.add("verify", passed(began=n * 0.1, now=n * 0.1 + 0.1, tokens=3))
    measured = joined.identity()
    assert measured["tokens_per_s"] == pytest.approx(measured["tokens_per_round"] / measured["round_s"]) == 30
    assert joined.check_claims(tokens_per_s=30.0) == []
    (warning,) = joined.check_claims(tokens_per_s=36.0)
    assert "taken from another run" in warning


def test_a_baseline_on_the_same_nodes_is_another_run() -> None:
    joined = Joined()
    for n in range(4):
        joined.add("verify", passed("with", began=n * 0.1, now=n * 0.1 + 0.1, tokens=3))
        joined.add("verify", passed("alone", began=n * 0.05, now=n * 0.05 + 0.05, tokens=1, rows=1))
    for name, source, num in (("with", "draft", 11), ("alone", "plain", 4)):
        report = {"passes": 4, "rounds": 4, f"tokens_{source}": num}
        joined.add("verify", {"event": "session_ended", "session": name, "report": report})
    found = joined.figures()
    # The stop cut one of the last pass's three tokens off.
    assert found["identity"] == pytest.approx(
        {"sessions": 1, "tokens_per_s": 11 / 0.4, "tokens_per_round": 11 / 4, "round_s": 0.1}
    )
    assert found["identity_target_alone"]["tokens_per_s"] == pytest.approx(20)
    assert found["tokens_by_source"] == {"draft": 11}
    assert found["warnings"] == []
    assert joined.check_claims(tokens_per_s=11 / 0.4) == []
    assert joined.check_claims(tokens_per_s=20) != []


def test_tokens_with_a_source_that_no_pass_committed_are_noticed() -> None:
    joined = Joined()
    joined.add("verify", passed(began=0, now=1, tokens=2))
    report = {"passes": 1, "rounds": 1, "tokens_draft": 3}
    joined.add("verify", {"event": "session_ended", "session": "a", "report": report})
    assert joined.warnings() == ["session a: 3 tokens have a source, its passes in the trace have 2"]


def test_only_the_named_session_counts() -> None:
    joined = Joined(only="a")
    for name in ("a", "b"):
        joined.add("draft", traced(name))
        joined.add("verify", passed(name, began=0, now=1, tokens=2))
    found = joined.figures()
    assert (found["rounds"], list(found["by_session"])) == (1, ["a"])


def test_traces_of_different_runs_are_noticed() -> None:
    joined = Joined()
    joined.add("draft", traced("a", flight=0.079))
    joined.add("verify", passed("b", began=0, now=1, tokens=2))
    joined.add("verify", {"event": "session_ended", "session": "b", "report": {"passes": 7, "rounds": 1}})
    joined.add("relay", {"event": "session_ended", "session": "b", "now": 1})
    joined.add("draft", {"event": "dropped", "num_events": 5})
    text = "\n".join(joined.warnings())
    assert "1 drafted sessions are unknown to the verify trace" in text
    assert "1 sessions are unknown to the relay trace" in text
    assert "closing record has 7 passes, the trace 1" in text
    assert "5 events were dropped" in text


def test_time_without_a_name_is_a_warning() -> None:
    joined = Joined()
    joined.add("draft", traced(flight=0.081))
    assert joined.warnings() == []
    joined.add("draft", traced(flight=0.2))
    assert any("unaccounted, more than 2 %" in text for text in joined.warnings())


def test_tokens_and_acceptance_come_from_the_closing_records() -> None:
    joined = Joined()
    for name, rate, rounds in (("a", 0.5, 10), ("b", 1.0, 30)):
        report = {
            "passes": 1, "rounds": rounds, "tokens_draft": 4, "tokens_plain": 2, "acceptance_at_1": rate,
            "proposed_at_1": rounds,
        }  # fmt: skip
        joined.add("verify", {"event": "session_ended", "session": name, "report": report})
    found = joined.figures()
    assert found["tokens_by_source"] == {"draft": 8, "plain": 4}
    assert found["acceptance_by_position"] == {1: pytest.approx(0.875)}
    assert found["parts"] == {}


def test_c076_over_sessions_a_place_is_weighed_by_the_rounds_that_proposed_it() -> None:
    joined, total = Joined(), SessionStats()
    # (proposed depth, accepted) of each round: the long session reached place 2 once, the short one always.
    for name, rounds in (("long", [(1, 1)] * 9 + [(2, 2)]), ("short", [(2, 1), (2, 0)])):
        stats = SessionStats()
        for depth, num_accepted in rounds:
            stats.on_pass(proposed_depth=depth, num_accepted=num_accepted, num_rows=depth + 1, cut=False)
        total.merge(stats)
        joined.add("verify", {"event": "session_ended", "session": name, "report": stats.report()})
    found = joined.figures()["acceptance_by_position"]
    assert found == pytest.approx({1: 11 / 12, 2: 1 / 3})
    assert found == pytest.approx({place: total.rate_at(place) for place in (1, 2)})
