from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

from wire.aio import link as link_module
from wire.aio.causes import closed_by, without_secrets
from wire.aio.link import Link, dial
from wire.aio.quiet import MAX_BURST, RateLimited
from wire.aio.sockets import link_options
from wire.codec import append_residence, decode, encode
from wire.errors import LinkLost, PeerMismatch, ProtocolError, QueueFull, Refused, VersionMismatch
from wire.messages import MAX_FRAME_BYTES, Acceptance, Cancel, Error, Hello, OpenSession, Release

if TYPE_CHECKING:
    from tests.wire.conftest import RelayDouble
else:
    RelayDouble = Any

RELEASE = encode(Release(session="s1"))


@contextlib.asynccontextmanager
async def running(link: Link) -> AsyncIterator[tuple[asyncio.Queue[bytes], asyncio.Task[None]]]:
    """Runs a link; yields its incoming frames and the task, which tells how it ended."""
    frames = asyncio.Queue[bytes]()
    task = asyncio.create_task(link.run(lambda kind, session, frame, now: frames.put_nowait(frame)), name="run")
    try:
        yield frames, task
    finally:
        await link.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def lost(task: asyncio.Task[None]) -> str:
    with pytest.raises(LinkLost) as caught:
        async with asyncio.timeout(5.0):
            await task
    return str(caught.value)


def nodelay(link: Link) -> int:
    sock: socket.socket = link.websocket.transport.get_extra_info("socket")
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_frames_go_both_ways_in_order(relay: RelayDouble, secret: str, hello: Hello) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (frames, _):
        for i in range(200):
            link.send(Cancel(session="s1", reason=str(i)))
        assert [decode(await relay.frames.get()) for _ in range(200)] == [
            Cancel(session="s1", reason=str(i)) for i in range(200)
        ]
        relay.links[0].send(RELEASE)
        assert await frames.get() == RELEASE


async def test_c072_nothing_waits_for_a_full_segment_on_either_end(
    relay: RelayDouble, secret: str, hello: Hello
) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (frames, _):
        relay.links[0].send(RELEASE)
        await frames.get()
        assert nodelay(link) == nodelay(relay.links[0]) == 1


async def test_c075_no_compression_and_no_keepalive_of_the_librarys_own(
    relay: RelayDouble, secret: str, hello: Hello
) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link):
        assert link.websocket.protocol.extensions == []
        assert link.websocket.ping_interval is None
        assert link.websocket.protocol.max_message_size == MAX_FRAME_BYTES


async def test_a_frame_is_rewritten_just_before_it_leaves(relay: RelayDouble, secret: str, hello: Hello) -> None:
    relay.on_write = lambda frame, queued_at, now: (
        append_residence(frame, now - queued_at) if b'"acceptance"' in frame else frame
    )
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (frames, _):
        now = asyncio.get_running_loop().time()
        relay.links[0].send(Acceptance(session="s1", epoch=1, start=1, tokens=(1,)), now=now - 2.0)
        message = decode(await frames.get())
        assert isinstance(message, Acceptance)
        assert 2.0 <= message.relay_s < 10.0


async def test_a_peer_that_does_not_read_fills_a_bounded_queue(relay: RelayDouble, secret: str, hello: Hello) -> None:
    link = await dial(relay.url, secret=secret, hello=hello, max_queued_bytes=1000)
    async with running(link):
        link.send(b"x" * 900)
        with pytest.raises(
            QueueFull, match=r"1 frames \(900 bytes\) wait already; the limits are 4096 frames and 1000"
        ):
            link.send(b"x" * 101)
        assert (link.num_queued, link.queued_bytes) == (1, 900)
        link._outbox.max_frames = 1
        with pytest.raises(QueueFull):
            link.send(b"x")


async def test_flush_waits_until_all_is_written(relay: RelayDouble, secret: str, hello: Hello) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link):
        link.send(RELEASE)
        link.send(RELEASE)
        await link.flush()
        assert link.num_queued == link.queued_bytes == 0
        assert [await relay.frames.get() for _ in range(2)] == [RELEASE, RELEASE]


async def test_c080_a_lost_link_says_who_closed_it_and_why(relay: RelayDouble, secret: str, hello: Hello) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (frames, task):
        relay.links[0].send(RELEASE)
        await frames.get()
        await relay.links[0].close(1001, "maintenance " + "é" * 100)
        assert (await lost(task)).startswith("closed by the peer with code 1001 (maintenance é")
    assert str(await relay.ended.get()).startswith("closed by us with code 1001 (maintenance")


