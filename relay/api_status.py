"""What the status page shows: nodes, sessions, figures. Counts only while somebody looks.

The relay itself reads no frame beyond its type and session. While a viewer is there, `StatusBoard.on_frame` is shown
the frames as they come in, and reads the answers' and, of sessions that are looked at, the rounds'.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from relay.api_rounds import RoundWatch
from relay.server import RelayServer
from wire.codec import decode
from wire.errors import ProtocolError
from wire.messages import SOURCES, Done, TextDelta

MAX_LISTED = 500
RATE_WINDOW_S = 5.0
SUMS = ("rounds", "drafted", "accepted")


@dataclass(slots=True)
class Progress:
    """What has been seen of one session's answer."""

    num_tokens: int = 0
    num_passes: int = 0
    num_seen: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    last_at: float = 0.0


class StatusBoard:
    """The figures of one relay.

    Use: `join` and `leave` around a viewer's stay, `watch` and `unwatch` around its look at one session's rounds.
    """

    def __init__(self, server: RelayServer) -> None:
        self.server = server
        self._num_viewers = 0
        self._progress: dict[str, Progress] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._sums: Counter[str] = Counter()
        self._num_answers = 0
        self._watches: dict[str, tuple[RoundWatch, int]] = {}

    def join(self) -> None:
        """A viewer has come."""
        self._num_viewers += 1
        self.server.tap = self.on_frame

    def leave(self) -> None:
        """A viewer has gone; with the last one the counting ends."""
        self._num_viewers -= 1
        if self._num_viewers == 0:
            self.server.tap = None
            self._progress.clear()
            self._recent.clear()

    def watch(self, session: str) -> RoundWatch:
        """The rounds of a session from now on."""
        watch, num = self._watches.get(session, (RoundWatch(), 0))
        self._watches[session] = (watch, num + 1)
        return watch

    def unwatch(self, session: str) -> None:
        """One viewer less looks at it."""
        watch, num = self._watches.pop(session)
        if num > 1:
            self._watches[session] = (watch, num - 1)

    def on_frame(self, kind: str, session: str | None, frame: bytes, now: float) -> None:
        """See `FrameTap`."""
        if session is None:
            return
        try:
            if kind in (TextDelta.type, Done.type):
                self._count(session, frame, now)
            elif session in self._watches:
                self._watches[session][0].on_frame(kind, frame, now, self._draft_rtt_s(session))
        except ProtocolError:
            # Whoever it is for will say so.
            return

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything but rounds, as JSON has it."""
        router = self.server.router
        for session_id in [each for each in self._progress if each not in router.sessions]:
            del self._progress[session_id]
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()
        sessions = [self._session(session_id, now) for session_id in list(router.sessions)[-MAX_LISTED:]]
        nodes = [self._node(peer_id) for peer_id, peer in router.peers.items() if peer.hello.role != "client"]
        sums = self._sums
        return {
            "nodes": nodes,
            "sessions": sessions,
            "num_sessions": len(router.sessions),
            "num_clients": sum(peer.hello.role == "client" for peer in router.peers.values()),
            "tokens_per_s": round(sum(num for _, num in self._recent) / RATE_WINDOW_S, 2),
            "answers": self._num_answers,
            "acceptance_rate": round(sums["accepted"] / sums["drafted"], 4) if sums["drafted"] else None,
            "mean_acceptance_length": round(1 + sums["accepted"] / sums["rounds"], 3) if sums["rounds"] else None,
            "drops": {reason.value: num for reason, num in router.drops.items()},
            "draining": router.draining,
        }

    def _count(self, session: str, frame: bytes, now: float) -> None:
        message = decode(frame)
        if isinstance(message, Done):
            self._num_answers += 1
            self._sums.update({name: int(message.report.get(name, 0)) for name in SUMS})
            return
        assert isinstance(message, TextDelta), "the relay knows the type"
        progress = self._progress.setdefault(session, Progress())
        progress.num_tokens = message.start + len(message.tokens)
        progress.num_passes += 1
        progress.num_seen += len(message.tokens)
        progress.sources.update(message.sources)
        progress.last_at = now
        self._recent.append((now, len(message.tokens)))

    def _session(self, session_id: str, now: float) -> dict[str, Any]:
        session = self.server.router.sessions[session_id]
        seen = self._progress.get(session_id, Progress())
        lasted_s = seen.last_at - session.opened_at
        return {
            "id": session_id,
            "verify": self._name(session.verify),
            "draft": self._name(session.draft),
            "speculate": session.speculate,
            "age_s": round(now - session.opened_at, 2),
            "tokens": seen.num_tokens,
            "tokens_per_s": round(seen.num_tokens / lasted_s, 2) if lasted_s > 0 else None,
            "tokens_per_pass": round(seen.num_seen / seen.num_passes, 2) if seen.num_passes else None,
            "sources": {source: seen.sources[source] for source in SOURCES},
        }

    def _node(self, peer_id: str) -> dict[str, Any]:
        peer = self.server.router.peers[peer_id]
        link = self.server.links.get(peer_id)
        rtt_s = link.rtt_s if link is not None else None
        return {
            "id": peer_id,
            "role": peer.hello.role,
            "name": peer.hello.name,
            "region": peer.hello.region,
            "model": peer.model.name,
            "sessions": len(peer.sessions),
            "capacity": peer.hello.capacity,
            "rtt_ms": round(rtt_s * 1e3, 2) if rtt_s is not None else None,
            "draining": peer.draining,
        }

    def _name(self, peer_id: str | None) -> str | None:
        peer = self.server.router.peers.get(peer_id or "")
        return peer.hello.name if peer is not None else None

    def _draft_rtt_s(self, session_id: str) -> float:
        session = self.server.router.sessions.get(session_id)
        link = self.server.links.get((session.draft if session is not None else None) or "")
        return (link.rtt_s if link is not None else None) or 0.0
