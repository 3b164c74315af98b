"""The gateway as a client of the relay in its own process: sessions in, messages out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from relay.credentials import Credential
from relay.errors import RequestFailed
from relay.local import LocalLink
from relay.pairing import MAX_SESSIONS_PER_CLIENT
from relay.server import RelayServer
from wire.codec import decode
from wire.errors import Refused
from wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Done,
    Error,
    Hello,
    Message,
    OpenSession,
    TextDelta,
    Tokenize,
    Tokenized,
    Waiting,
)

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 4 << 20
"""An HTTP client for which more waits does not read: its sessions end."""
Answer = TextDelta | Done | Tokenized


@dataclass(frozen=True, slots=True)
class Pairing:
    """Who served a session when its last tokens came."""

    verify: str = ""
    model: str = ""
    fingerprint: str = ""
    draft: str = ""
    epoch: int = 0


class LocalClient:
    """The gateway's peers in the router: one for each credential, so that its limits hold here too."""

    def __init__(self, server: RelayServer) -> None:
        self.server = server
        self._exchanges: dict[str, Exchange] = {}
        self._peers: dict[str, str] = {}

    def peer(self, credential: Credential) -> str:
        """The id of the peer for a credential's requests."""
        peer_id = self._peers.get(credential.name, "")
        peer = self.server.router.peers.get(peer_id)
        if peer is None:
            hello = Hello(protocol=PROTOCOL_VERSION, role="client", name=f"gateway for {credential.name}")
            peer_id = self.server.join_local(hello, LocalLink(self._deliver, self._on_closed), credential)
            self._peers[credential.name] = peer_id
        else:
            # The credential may have been read anew with another limit.
            peer.max_sessions = credential.max_sessions or MAX_SESSIONS_PER_CLIENT
        return peer_id

    def exchange(self, requests: Sequence[OpenSession | Tokenize], credential: Credential) -> Exchange:
        """The sessions of one HTTP request; enter it to send them."""
        return Exchange(self, requests, credential)

    def pairing(self, session_id: str) -> Pairing:
        """Who serves a session now; empty names where that is over."""
        router = self.server.router
        session = router.sessions.get(session_id)
        if session is None:
            return Pairing()
        verify, draft = router.peers.get(session.verify or ""), router.peers.get(session.draft or "")
        return Pairing(
            verify=verify.hello.name if verify else "",
            model=verify.model.name if verify else "",
            fingerprint=verify.model.fingerprint if verify else "",
            draft=draft.hello.name if draft else "",
            epoch=session.epoch,
        )

    def open(self, peer_id: str, request: OpenSession | Tokenize, exchange: Exchange) -> None:
        """Send a request.

        Raises:
            FrameTooLarge, ProtocolError: it cannot be sent; nothing was.
        """
        self._exchanges[request.session] = exchange
        try:
            self.server.from_local(peer_id, request)
        except BaseException:
            del self._exchanges[request.session]
            raise

    def forget(self, session_id: str) -> None:
        """Deliver nothing more of a session."""
        self._exchanges.pop(session_id, None)

    def cancel(self, peer_id: str, session_id: str) -> None:
        """Have the nodes stop; what still comes of the session is nobody's."""
        self.forget(session_id)
        if session_id in self.server.router.sessions:
            self.server.from_local(peer_id, Cancel(session=session_id))

    def end(self, reason: str) -> None:
        """Fail and cancel what is under way: the relay goes."""
        for session_id, exchange in list(self._exchanges.items()):
            exchange.deliver(Error(session=session_id, code="draining", message=reason), 0)
            self.cancel(exchange.peer, session_id)

    def _deliver(self, item: Message | bytes) -> None:
        message = decode(item) if isinstance(item, bytes) else item
        exchange = self._exchanges.get(getattr(message, "session", None) or "")
        if exchange is not None:
            exchange.deliver(message, len(item) if isinstance(item, bytes) else 0)

    def _on_closed(self, reason: str) -> None:
        log.error("the relay turned its own gateway out: %s", reason)
        for session_id, exchange in list(self._exchanges.items()):
            exchange.deliver(Error(session=session_id, code="draining", message=reason), 0)


