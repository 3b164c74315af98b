"""The traces of one run, joined by session and frame: never by clock, since no two processes share one.

Pure: events in (`Joined.draft`, `.verify`, `.relay`), figures out. Made for a million rounds: a round is kept as
thirteen doubles.

*Sum and path.* With several rounds in flight the parts of all rounds add up to more than the time that passed. The
path gives every moment once: to the round that is answered next, from the moment when the one before was applied. A
part's time on the path is what lies in that window, in the order of PARTS; the rest of it was overlapped. Between one
round's answer and the start of the next no round is on the path.
"""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speculation.identity import identity_warning
from speculation.ledger import PARTS
from wire.messages import SOURCES

NUM_SHOWN = 40
UNACCOUNTED_GOAL = 0.02


def round_parts_s(event: Mapping[str, Any]) -> list[float]:
    """The parts of a traced round in the order of PARTS; as `Round.parts_s`, without building one."""
    timing = event["timing"]
    draft_wire_s, verify_wire_s = event["draft_hop_rtt_s"] / 2, event["verify_hop_rtt_s"] / 2
    started_at, sent_at, draft_s = event["started_at"], event["sent_at"], event["draft_s"]
    applied_at = event["applied_at"]
    parts = [
        draft_s,
        sent_at - started_at - draft_s,
        draft_wire_s,
        timing["relay_s"],
        verify_wire_s,
        timing["queue_s"],
        timing["verify_s"],
        timing["overhead_s"],
        verify_wire_s,
        event["relay_down_s"],
        draft_wire_s,
        applied_at - event["received_at"],
    ]
    parts.append(applied_at - started_at - sum(parts))
    return parts


@dataclass(slots=True)
class SessionTrace:
    """What is known of one session; `num_scored` are its passes that had candidates."""

    num_rounds: int = 0
    last_applied_at: float = float("-inf")
    num_passes: int = 0
    num_scored: int = 0
    num_tokens: int = 0
    began_at: float | None = None
    ended_at: float = 0.0
    report: Mapping[str, float] | None = None

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """Of its closing record; empty without one."""
        report = self.report or {}
        return {name: int(report[f"tokens_{name}"]) for name in SOURCES if f"tokens_{name}" in report}

    @property
    def num_committed(self) -> int:
        """Tokens of its passes, less what a stop or a limit cut off the last of them."""
        sources = self.tokens_by_source
        return min(self.num_tokens, sum(sources.values())) if sources else self.num_tokens

    @property
    def lasted_s(self) -> float:
        """From the start of its first pass to the end of its last, on the verify node's clock."""
        return self.ended_at - self.began_at if self.began_at is not None else 0.0


