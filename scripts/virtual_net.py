"""A network in memory, for `virtual_loop.py`: connections with delay and jitter that stall, break and fall silent.

A connection is a `Wire` with a `Transport` at each end. Bytes arrive in order, each write after the wire's one-way
delay; TCP repeats what is lost, so a loss shows as a stall. What a wire can do: be cut (both ends see a reset), stall
(everything waits), die (everything is swallowed, and neither end is told).
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

WINDOW_BYTES = 64 << 10
"""On the way or unread, before a sender's own buffer fills."""
FIRST_PORT = 40_000


class Wire:
    """One connection.

    Args:
        delay_s: one way.
        jitter_s: each write takes up to so much longer; what was written later does not arrive earlier.
    """

    def __init__(self, rng: random.Random, *, delay_s: float, jitter_s: float) -> None:
        self.rng = rng
        self.delay_s = delay_s
        self.jitter_s = jitter_s
        self.stalled_until = 0.0
        self.is_dead = False
        self.ends: list[Transport] = []

    def due(self, now: float) -> float:
        """When what is written now arrives, as far as the wire is concerned."""
        return max(now + self.delay_s + self.rng.random() * self.jitter_s, self.stalled_until)

    def stall(self, until: float) -> None:
        """Let nothing arrive before `until`; what is on its way waits too."""
        self.stalled_until = max(self.stalled_until, until)

    def cut(self) -> None:
        """Reset both ends."""
        for end in self.ends:
            end.lose(ConnectionResetError("connection reset"))

    def die(self) -> None:
        """Swallow everything from now on."""
        self.is_dead = True


