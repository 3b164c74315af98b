"""Acceptance statistics of a session, with each figure defined; the timing of a stream is in `relay/stream.py`.

A *round* is a pass of the target that scored at least one candidate; the other passes are *plain*. Place i is the i-th
token after the pending one. In a tree of candidates, a place is proposed once a round however many candidates it has:
the figures are those of the best path, and of a chain where the tree is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from wire.messages import SOURCES

MAX_PLACES = 16
"""Places that a report tells apart."""


@dataclass(slots=True)
class SessionStats:
    """Counts of one session, or of several added up by `merge`.

    Attributes:
        num_passes, num_rounds: all passes; those with candidates.
        num_rows: rows scored, pending tokens included.
        num_frames: frames of candidates that came.
        num_received: candidate nodes that came; of them, num_stale, num_duplicate and num_orphaned were dropped.
        num_malformed: frames of candidates that broke the protocol.
        proposed: at place i, the rounds whose longest path reached it and whose answer did not end before it.
        accepted: at place i, the rounds whose candidate there was committed.
        tokens_by_source: committed tokens by `wire.messages.SOURCES`.
    """

    num_passes: int = 0
    num_rounds: int = 0
    num_rows: int = 0
    num_frames: int = 0
    num_received: int = 0
    num_stale: int = 0
    num_duplicate: int = 0
    num_orphaned: int = 0
    num_malformed: int = 0
    proposed: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    tokens_by_source: Counter[str] = field(default_factory=Counter)

    def on_pass(
        self, *, proposed_depth: int, num_accepted: int, num_rows: int, cut: bool, sources: Sequence[str] = ()
    ) -> None:
        """Count one pass.

        Args:
            proposed_depth: length of the longest path of candidates; 0 for a plain pass.
            num_accepted: candidates committed; what a stop cut off is not among them.
            cut: the answer ended on a candidate, so places beyond the accepted ones were never judged: they count
                neither as drafted nor as rejected.
            sources: of each token committed.

        Raises:
            ValueError: more candidates were accepted than the longest path has.
        """
        if not 0 <= num_accepted <= proposed_depth:
            raise ValueError(f"num_accepted must be in 0..{proposed_depth}, got {num_accepted}")
        self.num_passes += 1
        self.num_rows += num_rows
        self.tokens_by_source.update(sources)
        if proposed_depth == 0:
            return
        self.num_rounds += 1
        judged = num_accepted if cut else proposed_depth
        for place in range(1, judged + 1):
            self.proposed[place] += 1
        for place in range(1, num_accepted + 1):
            self.accepted[place] += 1

    @property
    def num_plain(self) -> int:
        """Passes without candidates."""
        return self.num_passes - self.num_rounds

    @property
    def num_drafted(self) -> int:
        """Places proposed and judged, of all rounds."""
        return self.proposed.total()

    @property
    def num_accepted(self) -> int:
        """Candidates committed."""
        return self.accepted.total()

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens that a round commits; 1 without rounds."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted places over proposed ones; 0 without rounds."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def rate_at(self, place: int) -> float | None:
        """Share of the rounds that proposed `place` in which it was accepted; None if no round did."""
        return self.accepted[place] / self.proposed[place] if self.proposed[place] else None

    def merge(self, other: SessionStats) -> None:
        """Add another session's counts."""
        for name in ("num_passes", "num_rounds", "num_rows", "num_frames", "num_received", "num_stale", "num_duplicate",
                     "num_orphaned", "num_malformed"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.proposed.update(other.proposed)
        self.accepted.update(other.accepted)
        self.tokens_by_source.update(other.tokens_by_source)

    def report(self) -> dict[str, float]:
        """Flat figures for `Done.report`.

        passes, plain_passes, rounds, rows, drafted, accepted, acceptance_rate and mean_acceptance_length as above;
        candidate_frames; candidates_WHAT (nodes) and frames_malformed; tokens_SOURCE for each of SOURCES;
        acceptance_at_I and proposed_at_I (the rounds that it is taken over) for those of the places 1..MAX_PLACES that
        a round proposed.
        """
        figures: dict[str, float] = {
            "passes": self.num_passes,
            "plain_passes": self.num_plain,
            "rounds": self.num_rounds,
            "rows": self.num_rows,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "candidate_frames": self.num_frames,
            "candidates_received": self.num_received,
            "candidates_stale": self.num_stale,
            "candidates_duplicate": self.num_duplicate,
            "candidates_orphaned": self.num_orphaned,
            "frames_malformed": self.num_malformed,
        }
        figures |= {f"tokens_{source}": self.tokens_by_source[source] for source in SOURCES}
        for place in range(1, MAX_PLACES + 1):
            rate = self.rate_at(place)
            if rate is not None:
                figures |= {f"acceptance_at_{place}": rate, f"proposed_at_{place}": self.proposed[place]}
        return figures
