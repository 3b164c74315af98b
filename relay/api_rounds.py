"""The rounds of one session as the relay sees them go by. Pure: frames and times in.

A round is one frame of candidates: from the start of its drafting until the acceptance that answered it has been
applied, as in `speculation/ledger.py`, with the same parts in the same order. Three frames tell of it: the candidates
themselves, the acceptance, and the next candidates, which say how the round ended at the draft node. So the whole round
is that node's own measure, and what the parts do not add up to is *unaccounted*. Only the round's place on the time
axis is the relay's clock. A session's last rounds have no candidates after them, and are not shown.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from wire.codec import decode
from wire.messages import Acceptance, AppliedRound, Candidates, RoundTiming

PARTS = (
    "draft compute",
    "draft overhead",
    "wire up, draft to relay",
    "relay residence, up",
    "wire up, relay to verify",
    "queue at the verifier",
    "verify compute",
    "verify overhead",
    "wire down, verify to relay",
    "relay residence, down",
    "wire down, relay to draft",
    "apply",
    "unaccounted",
)
MAX_WAITING = 64
MAX_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class SeenRound:
    """One round: when its drafting began, on the relay's clock, and its parts in seconds by the names of PARTS.

    They add up to `round_s`, which the draft node has measured, because of the last; that is negative where the
    others exceed it.
    """

    frame: int
    started_at: float
    round_s: float
    parts_s: tuple[float, ...]
    num_candidates: int
    num_tokens: int
    num_accepted: int

    def as_json(self) -> dict[str, Any]:
        """For the status page; times in milliseconds."""
        return {
            "frame": self.frame,
            "start_ms": round(self.started_at * 1e3, 3),
            "round_ms": round(self.round_s * 1e3, 3),
            "parts_ms": [round(part * 1e3, 3) for part in self.parts_s],
            "candidates": self.num_candidates,
            "tokens": self.num_tokens,
            "accepted": self.num_accepted,
        }


@dataclass(slots=True)
class _OpenRound:
    """A frame that has passed, and what is known of its answer so far."""

    passed_at: float
    draft_rtt_s: float
    sent: Candidates
    timing: RoundTiming | None = None
    acceptance: Acceptance | None = None


class RoundWatch:
    """Puts the rounds of one session together from its frames."""

    def __init__(self) -> None:
        self.rounds: deque[SeenRound] = deque(maxlen=MAX_ROUNDS)
        self.num_seen = 0
        self._open: OrderedDict[tuple[int, int], _OpenRound] = OrderedDict()

    def on_frame(self, kind: str, frame: bytes, now: float, draft_rtt_s: float) -> None:
        """Take a frame that passes through the relay.

        Args:
            draft_rtt_s: the draft node's round trip to the relay.

        Raises:
            ProtocolError: it cannot be read.
        """
        if kind == Candidates.type:
            message = decode(frame)
            assert isinstance(message, Candidates), "the relay knows the type"
            for applied in message.applied:
                answered = self._open.pop((message.epoch, applied.frame), None)
                if answered is not None:
                    self._finish(answered, applied)
            self._open[message.epoch, message.frame] = _OpenRound(now, draft_rtt_s, message)
            while len(self._open) > MAX_WAITING:
                self._open.popitem(last=False)
        elif kind == Acceptance.type:
            acceptance = decode(frame)
            assert isinstance(acceptance, Acceptance), "the relay knows the type"
            for timing in acceptance.rounds:
                sent = self._open.get((acceptance.epoch, timing.frame))
                # The first answer ends the round; another one is a repetition.
                if sent is not None and sent.timing is None:
                    sent.timing, sent.acceptance = timing, acceptance

    def since(self, num_seen: int) -> list[SeenRound]:
        """The rounds finished after the first `num_seen`, those that are still kept."""
        missing = self.num_seen - num_seen
        return list(self.rounds)[-missing:] if missing > 0 else []

    def _finish(self, answered: _OpenRound, applied: AppliedRound) -> None:
        sent, timing, acceptance = answered.sent, answered.timing, answered.acceptance
        if timing is None or acceptance is None:
            return
        draft_wire_s, verify_wire_s = answered.draft_rtt_s / 2, acceptance.hop_rtt_s / 2
        parts = (
            sent.draft_s,
            sent.overhead_s,
            draft_wire_s,
            timing.relay_s,
            verify_wire_s,
            timing.queue_s,
            timing.verify_s,
            timing.overhead_s,
            verify_wire_s,
            applied.relay_s,
            draft_wire_s,
            applied.apply_s,
        )
        self.rounds.append(
            SeenRound(
                frame=sent.frame,
                started_at=answered.passed_at - sum(parts[:3]),
                round_s=applied.round_s,
                parts_s=(*parts, applied.round_s - sum(parts)),
                num_candidates=len(sent.tokens),
                num_tokens=len(acceptance.tokens),
                num_accepted=acceptance.num_accepted,
            )
        )
        self.num_seen += 1