class Exchange:
    """The sessions of one HTTP request, as a context manager.

    It is over after the last session's `Done` or `Tokenized`. When it is left before that, for whatever reason, the
    sessions that run are cancelled, each once.
    """

    def __init__(self, client: LocalClient, requests: Sequence[OpenSession | Tokenize], credential: Credential) -> None:
        self._client = client
        self._credential = credential
        self.peer = ""
        self._requests = requests
        self._queue: asyncio.Queue[tuple[int, Answer | RequestFailed, int]] = asyncio.Queue()
        self._queued_bytes = 0
        self._running: dict[str, int] = {}
        self._overflowed = False
        self.pairings = [Pairing() for _ in requests]
        self.places: dict[int, int] = {}
        """Of the sessions that wait for the target: their places in line, 1 being the next to go."""
        self.opened_at = 0.0
        self.model = self.fingerprint = ""
        self.on_overflow: Callable[[], None] = lambda: None

    def __enter__(self) -> Exchange:
        """Send the requests.

        Raises:
            FrameTooLarge, ProtocolError: one cannot be sent; the others are cancelled.
            RequestFailed: the relay is shutting down.
        """
        try:
            self.peer = self._client.peer(self._credential)
        except Refused as exc:
            raise RequestFailed("draining", str(exc)) from exc
        self.opened_at = asyncio.get_running_loop().time()
        try:
            for index, request in enumerate(self._requests):
                self._running[request.session] = index
                self._client.open(self.peer, request, self)
                pairing = self._client.pairing(request.session)
                self.model, self.fingerprint = pairing.model, pairing.fingerprint
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def over(self) -> bool:
        """Whether everything has been said and read."""
        return not self._running and self._queue.empty()

    async def next(self, timeout_s: float | None = None) -> tuple[int, Answer] | None:
        """The next message and the index of its session; None if there is none within `timeout_s`.

        Raises:
            RequestFailed: a session failed.
        """
        try:
            async with asyncio.timeout(timeout_s if self._queue.empty() else None):
                index, item, num_bytes = await self._queue.get()
        except TimeoutError:
            return None
        self._queued_bytes -= num_bytes
        if isinstance(item, RequestFailed):
            raise item
        return index, item

    def deliver(self, message: Message, num_bytes: int) -> None:
        """Take a message of one of the sessions; called by the client."""
        session_id: str = getattr(message, "session", None) or ""
        index = self._running.get(session_id)
        if index is None or self._overflowed:
            return
        match message:
            case Waiting():
                self.places[index] = message.place
            case TextDelta():
                self.places.pop(index, None)
                if self.pairings[index].epoch == 0:
                    self.pairings[index] = self._client.pairing(session_id)
                self._queued_bytes += num_bytes
                if self._queued_bytes <= MAX_QUEUED_BYTES:
                    self._queue.put_nowait((index, message, num_bytes))
                else:
                    self._overflow(index)
            case Done() | Tokenized():
                self._end(session_id)
                self._queue.put_nowait((index, message, 0))
            case Error():
                self._end(session_id)
                self._queue.put_nowait((index, RequestFailed(message.code, message.message), 0))

    def close(self) -> None:
        """Cancel what still runs. A second time does nothing."""
        running, self._running = self._running, {}
        for session_id in running:
            self._client.cancel(self.peer, session_id)

    def _end(self, session_id: str) -> None:
        del self._running[session_id]
        self._client.forget(session_id)

    def _overflow(self, index: int) -> None:
        """The reader does not read. Not a message alone is dropped but the request, and it is told why."""
        self._overflowed = True
        while not self._queue.empty():
            self._queue.get_nowait()
        text = f"more than {MAX_QUEUED_BYTES} bytes were waiting to be read"
        self._queue.put_nowait((index, RequestFailed("slow_reader", text), 0))
        # Not at once: the router is in the middle of delivering.
        loop = asyncio.get_running_loop()
        loop.call_soon(self.close)
        loop.call_soon(self.on_overflow)