async def test_c080_a_connection_that_is_cut_says_so(relay: RelayDouble, secret: str, hello: Hello) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (frames, task):
        relay.links[0].send(RELEASE)
        await frames.get()
        relay.links[0].abort()
        assert "the connection was cut" in await lost(task)


@pytest.mark.parametrize(
    ("rcvd_first", "cause"),
    [(True, "closed by the peer with code 1001 (bye)"), (False, "closed by us with code 1009 (too big)")],
)
def test_c080_of_two_close_frames_the_first_tells_who_closed(rcvd_first: bool, cause: str) -> None:
    assert closed_by(ConnectionClosedError(Close(1001, "bye"), Close(1009, "too big"), rcvd_first)) == cause


async def test_a_pong_brings_the_next_ping_forward(relay: RelayDouble, secret: str, hello: Hello) -> None:
    relay.ping_interval_s, relay.ping_timeout_s = 0.01, 60.0
    pings = asyncio.Queue[bytes]()

    def note(frame: bytes, queued_at: float, now: float) -> bytes:
        if b'"ping"' in frame:
            pings.put_nowait(frame)
        return frame

    relay.on_write = note
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link), asyncio.timeout(10.0):
        for _ in range(3):
            await pings.get()


async def test_c032_an_oversize_frame_is_our_side_closing(relay: RelayDouble, secret: str, hello: Hello) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (_, task):
        await link.websocket.send(b" " * (MAX_FRAME_BYTES + 1), text=True)
        assert "closed by the peer with code 1009" in await lost(task)
        assert "closed by us with code 1009" in str(await relay.ended.get())


async def test_a_malformed_frame_ends_the_link_unless_somebody_takes_it(
    relay: RelayDouble, secret: str, hello: Hello
) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link):
        link.send(b"{")
        assert isinstance(await relay.ended.get(), ProtocolError)


async def test_c029_pings_are_answered_while_a_thread_is_blocked(relay: RelayDouble, secret: str, hello: Hello) -> None:
    relay.ping_interval_s, relay.ping_timeout_s = 0.05, 0.25
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (_, task):
        await asyncio.to_thread(time.sleep, 1.0)
        assert not task.done()
        assert relay.ended.empty()
        assert relay.links[0].rtt_s is not None
        assert relay.links[0].rtt_s < 0.1


async def test_c029_c080_a_blocked_loop_does_not_kill_the_link_and_is_logged(
    relay: RelayDouble, secret: str, hello: Hello, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "stalls", RateLimited(link_module.log, logging.WARNING))
    relay.ping_interval_s, relay.ping_timeout_s = 0.05, 0.1
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (frames, task):
        relay.links[0].send(RELEASE)
        await frames.get()
        time.sleep(0.5)  # noqa: ASYNC251  # what this test is about
        relay.links[0].send(RELEASE)
        assert await frames.get() == RELEASE
        await asyncio.sleep(0.3)
        assert not task.done()
        assert relay.ended.empty()
    assert "our own event loop was blocked" in caplog.text


async def test_c080_a_blocked_loop_is_told_a_few_times_however_many_links_it_has(
    relay: RelayDouble, secret: str, hello: Hello, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "stalls", RateLimited(link_module.log, logging.WARNING))
    relay.ping_interval_s, relay.ping_timeout_s = 0.05, 0.1
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(running(await dial(relay.url, secret=secret, hello=hello)))
        time.sleep(0.5)  # noqa: ASYNC251  # what this test is about
        while not any(link.connection.stalled_s for link in relay.links):  # noqa: ASYNC110  # nothing to wait on
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert relay.ended.empty()
    assert caplog.text.count("our own event loop was blocked") <= MAX_BURST


class SwallowingProxy:
    """Forwards bytes until `broken`; then the path is dead, without FIN or RST.

    Args:
        reading: whether what is sent is still taken in (a lost path) or piles up at the sender (a full one).
    """

    def __init__(self, port: int, *, reading: bool) -> None:
        self.port = port
        self.reading = reading
        self.broken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> SwallowingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.listening = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65_536):
                if not self.broken.is_set():
                    sink.write(data)
                elif not self.reading:
                    await asyncio.Event().wait()
            await asyncio.Event().wait()
        except ConnectionError:
            await asyncio.Event().wait()
        finally:
            sink.transport.abort()


