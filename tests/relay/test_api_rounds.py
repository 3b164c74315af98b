"""A round as the relay sees it go by: every part in its place, and nothing invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.api_rounds import MAX_ROUNDS, MAX_WAITING, PARTS, RoundWatch
from speculation.ledger import PARTS as LEDGER_PARTS
from wire.codec import append_residence, encode
from wire.messages import Acceptance, Candidates, RoundTiming

durations = st.floats(0.0, 0.5)


def candidates(frame: int = 0, draft_s: float = 0.01, overhead_s: float = 0.002) -> bytes:
    return encode(
        Candidates(
            session="s", epoch=1, frame=frame, first_node=2 * frame, parents=(-5, 2 * frame), tokens=(1, 2),
            scores=(0, 0), draft_s=draft_s, overhead_s=overhead_s,
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


def test_the_parts_are_those_of_the_ledger() -> None:
    assert set(PARTS) == set(LEDGER_PARTS) - {"relay residence, down", "apply"}


def test_each_part_has_its_place_on_the_relays_clock() -> None:
    watch = RoundWatch()
    watch.on_frame("candidates", candidates(), 100.0, 0.06)
    # 1 + 10 + 5 + 30 + 4 + 10 ms after the candidates passed, and 2 ms that nobody measured.
    watch.on_frame("acceptance", acceptance(timing(0)), 100.062, 0.06)
    (seen,) = watch.rounds
    assert seen.started_at == pytest.approx(100.0 - 0.03 - 0.012)
    assert dict(zip(PARTS, seen.parts_s, strict=True)) == pytest.approx(
        {
            "draft compute": 0.010, "draft overhead": 0.002, "wire up, draft to relay": 0.030,
            "relay residence, up": 0.001, "wire up, relay to verify": 0.010, "queue at the verifier": 0.005,
            "verify compute": 0.030, "verify overhead": 0.004, "wire down, verify to relay": 0.010,
            "unaccounted": 0.002, "wire down, relay to draft": 0.030,
        }
    )  # fmt: skip
    assert (seen.num_candidates, seen.num_tokens, seen.num_accepted) == (2, 2, 1)


@given(data=st.tuples(*[durations] * 8))
def test_the_parts_add_up_to_the_round(data: tuple[float, ...]) -> None:
    draft_s, overhead_s, relay_s, queue_s, verify_s, hop_rtt_s, draft_rtt_s, waited_s = data
    watch = RoundWatch()
    watch.on_frame("candidates", candidates(0, draft_s, overhead_s), 50.0, draft_rtt_s)
    answer = acceptance(timing(0, relay_s, queue_s, verify_s), hop_rtt_s=hop_rtt_s)
    watch.on_frame("acceptance", answer, 50.0 + waited_s, draft_rtt_s)
    (seen,) = watch.rounds
    ended_at = 50.0 + waited_s + draft_rtt_s / 2
    assert seen.started_at + sum(seen.parts_s) == pytest.approx(ended_at, abs=1e-9)


def test_frames_are_answered_in_any_order_and_once() -> None:
    watch = RoundWatch()
    for frame in range(3):
        watch.on_frame("candidates", candidates(frame), float(frame), 0.0)
    watch.on_frame("acceptance", acceptance(timing(2)), 4.0, 0.0)
    watch.on_frame("acceptance", acceptance(timing(0), timing(2)), 5.0, 0.0)
    watch.on_frame("acceptance", acceptance(timing(1), epoch=2), 6.0, 0.0)
    watch.on_frame("acceptance", acceptance(timing(7)), 7.0, 0.0)
    watch.on_frame("text_delta", b"{}", 8.0, 0.0)
    assert [seen.frame for seen in watch.rounds] == [2, 0]


def test_a_viewer_gets_each_round_once_and_memory_is_bounded() -> None:
    watch = RoundWatch()
    for frame in range(3):
        watch.on_frame("candidates", candidates(frame), 0.0, 0.0)
        watch.on_frame("acceptance", acceptance(timing(frame)), 1.0, 0.0)
    assert [seen.frame for seen in watch.since(0)] == [0, 1, 2]
    assert [seen.frame for seen in watch.since(2)] == [2]
    assert watch.since(3) == []
    for frame in range(3, 3 + 3 * MAX_ROUNDS):
        watch.on_frame("candidates", candidates(frame), 0.0, 0.0)
        watch.on_frame("acceptance", acceptance(timing(frame)), 1.0, 0.0)
    assert len(watch.rounds) == len(watch.since(0)) == MAX_ROUNDS
    for frame in range(1000, 1000 + 2 * MAX_WAITING):
        watch.on_frame("candidates", candidates(frame), 0.0, 0.0)
    watch.on_frame("acceptance", acceptance(timing(1000)), 1.0, 0.0)
    assert watch.rounds[-1].frame != 1000, "too old to be waited for"
