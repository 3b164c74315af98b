"""Where a round's milliseconds went.

A round is one frame of candidates: from the start of its drafting to the moment when the acceptance that first answers
it has been applied, all on the draft node's clock. The verify node and the relay contribute durations of their own
clocks, so clock skew cannot matter. The time on the wire is split by round trips that each node measures against
the relay: a frame up or down takes half of each. What the parts do not add up to is *unaccounted*.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from wire.messages import RoundTiming

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One answered frame; times and durations in seconds of the draft node's clock unless said otherwise.

    Attributes:
        started_at, sent_at: its drafting began; it went out.
        received_at, applied_at: the acceptance arrived; the tree has moved along it.
        draft_s: model time within started_at..sent_at; the rest of that stretch is draft overhead.
        timing: the verify node's durations, and the relay's on the way up.
        relay_down_s: the relay's on the way down.
        draft_hop_rtt_s, verify_hop_rtt_s: each node's round trip to the relay.
    """

    started_at: float
    sent_at: float
    received_at: float
    applied_at: float
    draft_s: float
    timing: RoundTiming
    relay_down_s: float
    draft_hop_rtt_s: float
    verify_hop_rtt_s: float

    @property
    def total_s(self) -> float:
        """The whole round."""
        return self.applied_at - self.started_at

    def parts_s(self) -> dict[str, float]:
        """Durations by the names of PARTS; they add up to `total_s` exactly, because of the last."""
        timing = self.timing
        values = [
            self.draft_s,
            self.sent_at - self.started_at - self.draft_s,
            self.draft_hop_rtt_s / 2,
            timing.relay_s,
            self.verify_hop_rtt_s / 2,
            timing.queue_s,
            timing.verify_s,
            timing.overhead_s,
            self.verify_hop_rtt_s / 2,
            self.relay_down_s,
            self.draft_hop_rtt_s / 2,
            self.applied_at - self.received_at,
        ]
        values.append(self.total_s - sum(values))
        return dict(zip(PARTS, values, strict=True))


@dataclass(slots=True)
class Ledger:
    """The parts of many rounds, in seconds.

    Attributes:
        parts: by the names of PARTS, one entry for each round.
        totals: one for each round.
    """

    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PARTS})
    totals: list[float] = field(default_factory=list)

    def add(self, finished: Round) -> None:
        """Count one round."""
        self.totals.append(finished.total_s)
        for name, value in finished.parts_s().items():
            self.parts[name].append(value)

    @property
    def num_rounds(self) -> int:
        """Rounds counted."""
        return len(self.totals)

    @property
    def unaccounted_share(self) -> float:
        """Unaccounted time over total time, of all rounds; negative when the parts exceed the whole."""
        total = sum(self.totals)
        return sum(self.parts["unaccounted"]) / total if total else 0.0

    def figures(self) -> dict[str, float]:
        """Mean milliseconds by part, the mean total, and the unaccounted share."""
        if not self.totals:
            return {"rounds": 0}
        means = {f"{name}, ms": round(statistics.fmean(values) * 1e3, 3) for name, values in self.parts.items()}
        total = {"rounds": self.num_rounds, "round, ms": round(statistics.fmean(self.totals) * 1e3, 3)}
        return total | means | {"unaccounted share": round(self.unaccounted_share, 5)}

    def format_table(self) -> str:
        """Mean, median and share of each part, for people."""
        if not self.totals:
            return "no round was answered, so there is no ledger"
        mean_total = statistics.fmean(self.totals)
        lines = [f"{'a round, ms':28}{'mean':>9}{'median':>9}{'share':>8}"]
        for name, values in self.parts.items():
            mean, median = statistics.fmean(values), statistics.median(values)
            lines.append(f"{name:28}{mean * 1e3:9.2f}{median * 1e3:9.2f}{mean / mean_total:8.1%}")
        median_total = statistics.median(self.totals)
        lines.append(f"{f'{self.num_rounds} rounds':28}{mean_total * 1e3:9.2f}{median_total * 1e3:9.2f}{1:8.1%}")
        return "\n".join(lines)


def round_rate(*, tokens_per_round: float, round_s: float) -> float:
    """Tokens per second of rounds that follow one another, both figures taken from the same rounds."""
    if round_s <= 0:
        raise ValueError(f"round_s must be positive, got {round_s}")
    return tokens_per_round / round_s


def network_cap(*, tokens_per_round: float, rtt_s: float) -> float:
    """Tokens per second with one round in flight if everything but the network were free."""
    return round_rate(tokens_per_round=tokens_per_round, round_s=rtt_s)
