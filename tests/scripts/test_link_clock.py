"""Bytes are taken for as old as the system says, and never for older than a link may."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import time

import pytest

from scripts import link_clock
from scripts.link_clock import SO_TIMESTAMPNS, Ancillary, Arrivals, arrived_at, ask_for_stamps

WALL_NS = 1_700_000_000_500_000_000


def be_busy() -> None:
    """As a loop that has other things to do; what comes meanwhile came at the beginning of it."""
    time.sleep(0.02)


def stamped(age_s: float) -> Ancillary:
    seconds, nanoseconds = divmod(WALL_NS - round(age_s * 1e9), 10**9)
    return [(socket.SOL_SOCKET, SO_TIMESTAMPNS, struct.pack("@qq", seconds, nanoseconds))]


def test_what_is_stamped_came_before_it_was_read() -> None:
    assert arrived_at(stamped(0.0625), wall_ns=WALL_NS, now=7.0) == pytest.approx(6.9375)
    assert arrived_at(stamped(0.6), wall_ns=WALL_NS, now=7.0) == 7.0  # more than is believed
    assert arrived_at(stamped(-0.001), wall_ns=WALL_NS, now=7.0) == 7.0  # the wall clock was set back


@pytest.mark.parametrize("ancillary", [[], [(socket.SOL_SOCKET, SO_TIMESTAMPNS + 1, b"")], [(0, SO_TIMESTAMPNS, b"")]])
def test_without_a_stamp_it_came_when_it_was_read(ancillary: Ancillary) -> None:
    assert arrived_at(ancillary, wall_ns=WALL_NS, now=7.0) == 7.0


@pytest.mark.skipif(sys.platform != "linux", reason="stamps are Linux's")
async def test_bytes_that_wait_while_the_loop_is_busy_keep_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_clock, "MAX_AGE_S", 60.0)
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        with sender, receiver:
            receiver.setblocking(False)
            ask_for_stamps(receiver)
            arrivals = Arrivals(receiver, 1024)
            for _ in range(100):  # the system begins to stamp some time after it is asked
                sent = loop.time()
                sender.sendall(b"two")
                be_busy()
                woken = loop.time()
                data, at = await arrivals.next(0.0)
                assert data == b"two"
                if at < woken:
                    break
            assert sent <= at < woken
            # A link that had no room for them counts from when it had.
            sender.sendall(b"three")
            room_at = loop.time() + 5
            assert await arrivals.next(room_at) == (b"three", room_at)
            # And no time runs backwards.
            sender.sendall(b"four")
            assert await arrivals.next(0.0) == (b"four", room_at)


async def test_the_end_and_a_reset_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for linger, expected in ((None, b""), (struct.pack("ii", 1, 0), ConnectionResetError)):
            sender = socket.create_connection(listener.getsockname())
            receiver, _ = listener.accept()
            with receiver:
                receiver.setblocking(False)
                waiting = asyncio.ensure_future(Arrivals(receiver, 1024).next(0.0))
                await asyncio.sleep(0)
                if linger is not None:
                    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                sender.close()
                (result,) = await asyncio.gather(waiting, return_exceptions=True)
                if linger is None:
                    assert result[0] == expected
                else:
                    assert isinstance(result, ConnectionResetError)
