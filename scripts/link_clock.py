"""The time of an emulated link: when bytes came to a socket, and timers that are not late.

A core that slept gets round to reading some time after the bytes came.
Linux stamps what arrives; a link that counts its delay from there does not add how late its own process woke up. Where
there is no stamp, the time of reading has to do.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import struct
import sys
import time
from collections.abc import Sequence

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the stamps have the same number
STAMP_SPACE_BYTES = 64
PR_SET_TIMERSLACK = 29  # linux/prctl.h
MAX_AGE_S = 0.1
"""An older stamp is not believed: the wall clock, which stamps are of, may have been set meanwhile."""

Ancillary = Sequence[tuple[int, int, bytes]]


def ask_for_stamps(connection: socket.socket) -> None:
    """Have the system stamp what arrives, where it can."""
    if sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def tighten_timers() -> None:
    """Ask Linux for timers that are 1 µs late at most instead of 50; elsewhere nothing is asked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def arrived_at(ancillary: Ancillary, *, wall_ns: int, now: float) -> float:
    """When something came, on the clock that says `now`. `wall_ns` must have been read before `now`: whatever comes
    between the two then makes the answer later, so that a link is never faster than it should be."""
    for level, kind, stamp in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("@qq", stamp)
            age_s = (wall_ns - seconds * 10**9 - nanoseconds) * 1e-9
            return now - age_s if 0 <= age_s <= MAX_AGE_S else now
    return now


class Arrivals:
    """Reads one socket, with the time of each arrival; times never run backwards."""

    def __init__(self, source: socket.socket, read_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._source, self._read_bytes = source, read_bytes
        self._last_at = self._loop.time()

    async def next(self, not_before: float) -> tuple[bytes, float]:
        """The next bytes, empty at the end of them, and when they came.

        Args:
            not_before: when there was room for them; until then they were held up in front of the link.

        Raises:
            OSError: the connection was reset.
        """
        while True:
            try:
                data, ancillary, _, _ = self._source.recvmsg(self._read_bytes, STAMP_SPACE_BYTES)
                break
            except BlockingIOError:
                await self._readable()
        wall_ns = time.time_ns()
        at = arrived_at(ancillary, wall_ns=wall_ns, now=self._loop.time())
        self._last_at = max(self._last_at, not_before, at)
        return data, self._last_at

    async def _readable(self) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(self._source, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(self._source)
