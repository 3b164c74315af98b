"""The relay's shell: performs over links what the router decides.

Each peer has a task (reader, writer and keepalive of its link) and a bounded outgoing queue. Whatever goes wrong with
one peer ends that peer alone. Links are closed with these codes:

    1001   the relay shuts down
    1002   the handshake was malformed
    1011   the relay failed at this peer; its log says how
    4001   the protocol versions differ
    4002   no connected node fits the model served
    4003   too many malformed frames
    4008   the peer reads too slowly: its queue was full
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Sequence

from relay.config import RelayConfig
from relay.local import FrameTap, LocalLink
from relay.router import Action, ClosePeer, DropReason, Forward, Router, Send, SessionEnded
from wire.aio.link import CLOSE_TIMEOUT_S, Link, WebSocket
from wire.aio.listener import Listener
from wire.aio.trace import TraceWriter
from wire.codec import append_residence, encode
from wire.connection import Connection, PeerHello
from wire.errors import LinkLost, ProtocolError, QueueFull, Refused, VersionMismatch, WireError
from wire.messages import MAX_FRAME_BYTES, PROTOCOL_VERSION, Error, Hello, Message, SessionMessage, Welcome

log = logging.getLogger(__name__)

CLOSE_CODES = {
    "draining": 1001,
    "version": 4001,
    "mismatch": 4002,
    "malformed": 4003,
    "not_allowed": 4003,
    "slow_consumer": 4008,
}
TIMED = (b'{"type":"candidates"', b'{"type":"acceptance"')


class RelayServer:
    """One relay.

    Use: `await start()`, then `await serve(stop)`, which drains when `stop` is set and returns.
    """

    def __init__(self, config: RelayConfig, *, trace: TraceWriter | None = None) -> None:
        self.config = config
        self.trace = trace or TraceWriter(None)
        self.router = Router(malformed_limit=config.malformed_limit)
        self.links: dict[str, Link | LocalLink] = {}
        self.tap: FrameTap | None = None
        """Shown every frame that comes in, while somebody watches."""
        self.port = 0
        self._listener = Listener(self._on_websocket, secret=config.secret, open_timeout_s=config.handshake_timeout_s)
        self._numbers = itertools.count(1)
        self._farewells: asyncio.TaskGroup | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenFailed: the address cannot be had.
        """
        self.port = await self._listener.listen(self.config.host, self.config.port)
        log.info("listening on %s:%d", self.config.host, self.port)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain."""
        async with asyncio.TaskGroup() as self._farewells:
            await stop.wait()
            await self.drain()

    async def drain(self) -> None:
        """Tell everybody, let running sessions finish within the grace time, close all links."""
        grace_s = self.config.grace_s
        self._listener.refusing = True
        log.info("draining: %d sessions have %g s to finish", len(self.router.sessions), grace_s)
        self._perform(self.router.on_drain(grace_s, "the relay is shutting down"), self._now())
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d sessions did not finish within %g s", len(self.router.sessions), grace_s)
        await self._listener.close("the relay is shutting down")
        drops = {reason.value: count for reason, count in self.router.drops.items()}
        log.info("closed; dropped in total: %s", drops or "nothing")

    def join_local(self, hello: Hello, link: LocalLink) -> str:
        """Let in a peer of this very process, without a socket; returns its id.

        Raises:
            Refused: the router turns it away.
        """
        peer_id = f"local-{next(self._numbers)}"
        actions = self.router.on_hello(peer_id, hello, self._now())
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
        self._perform(self.router.route(peer_id, message.type, message.session, frame, now), now)

    async def _on_websocket(self, websocket: WebSocket) -> None:
        """The life of one authenticated peer."""
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
        )
        try:
            hello = await self._meet(peer_id, link)
            if hello is not None:
                await self._attend(peer_id, link)
        except Exception:
            # A bug of ours; the other peers have nothing to do with it.
            log.exception("%s: closed after an internal error", peer_id)
            self._forget(peer_id, "internal error of the relay")
            await self._close(link, 1011, "internal error")

    async def _meet(self, peer_id: str, link: Link) -> Hello | None:
        """Shake hands; the peer's Hello if it is in."""
        try:
            event = await link.handshake()
        except WireError as exc:
            log.warning("< %s turned away at its handshake: %s", peer_id, exc)
            await self._close(link, CLOSE_CODES["version"] if isinstance(exc, VersionMismatch) else 1002, str(exc))
            return None
        assert isinstance(event, PeerHello)
        hello, now = event.hello, self._now()
        actions = self.router.on_hello(peer_id, hello, now)
        refusal = next((a for a in actions if isinstance(a, ClosePeer) and a.peer == peer_id), None)
        if refusal is not None:
            log.warning("< %s (%s %s) refused: %s", peer_id, hello.role, hello.name, refusal.reason)
            self.trace.write("peer_refused", now, peer=peer_id, code=refusal.code, reason=refusal.reason)
            await link.refuse(refusal.code, refusal.reason)
            await self._close(link, CLOSE_CODES[refusal.code], refusal.reason)
            return None
        log.info("< %s is %s %s: %s", peer_id, hello.role, hello.name, hello.model or "no model")
        self.trace.write("peer_joined", now, peer=peer_id, role=hello.role, name=hello.name)
        self.links[peer_id] = link
        welcome = Welcome(
            protocol=PROTOCOL_VERSION,
            peer=peer_id,
            max_frame_bytes=MAX_FRAME_BYTES,
            ping_interval_s=self.config.ping_interval_s,
            ping_timeout_s=self.config.ping_timeout_s,
        )
        # Frames that others send to the peer meanwhile wait in its queue: the Welcome is first.
        await link.accept(welcome)
        self._perform(actions, now)
        return hello

    async def _attend(self, peer_id: str, link: Link) -> None:
        """Carry a peer's frames until its link ends."""

        def on_frame(kind: str, session: str | None, frame: bytes, now: float) -> None:
            if self.tap is not None:
                self.tap(kind, session, frame, now)
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
        await self._close(link, code, reason)

    def _forget(self, peer_id: str, reason: str) -> None:
        """A link has ended; nothing is left to do if the router closed it."""
        if self.links.pop(peer_id, None) is None:
            return
        now = self._now()
        log.info("< %s left: %s", peer_id, reason)
        self.trace.write("peer_left", now, peer=peer_id, reason=reason)
        self._perform(self.router.on_gone(peer_id, now, reason), now)

    def _perform(self, actions: Sequence[Action], now: float) -> None:
        """Carry out the router's actions, in order. A peer whose queue is full is closed, which may bring more."""
        waiting = deque(actions)
        while waiting:
            match waiting.popleft():
                case Send(peer, message):
                    self._trace_send(peer, message, now)
                    waiting.extend(self._queue(peer, message, now))
                case Forward(peer, frame):
                    waiting.extend(self._queue(peer, frame, now))
                case ClosePeer(peer, code, reason):
                    self._dismiss(peer, code, reason, now)
                case SessionEnded(session, reason, duration_s):
                    log.info("session %s ended after %.2f s: %s", session, duration_s, reason)
                    self.trace.write("session_ended", now, session=session, reason=reason, duration_s=duration_s)
        if self.router.sessions:
            self._idle.clear()
        else:
            self._idle.set()

    def _queue(self, peer: str, message: Message | bytes, now: float) -> list[Action]:
        link = self.links.get(peer)
        if link is None:
            return []
        try:
            link.send(message, now=now)
        except QueueFull as exc:
            self.router.drops[DropReason.SLOW_CONSUMER] += 1
            return self.router.expel(peer, "slow_consumer", f"it reads too slowly: {exc}", now)
        return []

    def _dismiss(self, peer: str, code: str, reason: str, now: float) -> None:
        """Close a peer's link in a task of its own; from now on nothing is sent to it."""
        link = self.links.pop(peer, None)
        if link is None:
            return
        log.warning("> %s closed (%s): %s", peer, code, reason)
        self.trace.write("peer_closed", now, peer=peer, code=code, reason=reason)
        assert self._farewells is not None, "peers come while the relay serves"
        self._farewells.create_task(self._say_goodbye(link, code, reason), name=f"farewell to {peer}")

    async def _say_goodbye(self, link: Link | LocalLink, code: str, reason: str) -> None:
        try:
            if code != "slow_consumer":
                link.send(Error(code=code, message=reason))
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await link.flush()
        except (WireError, TimeoutError):
            log.debug("the peer does not read its last frames")
        await self._close(link, CLOSE_CODES.get(code, 4000), reason)

    @staticmethod
    async def _close(link: Link | LocalLink, code: int, reason: str) -> None:
        """Close a link; one that does not close in time is cut. Raises nothing: the link is over either way."""
        try:
            async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
                await link.close(code, reason.encode("ascii", "replace").decode())
        except Exception as exc:
            log.debug("cut off instead of closed: %r", exc)
            link.abort()

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
