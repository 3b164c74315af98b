"""What a process shows of itself over HTTP: /healthz, /readyz and /metrics, and how late its event loop is.

Nodes have no other open port than this one, and only if they are told to. It listens on the loopback unless told
otherwise, and speaks no WebSocket.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterable
from pathlib import Path

from wire.aio.listener import Listener, Page
from wire.metrics import CONTENT_TYPE, Family, Histogram, counter, gauge, render

BEAT_S = 0.25
BEATS_A_LOOK = 8
PAGE_BYTES = resource.getpagesize()
Reasons = Callable[[], list[str]]
"""Why the process is not healthy, or not ready; empty if it is."""


def health_page(path: str, *, unhealthy: Reasons, unready: Reasons) -> Page | None:
    """`/healthz` and `/readyz`: 200, or 503 with the reasons, one a line."""
    if path == "/healthz":
        reasons = unhealthy()
    elif path == "/readyz":
        reasons = unhealthy() + unready()
    else:
        return None
    return Page("\n".join(reasons) + "\n", 503) if reasons else Page("ok\n")


def metrics_page(families: Iterable[Family]) -> Page:
    """`/metrics`."""
    return Page(render(families), content_type=CONTENT_TYPE)


def resident_bytes() -> int:
    """Resident memory of this process, now where the system tells it, at its highest elsewhere."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * PAGE_BYTES
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Pulse:
    """How this process is doing: how late its event loop runs timers, its memory, its processor time."""

    def __init__(self) -> None:
        self.lag = Histogram()
        self._resident_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    async def beat(self) -> None:
        """Observe, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            for _ in range(BEATS_A_LOOK):
                due = loop.time() + BEAT_S
                await asyncio.sleep(BEAT_S)
                self.lag.observe(max(0.0, loop.time() - due))
            self._resident_bytes = await asyncio.to_thread(resident_bytes)

    def families(self) -> list[Family]:
        """The metrics."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        lag = self.lag.samples({})
        return [
            gauge("process_resident_memory_bytes", "Resident memory.", self._resident_bytes),
            counter("process_cpu_seconds_total", "Processor time, user and system.", usage.ru_utime + usage.ru_stime),
            Family("foredraft_loop_lag_seconds", "histogram", "How late the event loop runs a timer.", lag),
        ]


class StatusServer:
    """The status port of a node."""

    def __init__(self, *, unhealthy: Reasons, unready: Reasons, families: Callable[[], Iterable[Family]]) -> None:
        self._pulse = Pulse()
        self._unhealthy = unhealthy
        self._unready = unready
        self._families = families
        self._listener = Listener(
            self._nobody, authenticate=lambda secret: None, open_timeout_s=5.0, pages=lambda path, _: self.page(path)
        )

    async def listen(self, host: str, port: int) -> int:
        """Open the port; which one it is.

        Raises:
            ListenFailed: the address cannot be had.
        """
        return await self._listener.listen(host, port)

    async def serve(self) -> None:
        """Keep the pulse until cancelled, then close the port if one is open."""
        try:
            await self._pulse.beat()
        finally:
            await self._listener.close("the node has stopped")

    def page(self, path: str) -> Page | None:
        """The page at a path."""
        if path == "/metrics":
            return metrics_page([*self._families(), *self._pulse.families()])
        return health_page(path, unhealthy=self._unhealthy, unready=self._unready)

    async def _nobody(self, websocket: object, identity: object) -> None:
        raise AssertionError("nobody is let in here")