class Transport(asyncio.Transport):
    """One end of a wire, for the protocol that asyncio would give a socket's transport."""

    def __init__(self, wire: Wire, process: str, context: contextvars.Context, name: tuple[str, int]) -> None:
        super().__init__({"sockname": name, "peername": ("virtual", 0)})
        self.wire = wire
        self.process = process
        self.other: Transport | None = None
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = None
        self._last_due = 0.0
        self._num_unread = 0
        """Bytes that were written here and have not been read at the other end."""
        self._on_wire: deque[bytes | None] = deque()
        self._inbox: list[bytes | None] = []
        """Arrived while reading was paused; None is the end of the stream."""
        self._reading = True
        self._closing = self._lost = self._eof_sent = self._writing_paused = False
        self._high, self._low = 64 << 10, 16 << 10
        wire.ends.append(self)

    def get_protocol(self) -> Any:
        """See asyncio."""
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        """See asyncio."""
        self._protocol = protocol

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._closing

    def is_reading(self) -> bool:
        """See asyncio."""
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        """See asyncio."""
        self._reading = False

    def resume_reading(self) -> None:
        """See asyncio."""
        self._reading = True
        waiting, self._inbox = self._inbox, []
        for data in waiting:
            self._soon(self._take, data)

    def can_write_eof(self) -> bool:
        """See asyncio."""
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See asyncio."""
        self._high = 64 << 10 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        """What does not fit the window."""
        return max(0, self._num_unread - WINDOW_BYTES)

    def write(self, data: Any) -> None:
        """See asyncio."""
        if self._closing or self._eof_sent or not data:
            return
        data = bytes(data)
        self._num_unread += len(data)
        if self.get_write_buffer_size() > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()
        self._send(data)

    def write_eof(self) -> None:
        """See asyncio."""
        if not self._eof_sent and not self._closing:
            self._eof_sent = True
            self._send(None)

    def close(self) -> None:
        """See asyncio: what has been written still arrives."""
        if self._closing:
            return
        self.write_eof()
        self._closing = True
        self._soon(self._end, None)

    def abort(self) -> None:
        """See asyncio; the other end sees a reset."""
        if self._lost:
            return
        self._closing = True
        self._soon(self._end, None)
        if self.other is not None and not self.wire.is_dead:
            self._loop.call_at(self.wire.due(self._loop.time()), self.other.lose, ConnectionResetError("reset by peer"))

    def lose(self, cause: Exception) -> None:
        """The connection is gone."""
        if not self._lost:
            self._closing = True
            self._soon(self._end, cause)

    def _send(self, data: bytes | None) -> None:
        self._last_due = max(self._last_due, self.wire.due(self._loop.time()))
        self._on_wire.append(data)
        self._loop.call_at(self._last_due, self._arrive)

    def _arrive(self) -> None:
        """One write arrives, the first: the loop does not keep the order of equal times."""
        other, now = self.other, self._loop.time()
        if self.wire.stalled_until > now:
            self._last_due = max(self._last_due, self.wire.stalled_until)
            self._loop.call_at(self.wire.stalled_until, self._arrive)
            return
        data = self._on_wire.popleft()
        if not self.wire.is_dead and other is not None and not other._closing:
            other._soon(other._take, data)

    def _take(self, data: bytes | None) -> None:
        if self._closing:
            return
        if not self._reading or self._inbox:
            self._inbox.append(data)
        elif data is None:
            if not self._protocol.eof_received():
                self.close()
        else:
            assert self.other is not None
            self._protocol.data_received(data)
            self.other._on_read(len(data))

    def _on_read(self, num_bytes: int) -> None:
        self._num_unread -= num_bytes
        if self._writing_paused and self.get_write_buffer_size() <= self._low and not self._closing:
            self._writing_paused = False
            self._soon(self._protocol.resume_writing)

    def _end(self, cause: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._protocol.connection_lost(cause)

    def _soon(self, callback: Callable[..., object], *args: Any) -> None:
        """In the context of the process that this end belongs to."""
        self._loop.call_soon(callback, *args, context=self._context)


class Listening:
    """A listening socket; it is its own entry in `sockets`."""

    family = socket.AF_INET

    def __init__(self, network: Network, factory: Callable[[], Any], port: int, process: str) -> None:
        self.factory = factory
        self.port = port
        self.process = process
        self.context = contextvars.copy_context()
        self._network = network
        self._loop = asyncio.get_running_loop()

    @property
    def sockets(self) -> list[Listening]:
        """Itself."""
        return [self]

    def getsockname(self) -> tuple[str, int]:
        """As of a socket."""
        return ("virtual", self.port)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """See asyncio."""
        return self._loop

    def is_serving(self) -> bool:
        """See asyncio."""
        return self._network.listening.get(self.port) is self

    def close(self) -> None:
        """See asyncio."""
        if self.is_serving():
            del self._network.listening[self.port]

    async def wait_closed(self) -> None:
        """See asyncio."""


class Network:
    """Listening ports and live wires.

    Args:
        rng: draws the jitter.
        delay_s: of a new connection, by the name of the process that dials; one way.
    """

    def __init__(self, rng: random.Random, *, delay_s: Callable[[str], float], jitter_s: float = 0.0) -> None:
        self.rng = rng
        self.delay_s = delay_s
        self.jitter_s = jitter_s
        self.listening: dict[int, Listening] = {}
        self.killed: set[str] = set()
        self.num_connections = 0
        self._ends: list[Transport] = []
        self._ports: Iterator[int] = iter(range(FIRST_PORT, 65_536))

    def listen(self, factory: Callable[[], Any], port: int, *, process: str) -> Listening:
        """Listen on a port, 0 for a free one.

        Raises:
            OSError: it is taken, or the process has been killed.
        """
        port = port or next(self._ports)
        if port in self.listening or process in self.killed:
            raise OSError(98, "address already in use")
        self.listening[port] = Listening(self, factory, port, process)
        return self.listening[port]

    async def connect(self, protocol: Any, port: int, *, process: str) -> Transport:
        """Connect to a port.

        Raises:
            ConnectionRefusedError: nobody listens.
        """
        wire = Wire(random.Random(self.rng.random()), delay_s=self.delay_s(process), jitter_s=self.jitter_s)
        await asyncio.sleep(2 * wire.delay_s)
        server = self.listening.get(port)
        if server is None or process in self.killed:
            raise ConnectionRefusedError(111, "connection refused")
        self.num_connections += 1
        near = Transport(wire, process, contextvars.copy_context(), ("virtual", self.num_connections))
        far = Transport(wire, server.process, server.context, ("virtual", port))
        near.other, far.other = far, near
        far_protocol = server.context.copy().run(server.factory)
        for end, end_protocol in ((near, protocol), (far, far_protocol)):
            end.set_protocol(end_protocol)
            end._context.copy().run(end_protocol.connection_made, end)
        self._ends = [end for end in self._ends if not end._lost]
        self._ends += [near, far]
        return near

    def kill(self, process: str) -> None:
        """Close its ports, reset its connections, and let it open no more."""
        self.killed.add(process)
        for server in list(self.listening.values()):
            if server.process == process:
                server.close()
        for end in self._ends:
            if end.process == process:
                end.abort()
