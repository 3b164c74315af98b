"""What the hop bench calls odd, on real sockets: waits of the kernel's own, and links that the emulator makes odd.

No test asserts a duration: an oddity is found or not, and what makes it one is ten times what a busy machine adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from scripts import hop
from scripts.hop import find_idle_limit, measure, measure_after_idle
from scripts.hop_exchange import Exchange, _receive, connected, listening, request
from scripts.hop_report import delayed_ack_steps, fit_hop, oddities
from scripts.link_emulator import EmulatedLink, emulated_link
from scripts.link_shape import LinkShape

SIZES = (16, 4096, 1 << 18)


@pytest.fixture
async def link() -> AsyncIterator[EmulatedLink]:
    """A link to a hop bench that listens."""
    async with listening(("127.0.0.1", 0), "tcp") as port, emulated_link(("127.0.0.1", port), LinkShape()) as link:
        yield link


@contextlib.contextmanager
def two_writes(port: int, *, nodelay: bool) -> Iterator[Exchange]:
    """A client that writes the header of a request by itself, as many do."""
    loop, scratch = asyncio.get_running_loop(), bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, nodelay)

        async def exchange(request_bytes: int, answer_bytes: int) -> None:
            message = request(request_bytes, answer_bytes)
            await loop.sock_sendall(connection, message[:8])
            await loop.sock_sendall(connection, message[8:])
            await _receive(connection, answer_bytes, scratch)

        yield exchange


@pytest.mark.skipif(sys.platform != "linux", reason="what is waited for is Linux's delayed acknowledgement")
@pytest.mark.parametrize("nodelay", [False, True])
async def test_c072_two_small_writes_wait_for_the_acknowledgement_and_the_sizes_are_named(
    link: EmulatedLink, nodelay: bool
) -> None:
    with two_writes(link.port, nodelay=nodelay) as exchange:
        samples = await measure(exchange, SIZES, seconds=0)
    found = delayed_ack_steps(samples)
    # 256 KiB fill segments of their own, which go at once.
    assert [int(text.split()[0]) for text in found] == ([] if nodelay else [16, 4096])
    assert all("Nagle against a delayed acknowledgement; set TCP_NODELAY" in text for text in found)


async def test_our_own_exchange_has_no_such_step(link: EmulatedLink) -> None:
    async with connected(("127.0.0.1", link.port), "tcp") as exchange:
        samples = await measure(exchange, SIZES, seconds=0)
    assert delayed_ack_steps(samples) == []


Hurt = Callable[[EmulatedLink], None]


@pytest.mark.parametrize("hurt", [EmulatedLink.cut, EmulatedLink.swallow], ids=["reset", "silence"])
async def test_a_link_that_forgets_idle_connections_is_found_whether_it_resets_or_falls_silent(
    link: EmulatedLink, monkeypatch: pytest.MonkeyPatch, hurt: Hurt
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def idle(seconds: float) -> None:
        # The middlebox's own clock: it forgets a connection that is silent for 60 s or more.
        if seconds >= 60:
            hurt(link)
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(hop.asyncio, "sleep", idle)
    limit = await find_idle_limit(
        lambda: connected(("127.0.0.1", link.port), "tcp"), (1.0, 30.0, 60.0, 350.0), reply_timeout_s=3.0
    )
    assert limit == (30.0, 60.0)
    assert [pause for pause in pauses if pause >= 1] == [1.0, 30.0, 60.0]
    assert link.stats.num_connections == 3
    plain = fit_hop({size: [0.01 + size / 12.5e6] for size in SIZES})
    (found,) = oddities(up=plain, idle_limit=limit)
    assert "a connection idle for 60 s is dead (30 s is survived)" in found


async def test_a_link_that_forgives_every_pause_has_no_limit(
    link: EmulatedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr(hop.asyncio, "sleep", lambda seconds: sleep(0))
    assert await find_idle_limit(lambda: connected(("127.0.0.1", link.port), "tcp"), (1.0, 60.0)) is None


async def test_a_link_that_is_slow_after_a_pause_is_named_with_its_cure(
    link: EmulatedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator carries bytes, not segments, so a stall stands for the round trips of a new slow start."""
    sleep = asyncio.sleep

    async def idle(seconds: float) -> None:
        if seconds == 7.0:
            link.stall(0.5)
        await sleep(0)

    monkeypatch.setattr(hop.asyncio, "sleep", idle)
    async with connected(("127.0.0.1", link.port), "tcp") as exchange:
        warm_s, after_idle_s = await measure_after_idle(exchange, 1 << 20, idle_s=7.0)
    assert len(warm_s) == len(after_idle_s) == 3
    plain = fit_hop({size: [0.01 + size / 12.5e6] for size in SIZES})
    (found,) = oddities(up=plain, warm_s=warm_s, after_idle_s=after_idle_s)
    assert "slow start after idle; on both ends: sysctl net.ipv4.tcp_slow_start_after_idle=0" in found
