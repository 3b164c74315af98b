"""A spot instance's notice, from a fake metadata service on loopback."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from wire.aio.process import told_to_stop
from wire.aio.spot import ACTION_PATH, TOKEN_PATH, seconds_left, spot_notice

NOW = datetime(2026, 12, 1, 6, 0, tzinfo=UTC)


@dataclass
class Metadata:
    """Answers as EC2's service does: a token for a PUT, and the notice only to who has it."""

    notice: str = ""
    fail: bool = False
    asked: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def heard(self, num: int) -> None:
        """Wait until it has been asked so often."""
        for _ in range(num):
            await asyncio.wait_for(self.asked.get(), 10)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, _, headers = head.partition("\r\n")
        self.asked.put_nowait(line)
        status, body = "404 Not Found", ""
        if self.fail:
            status = "500 Internal Server Error"
        elif line.startswith(f"PUT {TOKEN_PATH} ") and "x-aws-ec2-metadata-token-ttl-seconds" in headers.lower():
            status, body = "200 OK", "the-token"
        elif line.startswith(f"GET {ACTION_PATH} "):
            if "x-aws-ec2-metadata-token: the-token" not in headers.lower():
                status = "401 Unauthorized"
            elif self.notice:
                status, body = "200 OK", self.notice
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()


@pytest.fixture
async def metadata() -> AsyncIterator[Metadata]:
    metadata = Metadata()
    server = await asyncio.start_server(metadata.serve, "127.0.0.1", 0)
    metadata.port = server.sockets[0].getsockname()[1]
    yield metadata
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("goes_at", "left_s"),
    [
        ("2026-12-01T06:02:00Z", 120.0),
        ("2026-12-01T06:00:30Z", 30.0),
        ("2026-12-01T06:00:30", 30.0),
        ("2026-12-01T09:00:00Z", 120.0),
        ("2026-12-01T05:59:00Z", 0.0),
    ],
    ids=["now given", "late", "without a zone", "our clock is behind", "our clock is ahead"],
)
def test_c045_c068_what_is_left_is_bounded_whatever_the_clocks_say(goes_at: str, left_s: float) -> None:
    assert seconds_left(f'{{"action":"terminate","time":"{goes_at}"}}'.encode(), NOW) == left_s


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"time":5}', b'{"time":"soon"}'])
def test_what_is_no_notice_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        seconds_left(body, NOW)


async def test_c068_the_notice_is_waited_for(metadata: Metadata) -> None:
    waiting = asyncio.create_task(spot_notice(metadata.url + "/", poll_s=0.01))
    await metadata.heard(6)
    assert not waiting.done()
    metadata.notice = f'{{"action":"terminate","time":"{(datetime.now(UTC) + timedelta(seconds=90)).isoformat()}"}}'
    assert 80 < await asyncio.wait_for(waiting, 10) <= 90


async def test_a_service_that_fails_is_told_once_and_asked_on(
    metadata: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    metadata.fail = True
    waiting = asyncio.create_task(spot_notice(metadata.url, poll_s=0.01))
    await metadata.heard(4)
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    metadata.fail = False
    metadata.notice = '{"action":"stop","time":"2000-01-01T00:00:00Z"}'
    assert await asyncio.wait_for(waiting, 10) == 0.0


async def test_c068_a_node_that_gets_the_notice_drains_for_the_time_that_is_left(metadata: Metadata) -> None:
    metadata.notice = '{"action":"terminate","time":"2999-01-01T00:00:00Z"}'
    config = SimpleNamespace(spot_metadata=metadata.url, spot_poll_s=0.01, grace_s=7.0)
    grace_s, reason = await asyncio.wait_for(told_to_stop(asyncio.Event(), config), 10)  # type: ignore[arg-type]
    assert (grace_s, reason) == (110.0, "its spot instance goes in 120 s")


@pytest.mark.parametrize("watching", [True, False])
async def test_a_signal_is_heard_while_the_notice_is_waited_for(metadata: Metadata, watching: bool) -> None:
    config = SimpleNamespace(spot_metadata=metadata.url if watching else "", spot_poll_s=0.01, grace_s=7.0)
    stop = asyncio.Event()
    waiting = asyncio.create_task(told_to_stop(stop, config))  # type: ignore[arg-type]
    if watching:
        await metadata.heard(1)
    stop.set()
    assert await asyncio.wait_for(waiting, 10) == (7.0, "the node was told to stop")
