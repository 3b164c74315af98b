"""The relay's shell: performs over links what the router decides.

Each peer has a task (reader, writer and keepalive of its link) and a bounded outgoing queue. Whatever goes wrong with
one peer ends that peer alone. `farewell` has the codes that links are closed with.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Mapping, Sequence

from relay.access import Access
from relay.actions import Action, ClosePeer, DropReason, Forward, Send, SessionEnded, SessionMoved
from relay.config import RelayConfig
from relay.credentials import Credential, Identity
from relay.farewell import CLOSE_CODES, close_link, say_goodbye
from relay.limits import Pace
from relay.local import FrameTap, LocalLink
from relay.pairing import MAX_SESSIONS_PER_CLIENT, Peer
from relay.router import Router
from relay.status import Totals, page
from wire.aio.health import Pulse
from wire.aio.link import Link
from wire.aio.listener import Listener, Page
from wire.aio.quiet import RateLimited
from wire.aio.sockets import WebSocket
from wire.aio.trace import TraceWriter
from wire.codec import append_residence, encode
from wire.connection import Connection, PeerHello
from wire.errors import LinkLost, ProtocolError, QueueFull, Refused, VersionMismatch, WireError
from wire.messages import MAX_FRAME_BYTES, PROTOCOL_VERSION, Hello, Message, OpenSession, SessionMessage, Welcome

log = logging.getLogger(__name__)

TIMED = (b'{"type":"candidates"', b'{"type":"acceptance"')


class RelayServer:
    """One relay.

    Use: `await start()`, then `await serve(stop)`, which drains when `stop` is set and returns.
    """

    def __init__(self, config: RelayConfig, *, trace: TraceWriter | None = None) -> None:
        self.config = config
        self.trace = trace or TraceWriter(None)
        self.router = Router(
            malformed_limit=config.malformed_limit,
            keep_s=config.keep_s,
            takeover_wait_s=config.takeover_wait_s,
            max_kept_bytes=config.max_kept_bytes,
        )
        self.access = Access(config)
        self.links: dict[str, Link | LocalLink] = {}
        self.tap: FrameTap | None = None
        """Shown every frame that comes in, while somebody watches."""
        self.identities: dict[str, Identity] = {}
        self.totals = Totals()
        self.pulse = Pulse()
        self.port = 0
        self._listener: Listener | None = None
        self._numbers = itertools.count(1)
        self._refusals = RateLimited(log, logging.WARNING)
        self._farewells: asyncio.TaskGroup | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._rearm = asyncio.Event()
        self._armed_for = math.inf

    @property
    def paces(self) -> Mapping[str, Pace]:
        """The limits in force, by credential."""
        return self.access.paces

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenFailed: the address cannot be had.
            CredentialsError, OSError: the files of credentials or certificate are not good.
        """
        await self.access.load()
        self._listener = Listener(
            self._on_websocket,
            authenticate=self.access.authenticate,
            open_timeout_s=self.config.handshake_timeout_s,
            pages=self._page,
            ssl_context=self.access.ssl_context,
        )
        self.port = await self._listener.listen(self.config.host, self.config.port)
        log.info("listening on %s:%d", self.config.host, self.port)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain."""
        async with asyncio.TaskGroup() as self._farewells:
            running = [
                self._farewells.create_task(self._keep_time(), name="router timer"),
                self._farewells.create_task(self.pulse.beat(), name="pulse"),
                self._farewells.create_task(self.access.watch(self._renew_identities), name="watch files"),
            ]
            await stop.wait()
            await self.drain()
            for task in running:
                task.cancel()

    async def drain(self) -> None:
        """Tell everybody, let running sessions finish within the grace time, close all links."""
        grace_s = self.config.grace_s
        assert self._listener is not None, "started before"
        self._listener.refusing = True
        log.info("draining: %d sessions have %g s to finish", len(self.router.sessions), grace_s)
        self._perform(self.router.on_drain(grace_s, "the relay is shutting down"), self._now())
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
                # What is queued belongs to the answers too: a Close would overtake it.
                await asyncio.gather(*[link.flush() for link in self.links.values()])
        except TimeoutError:
            log.warning("%d sessions did not finish within %g s", len(self.router.sessions), grace_s)
        await self._listener.close("the relay is shutting down")
        drops = {reason.value: count for reason, count in self.router.drops.items()}
        log.info("closed; dropped in total: %s", drops or "nothing")

    def join_local(self, hello: Hello, link: LocalLink, credential: Credential) -> str:
        """Let in a peer of this very process, without a socket; returns its id.

        Args:
            credential: whose requests it brings.

        Raises:
            Refused: the router turns it away.
        """
        peer_id = f"local-{next(self._numbers)}"
        actions = self.router.on_hello(
            peer_id,
            hello,
            self._now(),
            group=credential.name if credential.max_sessions else "",
            max_sessions=credential.max_sessions or MAX_SESSIONS_PER_CLIENT,
        )
        refusal = next((action for action in actions if isinstance(action, ClosePeer) and action.peer == peer_id), None)
        if refusal is not None:
            raise Refused(refusal.reason)
        self.links[peer_id] = link
        self._perform(actions, self._now())
        return peer_id

    def from_local(self, peer_id: str, message: SessionMessage) -> None:
        """Take a message of a local peer.

        Raises:
            FrameTooLarge, ProtocolError: it cannot be sent.
        """
        frame, now = encode(message), self._now()
        if isinstance(message, OpenSession):
            self._note_rtts()
        self._perform(self.router.route(peer_id, message.type, message.session, frame, now), now)

    async def _keep_time(self) -> None:
        """Call the router when it wants to be called."""
        while True:
            self._rearm.clear()
            timer_at = self.router.next_timer()
            self._armed_for = math.inf if timer_at is None else timer_at
            try:
                async with asyncio.timeout_at(timer_at):
                    await self._rearm.wait()
            except TimeoutError:
                now = self._now()
                self._perform(self.router.on_timer(now), now)

    def _page(self, path: str, identity: object | None) -> Page | None:
        is_admin = isinstance(identity, Identity) and "admin" in identity.credential.roles
        return page(self, path, may_see_metrics=is_admin)

    def _renew_identities(self) -> None:
        """The credentials have changed: close who comes by a secret that is not good any more."""
        now = self._now()
        for peer_id, identity in list(self.identities.items()):
            renewed = self.access.credentials.renew(identity)
            peer, link = self.router.peers.get(peer_id), self.links.get(peer_id)
            if peer is None or link is None:
                continue
            if renewed is None or not renewed.credential.allows(peer.hello.role):
                reason = f"credential {identity.credential.name}: this secret is not good any more"
                self._perform(self.router.expel(peer_id, "revoked", reason, now), now)
            else:
                self.identities[peer_id] = renewed
                peer.max_sessions = renewed.credential.max_sessions or MAX_SESSIONS_PER_CLIENT
                peer.credential = renewed.credential.name
                link.pace = self.access.pace(renewed.credential, now)

    async def _on_websocket(self, websocket: WebSocket, identity: object) -> None:
        """The life of one authenticated peer."""
        assert isinstance(identity, Identity), "as Access makes them"
        peer_id = f"peer-{next(self._numbers)}"
        task = asyncio.current_task()
        assert task is not None
        task.set_name(peer_id)
        link = Link(
            websocket,
            Connection.accepting(
                now=self._now(),
                handshake_timeout_s=self.config.handshake_timeout_s,
                serving=self.router.serving(),
            ),
            max_queued_frames=self.config.max_queued_frames,
            max_queued_bytes=self.config.max_queued_bytes,
            on_write=mark_residence,
            on_malformed=lambda exc, now: self._perform(self.router.on_malformed(peer_id, str(exc), now), now),
            pace=self.access.pace(identity.credential, self._now()),
        )
        try:
            hello = await self._meet(peer_id, link, identity)
            if hello is not None:
                await self._attend(peer_id, link)
        except Exception:
            # A bug of ours; the other peers have nothing to do with it.
            log.exception("%s: closed after an internal error", peer_id)
            self._forget(peer_id, "internal error of the relay")
            await close_link(link, 1011, "internal error")

    async def _meet(self, peer_id: str, link: Link, identity: Identity) -> Hello | None:
        """Shake hands; the peer's Hello if it is in."""
        try:
            event = await link.handshake()
        except WireError as exc:
            self._refusals(identity.credential.name, "< %s turned away at its handshake: %s", peer_id, exc)
            await close_link(link, CLOSE_CODES["version"] if isinstance(exc, VersionMismatch) else 1002, str(exc))
            return None
        assert isinstance(event, PeerHello)
        hello, now = event.hello, self._now()
        credential = identity.credential
        if not credential.allows(hello.role):
            self.router.drops[DropReason.FORBIDDEN] += 1
            reason = f"credential {credential.name} is for {', '.join(credential.roles)}, not for a {hello.role}"
            self._refusals(credential.name, "< %s (%s %s) refused: %s", peer_id, hello.role, hello.name, reason)
            await link.refuse("forbidden", reason)
            await close_link(link, CLOSE_CODES["forbidden"], reason)
            return None
        actions = self.router.on_hello(
            peer_id,
            hello,
            now,
            group=credential.name if credential.max_sessions else "",
            max_sessions=credential.max_sessions or MAX_SESSIONS_PER_CLIENT,
            credential=credential.name,
        )
        refusal = next((a for a in actions if isinstance(a, ClosePeer) and a.peer == peer_id), None)
        if refusal is not None:
            text = "< %s (%s %s) refused: %s"
            self._refusals(credential.name, text, peer_id, hello.role, hello.name, refusal.reason)
            self.trace.write("peer_refused", now, peer=peer_id, code=refusal.code, reason=refusal.reason)
            await link.refuse(refusal.code, refusal.reason)
            await close_link(link, CLOSE_CODES[refusal.code], refusal.reason)
            return None
        log.info("< %s is %s %s: %s", peer_id, hello.role, hello.name, hello.model or "no model")
        if hello.role != "client":
            self._doubt_others(self.router.peers[peer_id])
        self.trace.write("peer_joined", now, peer=peer_id, role=hello.role, name=hello.name)
        if hello.role == "client":
            link.on_write = None  # nothing that is timed goes to clients
        self.links[peer_id] = link
        self.identities[peer_id] = identity
        welcome = Welcome(
            protocol=PROTOCOL_VERSION,
            peer=peer_id,
            max_frame_bytes=MAX_FRAME_BYTES,
            ping_interval_s=self.config.ping_interval_s,
            ping_timeout_s=self.config.ping_timeout_s,
            frames_per_s=credential.frames_per_s or 0.0,
            bytes_per_s=credential.bytes_per_s or 0.0,
        )
        # Frames that others send to the peer meanwhile wait in its queue: the Welcome is first.
        await link.accept(welcome)
        self._perform(actions, now)
        return hello

    def _doubt_others(self, new: Peer) -> None:
        """A node has come: links of its name may be its own, from before its way to us broke without a word."""
        for other_id, other in self.router.peers.items():
            link = self.links.get(other_id)
            if other_id != new.id and isinstance(link, Link) and other.is_called_like(new):
                link.doubt()

    async def _attend(self, peer_id: str, link: Link) -> None:
        """Carry a peer's frames until its link ends."""

        def on_frame(kind: str, session: str | None, frame: bytes, now: float) -> None:
            if self.tap is not None:
                self.tap(kind, session, frame, now)
            if kind == OpenSession.type:
                self._note_rtts()
            self._perform(self.router.route(peer_id, kind, session, frame, now), now)

        reason, code = "", 1000
        try:
            await link.run(on_frame)
        except QueueFull as exc:
            self.router.drops[DropReason.SLOW_CONSUMER] += 1
            reason, code = f"it reads too slowly: {exc}", CLOSE_CODES["slow_consumer"]
        except (LinkLost, ProtocolError) as exc:
            reason = str(exc)
        finally:
            # Also when this task is cancelled: a peer without a link must not stay in the router.
            self._forget(peer_id, reason or "link ended")
        await close_link(link, code, reason)

    def _forget(self, peer_id: str, reason: str) -> None:
        """A link has ended; nothing is left to do if the router closed it."""
        link = self.links.pop(peer_id, None)
        if link is None:
            return
        self._count_out(peer_id, link)
        now = self._now()
        peer = self.router.peers.get(peer_id)
        who = f"{peer_id} ({peer.hello.role} {peer.hello.name}, {len(peer.sessions)} sessions)" if peer else peer_id
        log.info("< %s left: %s", who, reason)
        self.trace.write("peer_left", now, peer=peer_id, reason=reason)
        self._note_rtts()
        self._perform(self.router.on_gone(peer_id, now, reason), now)

    def _perform(self, actions: Sequence[Action], now: float) -> None:
        """Carry out the router's actions, in order. A peer whose queue is full is closed, which may bring more."""
        waiting = list(actions)
        if len(waiting) == 1 and type(waiting[0]) is Forward:
            # Nearly every frame: it moves, and nothing else changes.
            waiting = self._queue(waiting[0].peer, waiting[0].frame, now)
            if not waiting:
                return
        for action in waiting:
            match action:
                case Forward(peer, frame):
                    waiting += self._queue(peer, frame, now)
                case Send(peer, message):
                    self._trace_send(peer, message, now)
                    waiting += self._queue(peer, message, now)
                case ClosePeer(peer, code, reason):
                    self._dismiss(peer, code, reason, now)
                case SessionEnded(session, reason, duration_s):
                    log.info("session %s ended after %.2f s: %s", session, duration_s, reason)
                    self.trace.write("session_ended", now, session=session, reason=reason, duration_s=duration_s)
                case SessionMoved(session, verify, num_tokens):
                    log.info("session %s goes on at %s, behind %d tokens", session, verify, num_tokens)
                    self.trace.write("session_moved", now, session=session, verify=verify, num_tokens=num_tokens)
        if self.router.deadlines and min(self.router.deadlines.values()) < self._armed_for:
            self._rearm.set()
        if self.router.sessions:
            self._idle.clear()
        else:
            self._idle.set()

    def _note_rtts(self) -> None:
        for peer_id, peer in self.router.peers.items():
            if peer.hello.model is not None and peer_id in self.links:
                peer.rtt_s = self.links[peer_id].rtt_s

    def _queue(self, peer: str, message: Message | bytes, now: float) -> list[Action]:
        link = self.links.get(peer)
        if link is None:
            return []
        try:
            link.send(message, now=now)
        except QueueFull as exc:
            frame = message if isinstance(message, bytes) else b""
            return self.router.on_queue_full(peer, frame, str(exc), now)
        return []

    def _dismiss(self, peer: str, code: str, reason: str, now: float) -> None:
        """Close a peer's link in a task of its own; from now on nothing is sent to it."""
        link = self.links.pop(peer, None)
        if link is None:
            return
        self._count_out(peer, link)
        log.warning("> %s closed (%s): %s", peer, code, reason)
        self.trace.write("peer_closed", now, peer=peer, code=code, reason=reason)
        assert self._farewells is not None, "peers come while the relay serves"
        self._farewells.create_task(say_goodbye(link, code, reason), name=f"farewell to {peer}")

    def _count_out(self, peer_id: str, link: Link | LocalLink) -> None:
        self.identities.pop(peer_id, None)
        self.totals.add(link)

    def _trace_send(self, peer: str, message: Message, now: float) -> None:
        if self.trace.enabled:
            fields = {name: getattr(message, name, None) for name in ("session", "epoch", "code", "reason")}
            self.trace.write(message.type, now, peer=peer, **{k: v for k, v in fields.items() if v is not None})

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def mark_residence(frame: bytes, queued_at: float, now: float) -> bytes:
    """Tell the receiver of candidates and acceptances how long they were in the relay."""
    return append_residence(frame, now - queued_at) if frame.startswith(TIMED) else frame
