"""A WebSocket link: the sans-IO `Connection` over the websockets library.

Reader, writer and keepalive of a link are one task group; when one of them ends, all do, and `run` raises why. Frames
go out through a bounded queue: `send` never waits, and says when the queue is full. What is queued in one turn of the
event loop leaves in one write; the writer task has work only when the socket takes no more.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidProxy, InvalidStatus, InvalidURI
from websockets.protocol import State as WebSocketState

from wire.aio.causes import closed_by, first, without_secrets
from wire.aio.quiet import RateLimited
from wire.aio.sockets import BINARY, CLOSE_TIMEOUT_S, TEXT, WebSocket, link_options, server_header, set_nodelay
from wire.codec import encode
from wire.connection import Connection, Opened, PeerHello, Received, State
from wire.errors import LinkLost, ProtocolError, Refused
from wire.messages import Hello, Message, Welcome
from wire.outbox import Outbox
from wire.parts import Assembler, is_part

OnFrame = Callable[[str, str | None, bytes, float], None]
"""Called with type, session, frame and time of arrival."""
OnWrite = Callable[[bytes, float, float], bytes]
"""Called just before a frame is written, with the frame, the time it was queued and now; returns what to write."""
OnMalformed = Callable[[ProtocolError, float], None]
"""Called with what is wrong with a frame, and its time of arrival; the link goes on."""

MAX_WRITE_BYTES = 128 << 10
"""Handed to the socket at once; more waits a turn of the loop, so that one link does not hold up the others."""
MAX_UNSENT_BYTES = 32 << 10
"""Bytes in the transport's own buffer from which on the socket counts as full."""
NEXT_ADDRESS_S = 0.25
ADDRESS_HELP = "the relay's address must be ws://HOST:PORT or wss://HOST:PORT"
log = logging.getLogger(__name__)
stalls = RateLimited(log, logging.WARNING)
"""Of all links together: a loop that was blocked was blocked for every one of them."""


