"""A round as the relay sees it go by: every part in its place, and nothing invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.api_rounds import MAX_ROUNDS, MAX_WAITING, PARTS, RoundWatch
from speculation.ledger import PARTS as LEDGER_PARTS
from speculation.ledger import Round
from wire.codec import append_residence, encode
from wire.messages import Acceptance, AppliedRound, Candidates, RoundTiming

durations = st.floats(0.0, 0.5)


def candidates(frame: int = 0, *applied: AppliedRound, draft_s: float = 0.01, overhead_s: float = 0.002) -> bytes:
    return encode(
        Candidates(
            session="s", epoch=1, frame=frame, first_node=2 * frame, parents=(-5, 2 * frame), tokens=(1, 2),
            scores=(0, 0), draft_s=draft_s, overhead_s=overhead_s, applied=applied,
        )
    )  # fmt: skip


def acceptance(*timings: RoundTiming, hop_rtt_s: float = 0.02, epoch: int = 1) -> bytes:
    frame = encode(
        Acceptance(
            session="s", epoch=epoch, start=5, tokens=(1, 9), num_accepted=1, rounds=timings, hop_rtt_s=hop_rtt_s
        )
    )
    return append_residence(frame, 0.001)


def timing(frame: int, relay_s: float = 0.001, queue_s: float = 0.005, verify_s: float = 0.03) -> RoundTiming:
    return RoundTiming(frame=frame, relay_s=relay_s, queue_s=queue_s, verify_s=verify_s, overhead_s=0.004)


def applied(frame: int, *, relay_s: float = 0.003, apply_s: float = 0.006, round_s: float = 0.143) -> AppliedRound:
    return AppliedRound(frame=frame, relay_s=relay_s, apply_s=apply_s, round_s=round_s)


def go_through(watch: RoundWatch, *frames: int) -> None:
    """These frames are sent, answered and applied, one after the other."""
    for frame in frames:
        watch.on_frame("candidates", candidates(frame), 0.0, 0.0)
        watch.on_frame("acceptance", acceptance(timing(frame)), 1.0, 0.0)
        watch.on_frame("candidates", candidates(10_000 + frame, applied(frame)), 2.0, 0.0)


def test_the_parts_are_those_of_the_ledger() -> None:
    assert PARTS == LEDGER_PARTS


def test_each_part_has_its_place_on_the_relays_clock() -> None:
    watch = RoundWatch()
    watch.on_frame("candidates", candidates(), 100.0, 0.06)
    watch.on_frame("acceptance", acceptance(timing(0)), 100.062, 0.06)
    assert watch.since(0) == [], "how it ended is not known yet"
    watch.on_frame("candidates", candidates(1, applied(0)), 100.2, 0.08)
    (seen,) = watch.rounds
    assert seen.started_at == pytest.approx(100.0 - 0.03 - 0.012)
    assert dict(zip(PARTS, seen.parts_s, strict=True)) == pytest.approx(
        {
            "draft compute": 0.010, "draft overhead": 0.002, "wire up, draft to relay": 0.030,
            "relay residence, up": 0.001, "wire up, relay to verify": 0.010, "queue at the verifier": 0.005,
            "verify compute": 0.030, "verify overhead": 0.004, "wire down, verify to relay": 0.010,
            "relay residence, down": 0.003, "wire down, relay to draft": 0.030, "apply": 0.006, "unaccounted": 0.002,
        }
    )  # fmt: skip
    assert seen.round_s == 0.143
    assert (seen.num_candidates, seen.num_tokens, seen.num_accepted) == (2, 2, 1)


@given(data=st.tuples(*[durations] * 10), passed_at=st.floats(0.0, 1e6))
def test_the_parts_are_the_ledgers_and_add_up_to_the_round(data: tuple[float, ...], passed_at: float) -> None:
    draft_s, overhead_s, relay_s, queue_s, verify_s, hop_rtt_s, draft_rtt_s, down_s, apply_s, waited_s = data
    sent_at = draft_s + overhead_s
    ledger = Round(
        started_at=0.0, sent_at=sent_at, received_at=sent_at + waited_s, applied_at=sent_at + waited_s + apply_s,
        draft_s=draft_s, timing=timing(0, relay_s, queue_s, verify_s), relay_down_s=down_s,
        draft_hop_rtt_s=draft_rtt_s, verify_hop_rtt_s=hop_rtt_s,
    )  # fmt: skip
    watch = RoundWatch()
    watch.on_frame("candidates", candidates(0, draft_s=draft_s, overhead_s=overhead_s), passed_at, draft_rtt_s)
    watch.on_frame("acceptance", acceptance(ledger.timing, hop_rtt_s=hop_rtt_s), passed_at + 1, 7.0)
    over = applied(0, relay_s=down_s, apply_s=apply_s, round_s=ledger.total_s)
    watch.on_frame("candidates", candidates(1, over), passed_at + 2, 7.0)
    (seen,) = watch.rounds
    assert dict(zip(PARTS, seen.parts_s, strict=True)) == pytest.approx(ledger.parts_s(), abs=1e-9)
    assert sum(seen.parts_s) == pytest.approx(seen.round_s, abs=1e-9)
    shown = seen.as_json()
    # Each is rounded to a thousandth.
    assert sum(shown["parts_ms"]) == pytest.approx(shown["round_ms"], abs=0.0005 * (len(PARTS) + 1) + 1e-9)


def test_frames_are_answered_in_any_order_and_once() -> None:
    watch = RoundWatch()
    for frame in range(3):
        watch.on_frame("candidates", candidates(frame), float(frame), 0.0)
    watch.on_frame("acceptance", acceptance(timing(2, verify_s=0.02)), 4.0, 0.0)
    watch.on_frame("acceptance", acceptance(timing(0), timing(2)), 5.0, 0.0)
    watch.on_frame("acceptance", acceptance(timing(1), epoch=2), 6.0, 0.0)
    watch.on_frame("acceptance", acceptance(timing(7)), 7.0, 0.0)
    watch.on_frame("text_delta", b"{}", 8.0, 0.0)
    watch.on_frame("candidates", candidates(3, applied(2), applied(0), applied(1), applied(7)), 9.0, 0.0)
    watch.on_frame("candidates", candidates(4, applied(2)), 9.0, 0.0)
    assert [seen.frame for seen in watch.rounds] == [2, 0], "1 was answered in another epoch, 7 never sent"
    assert watch.rounds[0].parts_s[PARTS.index("verify compute")] == 0.02, "its first answer counts"


def test_a_viewer_gets_each_round_once_and_memory_is_bounded() -> None:
    watch = RoundWatch()
    go_through(watch, 0, 1, 2)
    assert [seen.frame for seen in watch.since(0)] == [0, 1, 2]
    assert [seen.frame for seen in watch.since(2)] == [2]
    assert watch.since(3) == []
    go_through(watch, *range(3, 3 + 3 * MAX_ROUNDS))
    assert len(watch.rounds) == len(watch.since(0)) == MAX_ROUNDS
    for frame in range(1000, 1000 + 2 * MAX_WAITING):
        watch.on_frame("candidates", candidates(frame), 0.0, 0.0)
    assert len(watch._open) == MAX_WAITING
    watch.on_frame("acceptance", acceptance(timing(1000)), 1.0, 0.0)
    watch.on_frame("candidates", candidates(9999, applied(1000)), 1.0, 0.0)
    assert watch.rounds[-1].frame != 1000, "too old to be waited for"