@pytest.mark.parametrize("reading", [True, False], ids=["lost", "full"])
async def test_c030_both_sides_leave_a_dead_path_in_bounded_time(
    relay: RelayDouble, secret: str, hello: Hello, monkeypatch: pytest.MonkeyPatch, reading: bool
) -> None:
    interval_s, timeout_s, close_s = 0.2, 0.3, 0.2
    relay.ping_interval_s, relay.ping_timeout_s = interval_s, timeout_s
    monkeypatch.setattr(link_module, "CLOSE_TIMEOUT_S", close_s)
    before = asyncio.all_tasks()
    async with SwallowingProxy(relay.port, reading=reading) as proxy:
        link = await dial(f"ws://127.0.0.1:{proxy.listening}", secret=secret, hello=hello)
        async with running(link) as (frames, task):
            relay.links[0].send(RELEASE)
            await frames.get()
            proxy.broken.set()
            broken_at = time.monotonic()
            if not reading:
                for end in (link, relay.links[0]):
                    for _ in range(7):
                        end.send(b" " * (MAX_FRAME_BYTES - 1))
            assert "peer silent for" in await lost(task)
            await link.close(1011, "peer silent")
            assert "peer silent for" in str(await asyncio.wait_for(relay.ended.get(), 5.0))
            assert time.monotonic() - broken_at < interval_s + timeout_s + close_s + 0.3
            link_tasks = {task.get_name() for task in asyncio.all_tasks() - before if "link" in task.get_name()}
            assert not link_tasks


@pytest.mark.parametrize(
    ("code", "error"), [("mismatch", PeerMismatch), ("version", VersionMismatch), ("duplicate", Refused)]
)
async def test_a_refusal_in_the_handshake_is_raised_by_its_code(
    relay: RelayDouble, secret: str, hello: Hello, code: str, error: type[Exception]
) -> None:
    relay.refuse_code = code
    with pytest.raises(error, match=r"^not today$"):
        await dial(relay.url, secret=secret, hello=hello)


async def test_a_fatal_error_on_an_open_link_is_raised_as_such(relay: RelayDouble, secret: str, hello: Hello) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (_, task):
        link.send(RELEASE)
        await relay.frames.get()
        relay.links[0].send(Error(code="mismatch", message="d1 does not fit"))
        with pytest.raises(PeerMismatch, match="d1 does not fit"):
            await task


async def test_a_wrong_secret_is_refused_in_one_line_that_shows_no_secret(
    relay: RelayDouble, hello: Hello, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Refused, match=r"refused our secret \(401\): check FOREDRAFT_SECRET") as caught:
        await dial(relay.url, secret="hush-hush-hush", hello=hello)
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)