class Link:
    """One link, once its handshake is under way.

    Args:
        max_queued_frames, max_queued_bytes: bounds of the outgoing queue.
        on_write: see `OnWrite`.
        on_malformed: see `OnMalformed`; without it a malformed frame ends the link.
        pace: called with the size of each frame read and the time; says how many seconds not to read.

    Attributes:
        num_read, num_written, bytes_read, bytes_written: frames and their sizes so far.
    """

    def __init__(
        self,
        websocket: WebSocket,
        connection: Connection,
        *,
        max_queued_frames: int = 4096,
        max_queued_bytes: int = 8 << 20,
        on_write: OnWrite | None = None,
        on_malformed: OnMalformed | None = None,
        pace: Callable[[int, float], float] | None = None,
    ) -> None:
        self.websocket = websocket
        self.connection = connection
        self._outbox = Outbox(max_queued_frames, max_queued_bytes)
        self.on_write = on_write
        self._on_malformed = on_malformed
        self.pace = pace
        self.num_read = self.num_written = 0
        self.bytes_read = self.bytes_written = 0
        self._assembler = Assembler()
        self._flushing: asyncio.Handle | None = None
        self._running = False
        self._full = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._rearm = asyncio.Event()
        self._timer_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._closing: str | None = None
        # A client's frames are masked, which is the library's business; a server's are the frame behind its length.
        self._masks = not isinstance(websocket, ServerConnection) or bool(websocket.protocol.extensions)
        set_nodelay(websocket)

    @property
    def rtt_s(self) -> float | None:
        """Round trip to the peer, see `Connection.rtt_s`."""
        return self.connection.rtt_s

    @property
    def num_queued(self) -> int:
        """Frames that wait to be written."""
        return len(self._outbox)

    @property
    def queued_bytes(self) -> int:
        """Their size."""
        return self._outbox.num_bytes

    def send(self, message: Message | bytes, *, now: float | None = None) -> None:
        """Queue a frame. `now` is when it was ours to send, if that was earlier.

        Raises:
            QueueFull: nothing was queued.
            FrameTooLarge: the message does not fit a frame.
        """
        frame = message if isinstance(message, bytes) else encode(message)
        self._outbox.add(frame, self._loop.time() if now is None else now)
        self._flush_soon()

    async def handshake(self) -> Opened | PeerHello:
        """Exchange frames until the peer is known: its Hello for an acceptor, the Welcome for a dialer.

        Raises:
            LinkLost, Refused, PeerMismatch, ProtocolError: see `Connection.receive`.
        """
        loop = asyncio.get_running_loop()
        try:
            await self._write_own()
            while True:
                async with asyncio.timeout_at(self.connection.next_timer()):
                    frame = await self.websocket.recv(decode=False)
                for event in self.connection.receive(frame, loop.time()):
                    if isinstance(event, Opened | PeerHello):
                        return event
        except TimeoutError:
            self.connection.on_timer(loop.time())
            raise LinkLost("the peer did not complete its handshake in time") from None
        except ConnectionClosed as exc:
            raise LinkLost(closed_by(exc)) from exc
        finally:
            await self._write_own()

    async def accept(self, welcome: Welcome) -> None:
        """Let the peer in; see `Connection.accept`. A peer that is gone already is found by `run`."""
        self.connection.accept(welcome, asyncio.get_running_loop().time())
        await self._write_own()

    async def refuse(self, code: str, message: str) -> None:
        """Turn the peer away; see `Connection.refuse`. The caller then closes the link."""
        self.connection.refuse(code, message)
        await self._write_own()

    async def run(self, on_frame: OnFrame) -> None:
        """Carry frames until the link ends; always raises.

        Raises:
            LinkLost: with the cause: the peer was silent, closed with a code, or we closed.
            ProtocolError: the peer sent a malformed frame.
        """
        self._running = True
        self._flush_soon()
        try:
            # In a task of its own: a failing task group cancels its parent, and that must not look like our end.
            await asyncio.create_task(self._carry(on_frame), name="link")
        except BaseExceptionGroup as group:
            # Not `except*`: that would wrap what is raised here in a group again.
            cause = first(group)
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The link broke while we were being cancelled; the group reports the break alone.
                raise asyncio.CancelledError from cause
            if isinstance(cause, ConnectionClosed):
                raise LinkLost(self._closing or closed_by(cause)) from cause
            raise cause from None
        finally:
            self._running = False
            self._drained.set()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the link; takes at most CLOSE_TIMEOUT_S, then the socket is cut."""
        self._closing = f"closed by us with code {code} ({reason})"
        # A close frame carries 123 bytes of reason at most.
        reason = reason.encode()[:120].decode(errors="ignore")
        try:
            # The library's own close_timeout starts only when its send buffer has room for the close frame, which it
            # never has on a path that died while full.
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                # asyncio's transport has no loop any more once it has flushed and closed, and falls over the library's
                # abort; but then it is closed.
                with suppress(AttributeError):
                    await self.websocket.close(code, reason)
        except TimeoutError:
            self.abort()
            await self.websocket.wait_closed()

    def abort(self) -> None:
        """Cut the socket, without a word."""
        with suppress(AttributeError):  # see `close`
            self.websocket.transport.abort()

    def doubt(self) -> None:
        """See `Connection.doubt`."""
        self.connection.doubt(self._loop.time())
        self._rearm.set()
        self._put_own(self._loop.time())

    async def flush(self) -> None:
        """Wait until everything queued has been handed to the socket."""
        await self._drained.wait()

    async def _carry(self, on_frame: OnFrame) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(on_frame), name="link reader")
            tasks.create_task(self._write(), name="link writer")
            tasks.create_task(self._keep_alive(), name="link keepalive")

    async def _read(self, on_frame: OnFrame) -> None:
        while True:
            frame = await self.websocket.recv(decode=False)
            now = self._loop.time()
            self.num_read += 1
            self.bytes_read += len(frame)
            if self.pace is not None and (wait_s := self.pace(len(frame), now)) > 0:
                await self._rest(wait_s)
                now = self._loop.time()
            try:
                if is_part(frame):
                    whole = self._assembler.take(frame)
                    if whole is None:
                        self.connection.heard(now)
                        continue
                    frame = whole
                events = self.connection.receive(frame, now)
            except ProtocolError as exc:
                if self._on_malformed is None or self.connection.state is not State.OPEN:
                    raise
                self._on_malformed(exc, now)
                continue
            for event in events:
                if isinstance(event, Received):
                    on_frame(event.type, event.session, event.frame, now)
            if self.connection.has_frames_to_send:
                self._put_own(now)
            # A frame that only puts the timer off need not wake its task: it looks again when the old time has come.
            timer_at = self.connection.next_timer()
            if timer_at is not None and self._timer_at is not None and timer_at < self._timer_at:
                self._rearm.set()

    async def _rest(self, wait_s: float) -> None:
        """Read nothing for a while, or until the link is closed."""
        self.connection.listening = False
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.websocket.wait_closed()
        self.connection.listening = True

    async def _write(self) -> None:
        """Go on where the socket took no more, when it does again."""
        while True:
            await self._full.wait()
            # The library's way to wait for room in the socket; raises when the link is over.
            async with self.websocket.send_context():
                pass
            self._full.clear()
            self._write_queued()

    def _write_queued(self) -> None:
        """Hand what is queued to the socket, as far as it takes it; of a big frame, a part behind all small ones."""
        self._flushing = None
        websocket, outbox = self.websocket, self._outbox
        if not outbox:
            self._drained.set()
            return
        if not self._running or self._full.is_set() or websocket.protocol.state is not WebSocketState.OPEN:
            return
        now, num_bytes = self._loop.time(), 0
        written: list[bytes] = []
        on_write, masks = self.on_write, self._masks
        for frame, queued_at in outbox.take_small(MAX_WRITE_BYTES):
            if on_write is not None:
                frame = on_write(frame, queued_at, now)
            size = len(frame)
            num_bytes += size
            if masks:
                websocket.protocol.send_text(frame)
            else:
                written += (server_header(size), frame)
            self.num_written += 1
        if num_bytes < MAX_WRITE_BYTES and (entry := outbox.take_big()) is not None:
            frame = entry[0]
            opcode = BINARY if is_part(frame) else TEXT
            if not masks:
                written += (server_header(len(frame), opcode), frame)
            elif opcode == TEXT:
                websocket.protocol.send_text(frame)
            else:
                websocket.protocol.send_binary(frame)
            num_bytes += len(frame)
            self.num_written += 1
        self.bytes_written += num_bytes
        websocket.transport.write(b"".join(written or websocket.protocol.data_to_send()))
        # Parts go only as fast as the socket takes them; what is small need not wait for its acknowledgement.
        if websocket.transport.get_write_buffer_size() > (0 if outbox.has_big else MAX_UNSENT_BYTES):
            self._full.set()
        elif outbox:
            self._flush_soon()
        else:
            self._drained.set()

    def _flush_soon(self) -> None:
        self._drained.clear()
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self._write_queued)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._rearm.clear()
            self._timer_at = self.connection.next_timer()
            try:
                async with asyncio.timeout_at(self._timer_at):
                    await self._rearm.wait()
            except TimeoutError:
                stalled_s = self.connection.stalled_s
                self.connection.on_timer(loop.time())
                if self.connection.stalled_s > stalled_s:
                    text = "our own event loop was blocked for %.1f s; the peer gets another chance"
                    stalls("", text, self.connection.stalled_s - stalled_s)
                self._put_own(loop.time())

    def _put_own(self, now: float) -> None:
        self._outbox.add_first(self.connection.frames_to_send(), now)
        self._flush_soon()

    async def _write_own(self) -> None:
        for frame in self.connection.frames_to_send():
            try:
                await self.websocket.send(frame, text=True)
            except ConnectionClosed:
                return


async def dial(
    url: str,
    *,
    secret: str,
    hello: Hello,
    open_timeout_s: float = 10.0,
    ssl_context: ssl.SSLContext | None = None,
    proxy: str | None = None,
    max_queued_bytes: int = 8 << 20,
) -> Link:
    """Connect to the relay and shake hands. The caller then runs the link.

    Args:
        url: ws:// or wss://; it must not carry the secret.
        proxy: of the environment's proxies none is used unless one is named here.

    Raises:
        Refused, PeerMismatch, VersionMismatch: the relay turned us away.
        LinkLost: nobody answers at the url.
    """
    shown_url = without_secrets(url)
    if shown_url is None:
        raise Refused(f"{ADDRESS_HELP}; the secret belongs in FOREDRAFT_SECRET, not in the address")
    # Of a name with several addresses one may be a dead end: it must not use up the time of the others.
    options = link_options() | {"happy_eyeballs_delay": NEXT_ADDRESS_S}
    if ssl_context is not None:
        options["ssl"] = ssl_context
    try:
        connecting = connect(
            url,
            additional_headers={"Authorization": f"Bearer {secret}"},
            open_timeout=open_timeout_s,
            proxy=proxy,
            **options,
        )
    except (InvalidURI, ValueError) as exc:
        raise Refused(f"{ADDRESS_HELP}, got {shown_url}") from exc
    try:
        websocket = await connecting
    except InvalidStatus as exc:
        status = exc.response.status_code
        if status in (401, 403):
            raise Refused(f"the relay at {shown_url} refused our secret ({status}): check FOREDRAFT_SECRET") from exc
        raise LinkLost(f"the relay at {shown_url} answered with HTTP {status}") from exc
    except TimeoutError as exc:
        raise LinkLost(f"no relay answers at {shown_url} within {open_timeout_s:g} s") from exc
    except (OSError, UnicodeError, InvalidHandshake, InvalidURI, InvalidProxy, EOFError) as exc:
        raise LinkLost(f"no relay answers at {shown_url}: {str(exc).strip() or type(exc).__name__}") from exc
    now = asyncio.get_running_loop().time()
    connection = Connection.dialing(hello, now=now, handshake_timeout_s=open_timeout_s)
    link = Link(websocket, connection, max_queued_bytes=max_queued_bytes)
    try:
        await link.handshake()
    except BaseException:
        await link.close()
        raise
    return link