@dataclass(slots=True)
class Joined:
    """All traces of a run.

    Attributes:
        columns: seconds of each part, one entry for each round.
        path_s: time of each part on the path, in the order of PARTS.
        idle_s: between a session's rounds, when none of its own was on the path.
        shown: the first rounds, for the waterfall: session, frame, start on the draft node's clock, parts.
        only: beginning of the names of the sessions that count; empty for all.
    """

    columns: list[array[float]] = field(default_factory=lambda: [array("d") for _ in PARTS])
    totals: array[float] = field(default_factory=lambda: array("d"))
    path_s: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    idle_s: float = 0.0
    shown: list[tuple[str, int, float, list[float]]] = field(default_factory=list)
    sessions: dict[str, SessionTrace] = field(default_factory=dict)
    relay_sessions: set[str] = field(default_factory=set)
    num_dropped: int = 0
    only: str = ""

    def add(self, process: str, event: Mapping[str, Any]) -> None:
        """Take one event of the trace of "draft", "relay" or "verify"; kinds that say nothing here are passed over."""
        kind = event.get("event")
        if kind == "dropped":
            self.num_dropped += int(event["num_events"])
        elif self.only and not str(event.get("session")).startswith(self.only):
            return
        elif process == "draft" and kind == "round":
            self._on_round(event)
        elif process == "verify" and kind == "verify":
            self._on_pass(event)
        elif process == "verify" and kind == "session_ended":
            self._session(event["session"]).report = event["report"]
        elif process == "relay" and event.get("session") is not None:
            self.relay_sessions.add(event["session"])

    def _session(self, session: str) -> SessionTrace:
        known = self.sessions.get(session)
        if known is None:
            known = self.sessions[session] = SessionTrace()
        return known

    def _on_round(self, event: Mapping[str, Any]) -> None:
        parts = round_parts_s(event)
        for column, value in zip(self.columns, parts, strict=True):
            column.append(value)
        started_at, applied_at = event["started_at"], event["applied_at"]
        self.totals.append(applied_at - started_at)
        if len(self.shown) < NUM_SHOWN:
            self.shown.append((event["session"], event["timing"]["frame"], started_at, parts))
        session = self._session(event["session"])
        session.num_rounds += 1
        from_s = max(started_at, session.last_applied_at)
        if session.last_applied_at < started_at and session.num_rounds > 1:
            self.idle_s += started_at - session.last_applied_at
        session.last_applied_at = max(session.last_applied_at, applied_at)
        # The last part, unaccounted, may be negative; then the others reach beyond the end and are clipped there.
        at = started_at
        for index, value in enumerate(parts):
            end = min(at + max(value, 0.0), applied_at)
            if end > from_s:
                self.path_s[index] += end - max(at, from_s)
            at = end

    def _on_pass(self, event: Mapping[str, Any]) -> None:
        session = self._session(event["session"])
        session.num_passes += 1
        session.num_scored += event["num_rows"] > 1
        session.num_tokens += event["num_tokens"]
        if session.began_at is None:
            session.began_at = event["began"]
        session.ended_at = event["now"]

    @property
    def unaccounted_share(self) -> float:
        """Of all rounds' time."""
        total = sum(self.totals)
        return sum(self.columns[-1]) / total if total else 0.0

    def warnings(self) -> list[str]:
        """What makes figures of this join doubtful."""
        found = []
        if self.num_dropped:
            found.append(f"{self.num_dropped} events were dropped while tracing: counts are too low")
        if abs(self.unaccounted_share) > UNACCOUNTED_GOAL:
            found.append(f"{self.unaccounted_share:.1%} of the rounds' time is unaccounted, more than 2 %")
        drafted = {name for name, one in self.sessions.items() if one.num_rounds}
        verified = {name for name, one in self.sessions.items() if one.num_passes or one.report}
        if drafted and verified and drafted - verified:
            found.append(f"{len(drafted - verified)} drafted sessions are unknown to the verify trace: another run's")
        if self.relay_sessions and (drafted | verified) - self.relay_sessions:
            num = len((drafted | verified) - self.relay_sessions)
            found.append(f"{num} sessions are unknown to the relay trace: another run's")
        for name, one in sorted(self.sessions.items()):
            if one.report is None or not one.num_passes:
                continue
            if one.num_tokens < (num := sum(one.tokens_by_source.values())):
                found.append(
                    f"session {name}: {num} tokens have a source, its passes in the trace have {one.num_tokens}"
                )
            if one.report["passes"] != one.num_passes:
                found.append(
                    f"session {name}: its closing record has {one.report['passes']:.0f} passes, the trace "
                    f"{one.num_passes}: one of them is incomplete or another run's"
                )
        return found

    def identity(self, *, alone: bool = False) -> dict[str, float]:
        """tokens/s and its two factors, all three over the same passes of the same sessions.

        Only sessions that had candidates count; or, `alone`, only those that had none: a baseline asked for on the
        same nodes is another run. Of several sessions at a time it is what one of them got.
        """
        counted = [one for one in self.sessions.values() if one.lasted_s > 0 and (one.num_scored == 0) == alone]
        passes, tokens = sum(one.num_passes for one in counted), sum(one.num_committed for one in counted)
        seconds = sum(one.lasted_s for one in counted)
        if not counted:
            return {}
        return {
            "sessions": len(counted),
            "tokens_per_s": tokens / seconds,
            "tokens_per_round": tokens / passes,
            "round_s": seconds / passes,
        }

    def check_claims(self, **claims: float) -> list[str]:
        """Figures that somebody holds against this run (`tokens_per_s`, `tokens_per_round`, `round_s`)."""
        measured = self.identity() or self.identity(alone=True)
        if not measured or not claims:
            return []
        del measured["sessions"]
        warning = identity_warning(**(measured | claims))
        return [warning] if warning else []

    def figures(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        tokens: Counter[str] = Counter()
        weights: dict[int, list[tuple[float, float]]] = {}
        candidates = any(one.num_scored for one in self.sessions.values())
        for one in self.sessions.values():
            if one.num_scored or not candidates:
                tokens.update(one.tokens_by_source)
            for name, value in (one.report or {}).items():
                if name.startswith("acceptance_at_"):
                    place = int(name.removeprefix("acceptance_at_"))
                    # A place is weighed by the rounds that proposed it, which most rounds of a session may not be.
                    weights.setdefault(place, []).append((value, (one.report or {}).get(f"proposed_at_{place}", 0)))
        sum_s, path_total = sum(self.totals), sum(self.path_s)
        parts = {
            name: {
                "mean_ms": statistics.fmean(column) * 1e3,
                "median_ms": statistics.median(column) * 1e3,
                "sum_s": sum(column),
                "path_s": path,
            }
            for name, column, path in zip(PARTS, self.columns, self.path_s, strict=True)
            if column
        }
        return {
            "rounds": len(self.totals),
            "sessions": len(self.sessions),
            "parts": parts,
            "sum_s": sum_s,
            "path_s": path_total,
            "overlapped_s": sum_s - path_total,
            "no_round_on_the_path_s": self.idle_s,
            "unaccounted_share": self.unaccounted_share,
            "tokens_by_source": dict(tokens),
            "acceptance_by_position": {
                place: sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
                for place, pairs in sorted(weights.items())
                if sum(weight for _, weight in pairs)
            },
            "identity": self.identity(),
            "identity_target_alone": self.identity(alone=True),
            "by_session": {name: _session_figures(one) for name, one in self.sessions.items()},
            "warnings": self.warnings(),
        }


def _session_figures(one: SessionTrace) -> dict[str, Any]:
    return {
        "rounds": one.num_rounds,
        "passes": one.num_passes,
        "passes_with_candidates": one.num_scored,
        "tokens": one.num_committed,
        "tokens_by_source": one.tokens_by_source,
        "tokens_per_s": one.num_committed / one.lasted_s if one.lasted_s > 0 else None,
        "tokens_per_pass": one.num_committed / one.num_passes if one.num_passes else None,
        "pass_ms": one.lasted_s / one.num_passes * 1e3 if one.num_passes else None,
    }
