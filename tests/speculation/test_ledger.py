"""The parts of a round add up to it, and what they miss is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculation.ledger import PARTS, Ledger, Round, network_cap, round_rate
from wire.messages import RoundTiming


def answered(*, lost_s: float = 0.0, at: float = 1000.0, verify_s: float = 0.034) -> Round:
    """A round over an 86 ms round trip, 40 ms of it on the draft node's hop, with each part of its own size.

    `lost_s` passes somewhere that nobody measures.
    """
    timing = RoundTiming(frame=3, relay_s=0.0005, queue_s=0.007, verify_s=verify_s, overhead_s=0.002)
    sent_at = at + 0.025 + 0.001
    received_at = sent_at + 0.086 + 0.0005 + 0.007 + verify_s + 0.002 + 0.0003 + lost_s
    return Round(
        started_at=at,
        sent_at=sent_at,
        received_at=received_at,
        applied_at=received_at + 0.0002,
        draft_s=0.025,
        timing=timing,
        relay_down_s=0.0003,
        draft_hop_rtt_s=0.040,
        verify_hop_rtt_s=0.046,
    )


EXPECTED_MS = [25, 1, 20, 0.5, 23, 7, 34, 2, 23, 0.3, 20, 0.2, 0]


def test_each_part_gets_its_own_time() -> None:
    parts = answered().parts_s()
    assert list(parts) == list(PARTS)
    assert [value * 1e3 for value in parts.values()] == pytest.approx(EXPECTED_MS, abs=1e-6)


def test_time_that_nobody_measures_is_unaccounted() -> None:
    parts = answered(lost_s=0.011).parts_s()
    assert parts["unaccounted"] == pytest.approx(0.011, abs=1e-9)
    others = {name: value for name, value in answered().parts_s().items() if name != "unaccounted"}
    assert {name: parts[name] for name in others} == pytest.approx(others, abs=1e-9)


def test_skewed_clocks_do_not_matter() -> None:
    assert answered(at=-5e3).parts_s() == pytest.approx(answered(at=7e4).parts_s(), abs=1e-9)


durations = st.floats(0, 10)


@given(st.lists(durations, min_size=12, max_size=12))
def test_the_parts_add_up_to_the_round_whatever_was_measured(values: list[float]) -> None:
    draft, overhead, flight, apply, relay_up, queue, verify, around, relay_down, rtt, other_rtt, at = values
    finished = Round(
        started_at=at,
        sent_at=at + draft + overhead,
        received_at=at + draft + overhead + flight,
        applied_at=at + draft + overhead + flight + apply,
        draft_s=draft,
        timing=RoundTiming(frame=0, relay_s=relay_up, queue_s=queue, verify_s=verify, overhead_s=around),
        relay_down_s=relay_down,
        draft_hop_rtt_s=rtt,
        verify_hop_rtt_s=other_rtt,
    )
    parts = finished.parts_s()
    assert sum(parts.values()) == pytest.approx(finished.total_s, abs=1e-9)
    assert finished.total_s == pytest.approx(draft + overhead + flight + apply, abs=1e-9)
    # What the parts do not explain of the flight, no more and no less; negative when they claim more than there was.
    explained = relay_up + queue + verify + around + relay_down + rtt + other_rtt
    assert parts["unaccounted"] == pytest.approx(flight - explained, abs=1e-9)


def test_a_ledger_has_means_medians_and_shares() -> None:
    ledger = Ledger()
    for verify_s in (0.030, 0.032, 0.100):
        ledger.add(answered(verify_s=verify_s, lost_s=0.003))
    figures = ledger.figures()
    assert figures["rounds"] == 3
    assert figures["verify compute, ms"] == 54
    assert figures["round, ms"] == pytest.approx(122 + 54 + 3, abs=1e-3)
    assert figures["unaccounted share"] == pytest.approx(3 / 179, abs=1e-5)
    assert ledger.unaccounted_share == pytest.approx(3 / 179)
    rows = {line[:28].strip(): line[28:].split() for line in ledger.format_table().splitlines()}
    assert rows["verify compute"] == ["54.00", "32.00", "30.2%"]
    assert rows["unaccounted"] == ["3.00", "3.00", "1.7%"]
    assert rows["3 rounds"] == ["179.00", "157.00", "100.0%"]
    assert list(rows)[1:-1] == list(PARTS)


def test_the_unaccounted_share_is_over_time_not_a_mean_of_shares() -> None:
    ledger = Ledger()
    ledger.add(answered(lost_s=0.0))
    ledger.add(answered(lost_s=1.0))
    assert ledger.unaccounted_share == pytest.approx(1 / (1 + 2 * 0.156))


def test_an_empty_ledger_says_so() -> None:
    ledger = Ledger()
    assert ledger.figures() == {"rounds": 0}
    assert ledger.unaccounted_share == 0
    assert "no round" in ledger.format_table()


def test_the_first_measured_pipeline_adds_up() -> None:
    """86 ms round trip, 25 ms of drafting, 34 ms of verifying, 4.07 tokens a round: 28.10 tokens/s were measured."""
    timing = RoundTiming(frame=0, relay_s=0, queue_s=0, verify_s=0.034, overhead_s=0)
    one = Round(
        started_at=0,
        sent_at=0.025,
        received_at=0.145,
        applied_at=0.145,
        draft_s=0.025,
        timing=timing,
        relay_down_s=0,
        draft_hop_rtt_s=0.086,
        verify_hop_rtt_s=0,
    )
    assert one.total_s == pytest.approx(0.145)
    assert one.parts_s()["unaccounted"] == pytest.approx(0, abs=1e-12)
    assert round_rate(tokens_per_round=4.07, round_s=one.total_s) == pytest.approx(28.10, rel=2e-3)
    cap = network_cap(tokens_per_round=4.07, rtt_s=0.086)
    assert cap == pytest.approx(47.3, abs=0.05)
    assert 28.10 / cap == pytest.approx(0.59, abs=5e-3)


def test_a_round_that_takes_no_time_has_no_rate() -> None:
    with pytest.raises(ValueError, match="round_s must be positive, got 0"):
        round_rate(tokens_per_round=4.0, round_s=0.0)