async def test_the_secret_is_in_no_log_and_not_in_the_path(
    relay: RelayDouble, secret: str, hello: Hello, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("websockets").setLevel(logging.WARNING)  # as `setup_logging` does
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (frames, _):
        relay.links[0].send(RELEASE)
        await frames.get()
        request = relay.links[0].websocket.request
        assert request is not None
        assert secret not in request.path
    assert secret not in caplog.text


async def test_a_secret_in_the_address_is_turned_down_unread(hello: Hello, secret: str) -> None:
    with pytest.raises(Refused, match="FOREDRAFT_SECRET, not in the address") as caught:
        await dial("ws://user:tell-nobody@127.0.0.1:9", secret=secret, hello=hello)
    assert "tell-nobody" not in str(caught.value)
    assert without_secrets("wss://relay:1/p?secret=x#y") == "wss://relay:1/p"


async def test_nobody_at_the_address_is_a_lost_link_that_names_it(hello: Hello, secret: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(LinkLost, match=f"no relay answers at ws://127.0.0.1:{port}: "):
            await dial(f"ws://127.0.0.1:{port}?key=x", secret=secret, hello=hello)
        unused.listen()  # and never accept
        with pytest.raises(LinkLost, match=f"no relay answers at ws://127.0.0.1:{port} within 0.1 s"):
            await dial(f"ws://127.0.0.1:{port}", secret=secret, hello=hello, open_timeout_s=0.1)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:8700", "relay"])
async def test_what_is_no_websocket_address_is_refused(hello: Hello, secret: str, url: str) -> None:
    with pytest.raises(Refused, match="must be ws://HOST:PORT or wss://HOST:PORT, got"):
        await dial(url, secret=secret, hello=hello)


async def test_proxies_of_the_environment_are_ignored(
    relay: RelayDouble, secret: str, hello: Hello, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link) as (frames, _):
        relay.links[0].send(RELEASE)
        assert await frames.get() == RELEASE


async def test_a_peer_that_upgrades_and_then_says_nothing_is_dropped(relay: RelayDouble, secret: str) -> None:
    headers = {"Authorization": f"Bearer {secret}"}
    async with connect(relay.url, additional_headers=headers, proxy=None, **link_options()):
        ended = await asyncio.wait_for(relay.ended.get(), 5.0)
    assert "did not complete its handshake within 1 s" in str(ended)


async def test_c044_a_small_frame_overtakes_a_big_one_on_a_link_that_is_full(
    relay: RelayDouble, secret: str, hello: Hello
) -> None:
    """The peer stops reading until the socket is full of the big frame; what is sent then arrives before its end."""
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link):
        (far,) = relay.links
        far.websocket.transport.pause_reading()
        big = encode(OpenSession(session="big", prompt="x" * 900_000))
        for _ in range(7):
            link.send(big)
        await asyncio.wait_for(link._full.wait(), 10.0)
        small = encode(Cancel(session="small"))
        link.send(small)
        far.websocket.transport.resume_reading()
        came = [await asyncio.wait_for(relay.frames.get(), 20.0) for _ in range(8)]
        assert sorted(map(len, came)) == sorted([len(small)] + 7 * [len(big)])
        assert came[-1] != small


async def test_c044_a_part_of_a_frame_is_a_sign_of_life(relay: RelayDouble, secret: str, hello: Hello) -> None:
    link = await dial(relay.url, secret=secret, hello=hello)
    async with running(link):
        (far,) = relay.links
        before = far.connection._heard_at
        await link.websocket.send(b"\0\0x", text=False)
        link.send(encode(Cancel(session="s")))
        assert await asyncio.wait_for(relay.frames.get(), 10.0) == encode(Cancel(session="s"))
        assert far.connection._heard_at > before
        await link.websocket.send(b"\0\1y", text=False)
        assert isinstance(await asyncio.wait_for(relay.ended.get(), 10.0), ProtocolError), "xy is no frame"


@pytest.mark.parametrize("url", ["ws://127.0.0.1:99999", "ws://127.0.0.1:port"])
async def test_an_address_with_no_port_that_exists_is_refused(hello: Hello, secret: str, url: str) -> None:
    with pytest.raises(Refused, match="must be ws://HOST:PORT or wss://HOST:PORT, got"):
        await dial(url, secret=secret, hello=hello)


async def test_a_name_that_cannot_be_one_is_nobody(hello: Hello, secret: str) -> None:
    for name in ("a..b", "a" * 64):
        with pytest.raises(LinkLost, match="no relay answers at ws://"):
            await dial(f"ws://{name}:8765", secret=secret, hello=hello)


async def test_one_address_of_a_name_may_be_a_dead_end(
    relay: RelayDouble, secret: str, hello: Hello, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As IPv6 often is: its packets go nowhere, and nobody says so."""
    loop = asyncio.get_running_loop()
    ask = loop.getaddrinfo

    async def both(host: Any, port: Any, **options: Any) -> Any:
        return await ask("127.0.0.1", 1, **options) + await ask("127.0.0.1", relay.port, **options)

    connect_to = loop.sock_connect

    async def swallowed(sock: socket.socket, address: Any) -> None:
        await (asyncio.Event().wait() if address[1] == 1 else connect_to(sock, address))

    monkeypatch.setattr(loop, "getaddrinfo", both)
    monkeypatch.setattr(loop, "sock_connect", swallowed)
    link = await dial(f"ws://relay.example:{relay.port}", secret=secret, hello=hello)
    await link.close()


async def test_a_redirect_to_a_web_page_may_not_be_there_next_time(hello: Hello, secret: str) -> None:
    """A proxy in front of a relay that is away for a while."""

    async def moved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: https://status.example/\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(moved, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        with pytest.raises(LinkLost, match="no relay answers at ws://"):
            await dial(f"ws://127.0.0.1:{port}", secret=secret, hello=hello)
