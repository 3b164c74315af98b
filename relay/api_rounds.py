"""The rounds of one session as the relay sees them go by, on the relay's own clock. Pure: frames and times in.

A round is one frame of candidates. The relay knows when that frame and the acceptance that answers it passed; the
frames say how long each node took; half of a node's round trip is one way. From that every part has a place on one time
axis, laid end to end as in `speculation/ledger.py`. What the parts do not add up to is *unaccounted*. The last relay
residence and the drafter's applying are after the relay's part and are left out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

from wire.codec import decode
from wire.messages import Acceptance, Candidates

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
    "unaccounted",
    "wire down, relay to draft",
)
MAX_WAITING = 64
MAX_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class SeenRound:
    """One round: when its drafting began, on the relay's clock, and its parts in seconds by the names of PARTS.

    "unaccounted" is what lies between the moment by which the parts before it would have brought the acceptance to the
    relay and the moment when it came; it is negative where they exceed that.
    """

    frame: int
    started_at: float
    parts_s: tuple[float, ...]
    num_candidates: int
    num_tokens: int
    num_accepted: int

    def as_json(self) -> dict[str, Any]:
        """For the status page; times in milliseconds."""
        return {
            "frame": self.frame,
            "start_ms": round(self.started_at * 1e3, 3),
            "parts_ms": [round(part * 1e3, 3) for part in self.parts_s],
            "candidates": self.num_candidates,
            "tokens": self.num_tokens,
            "accepted": self.num_accepted,
        }


class RoundWatch:
    """Pairs the frames of one session with the acceptances that answer them."""

    def __init__(self) -> None:
        self.rounds: deque[SeenRound] = deque(maxlen=MAX_ROUNDS)
        self.num_seen = 0
        self._waiting: OrderedDict[tuple[int, int], tuple[float, Candidates]] = OrderedDict()

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
            self._waiting[message.epoch, message.frame] = (now, message)
            while len(self._waiting) > MAX_WAITING:
                self._waiting.popitem(last=False)
        elif kind == Acceptance.type:
            acceptance = decode(frame)
            assert isinstance(acceptance, Acceptance), "the relay knows the type"
            for timing in acceptance.rounds:
                seen = self._waiting.pop((acceptance.epoch, timing.frame), None)
                if seen is not None:
                    self._finish(*seen, acceptance, now, draft_rtt_s)

    def since(self, num_seen: int) -> list[SeenRound]:
        """The rounds finished after the first `num_seen`, those that are still kept."""
        missing = self.num_seen - num_seen
        return list(self.rounds)[-missing:] if missing > 0 else []

    def _finish(
        self, passed_at: float, sent: Candidates, acceptance: Acceptance, now: float, draft_rtt_s: float
    ) -> None:
        timing = next(each for each in acceptance.rounds if each.frame == sent.frame)
        hop_s = acceptance.hop_rtt_s / 2
        after = (timing.relay_s, hop_s, timing.queue_s, timing.verify_s, timing.overhead_s, hop_s)
        unaccounted_s = now - passed_at - sum(after)
        parts = (sent.draft_s, sent.overhead_s, draft_rtt_s / 2, *after, unaccounted_s, draft_rtt_s / 2)
        self.rounds.append(
            SeenRound(
                frame=sent.frame,
                started_at=passed_at - sum(parts[:3]),
                parts_s=parts,
                num_candidates=len(sent.tokens),
                num_tokens=len(acceptance.tokens),
                num_accepted=acceptance.num_accepted,
            )
        )
        self.num_seen += 1
