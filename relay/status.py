"""What the relay shows of itself: health, readiness, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from relay.limits import Pace
from relay.local import LocalLink
from relay.router import Router
from wire.aio.health import Pulse, health_page, metrics_page
from wire.aio.link import Link
from wire.aio.listener import Page
from wire.metrics import Family, counter, gauge, labelled

ROLES = ("draft", "verify", "client")


class Totals:
    """Frames and bytes of links that have ended; those that stand are added at each look."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = dict.fromkeys(("frames in", "frames out", "bytes in", "bytes out"), 0)

    def add(self, link: Link | LocalLink) -> None:
        """A link has ended."""
        for name, value in _counts(link).items():
            self._ended[name] += value

    def now(self, links: Iterable[Link | LocalLink]) -> dict[str, int]:
        """All frames and bytes so far."""
        totals = dict(self._ended)
        for link in links:
            for name, value in _counts(link).items():
                totals[name] += value
        return totals


class Showing(Protocol):
    """What the pages are made from; `RelayServer` has it."""

    router: Router
    links: dict[str, Link | LocalLink]
    totals: Totals
    pulse: Pulse

    @property
    def paces(self) -> Mapping[str, Pace]: ...


def page(relay: Showing, path: str, *, may_see_metrics: bool) -> Page | None:
    """The page at a path; metrics name peers, so they are for who shows an admin's secret."""
    if path == "/metrics":
        if not may_see_metrics:
            return Page("Authorization: Bearer SECRET of an admin is required\n", 401)
        return metrics_page([*families(relay), *relay.pulse.families()])
    return health_page(path, unhealthy=list, unready=lambda: unready(relay.router))


def unready(router: Router) -> list[str]:
    """Why no request would be served now."""
    if router.draining:
        return ["the relay is draining"]
    verify = router.nodes("verify")
    if not verify:
        return ["no verify node is connected"]
    return [] if any(not node.draining for node in verify) else ["every verify node is draining"]


def families(relay: Showing) -> list[Family]:
    """The relay's metrics."""
    router, totals = relay.router, relay.totals.now(relay.links.values())
    peers = dict.fromkeys(ROLES, 0)
    for peer in router.peers.values():
        peers[peer.hello.role] += 1
    sessions = list(router.sessions.values())
    rtts = [
        ("", {"peer": peer_id, "name": router.peers[peer_id].hello.name}, link.rtt_s)
        for peer_id, link in relay.links.items()
        if link.rtt_s is not None and peer_id in router.peers and router.peers[peer_id].hello.role != "client"
    ]
    queued = [link.num_queued for link in relay.links.values()]
    queued_bytes = [link.queued_bytes for link in relay.links.values()]
    return [
        labelled("gauge", "foredraft_peers", "Connected peers.", "role", peers),
        gauge("foredraft_sessions", "Open sessions.", len(sessions)),
        gauge("foredraft_pairs", "Sessions with a draft node.", sum(s.draft is not None for s in sessions)),
        gauge("foredraft_sessions_without_client", "Clients that are away.", sum(s.client is None for s in sessions)),
        gauge("foredraft_sessions_without_verify_node", "Sessions that wait for a verify node.",
              sum(s.verify is None and s.last is None for s in sessions)),
        counter("foredraft_sessions_opened_total", "Sessions so far.", router.num_opened),
        counter("foredraft_sessions_moved_total", "Sessions taken over by another verify node.", router.num_moved),
        counter("foredraft_sessions_resumed_total", "Sessions that their client came back to.", router.num_resumed),
        gauge("foredraft_kept_bytes", "Kept of requests and answers for resuming.", router.kept_bytes),
        labelled("counter", "foredraft_drops_total", "Frames and peers dropped.", "reason",
                 {reason.value: count for reason, count in router.drops.items()}),
        labelled("counter", "foredraft_frames_total", "Frames of all links.", "direction",
                 {"in": totals["frames in"], "out": totals["frames out"]}),
        labelled("counter", "foredraft_bytes_total", "Bytes of all frames.", "direction",
                 {"in": totals["bytes in"], "out": totals["bytes out"]}),
        labelled("counter", "foredraft_paced_frames_total", "Frames after which a credential's links were read later.",
                 "credential", {name: pace.num_delayed for name, pace in relay.paces.items()}),
        labelled("counter", "foredraft_refused_requests_total", "HTTP requests above their credential's rate.",
                 "credential", {name: pace.num_refused for name, pace in relay.paces.items()}),
        gauge("foredraft_queued_frames", "Frames that wait to be written.", sum(queued)),
        gauge("foredraft_queued_frames_max", "The longest queue of one link.", max(queued, default=0)),
        gauge("foredraft_queued_bytes", "Bytes that wait to be written.", sum(queued_bytes)),
        Family("foredraft_rtt_seconds", "gauge", "Round trip to a node.", rtts),
    ]  # fmt: skip


def _counts(link: Link | LocalLink) -> dict[str, int]:
    return {
        "frames in": link.num_read,
        "frames out": link.num_written,
        "bytes in": link.bytes_read,
        "bytes out": link.bytes_written,
    }
