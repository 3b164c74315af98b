"""Load for the relay's benchmark: peers that cost little themselves, and the processes that they are measured against.

A peer speaks just enough HTTP and WebSocket to say hello and to move frames made beforehand, so that one core of load
can saturate another core's relay. What it receives it counts, or hands on whole.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from wire.codec import encode
from wire.messages import PROTOCOL_VERSION, Hello, ModelIdentity, Pong
from wire.parts import Assembler, is_part

OnFrame = Callable[[bytes, float], None]
MASK = b"\x00\x00\x00\x00"
MODEL = ModelIdentity(name="target", revision="1", tokenizer="ab" * 32, vocab_size=256, context_length=4096)
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def masked(payload: bytes) -> bytes:
    """A client's WebSocket text frame; masked with zeros, which every server must accept."""
    size = len(payload)
    if size < 126:
        return bytes((0x81, 0x80 | size)) + MASK + payload
    if size < 1 << 16:
        return b"\x81\xfe" + size.to_bytes(2, "big") + MASK + payload
    return b"\x81\xff" + size.to_bytes(8, "big") + MASK + payload


class Peer(asyncio.Protocol):
    """One connection. `on_frame` gets payloads of frames with their time of arrival, on `time.perf_counter`."""

    def __init__(self, *, websocket: bool, secret: str = "") -> None:
        self.websocket = websocket
        self.secret = secret
        self.on_frame: OnFrame = lambda frame, now: None
        self.raw_size = 0
        """Size of the frames of a plain TCP connection, which has no other frames."""
        self.transport: asyncio.Transport | None = None
        self.open = asyncio.Event()
        self.lost = False
        self._buffer = bytearray()
        self._assembler = Assembler()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say hello to HTTP."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.websocket:
            key = base64.b64encode(os.urandom(16)).decode()
            transport.write(
                f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
                f"Authorization: Bearer {self.secret}\r\n\r\n".encode()
            )
        else:
            self.open.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing in a benchmark may end before its time; whoever measures looks at `lost`."""
        self.lost = True

    def data_received(self, data: bytes) -> None:
        """Take what has come apart into frames."""
        now = time.perf_counter()
        buffer = self._buffer
        buffer += data
        if self.websocket and not self.open.is_set():
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            if not buffer.startswith(b"HTTP/1.1 101"):
                raise RuntimeError(bytes(buffer[:200]).decode("latin-1"))
            del buffer[: end + 4]
            self.open.set()
        start = 0
        while (frame_end := self._frame_end(start)) is not None:
            begin, end = frame_end
            self._take(bytes(buffer[begin:end]), now)
            start = end
        del buffer[:start]

    def send(self, frame: bytes) -> None:
        """Send a frame made by `masked`, or plain bytes over TCP."""
        assert self.transport is not None
        self.transport.write(frame)

    def _frame_end(self, start: int) -> tuple[int, int] | None:
        """Where the payload of the next frame begins and ends, once it is there whole."""
        buffer = self._buffer
        if not self.websocket:
            begin, end = start, start + self.raw_size
        else:
            if len(buffer) < start + 2:
                return None
            size, begin = buffer[start + 1], start + 2
            if size > 125:
                begin = start + (4 if size == 126 else 10)
                if len(buffer) < begin:
                    return None
                size = int.from_bytes(buffer[start + 2 : begin], "big")
            end = begin + size
        return (begin, end) if end <= len(buffer) and end > start else None

    def _take(self, frame: bytes, now: float) -> None:
        if is_part(frame) and self.websocket:
            whole = self._assembler.take(frame)
            if whole is None:
                return
            frame = whole
        if frame.startswith(b'{"type":"ping"'):
            self.send(masked(encode(Pong(number=int(frame[frame.rindex(b":") + 1 : -1])))))
        else:
            self.on_frame(frame, now)


async def connect(port: int, *, websocket: bool = True, secret: str = "") -> Peer:
    """A connection to a subject of the benchmark."""
    _, peer = await asyncio.get_running_loop().create_connection(
        lambda: Peer(websocket=websocket, secret=secret), "127.0.0.1", port
    )
    await asyncio.wait_for(peer.open.wait(), 30)
    return peer


async def join(port: int, secret: str, role: str) -> Peer:
    """A peer of the relay, welcome."""
    peer = await connect(port, secret=secret)
    welcome = asyncio.Event()
    peer.on_frame = lambda frame, now: welcome.set()
    model = None if role == "client" else MODEL
    peer.send(
        masked(encode(Hello(protocol=PROTOCOL_VERSION, role=role, name=f"bench-{role}", capacity=4096, model=model)))
    )
    await asyncio.wait_for(welcome.wait(), 30)
    return peer


def cpu_s(pids: list[int]) -> float:
    """Processor time that these processes have taken so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / CLOCK_TICKS


def resident_mb(pid: int) -> float:
    """Resident memory, in MB (10^6 bytes)."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def group_of(leader: int) -> list[int]:
    """The processes of a process group, its leader's children included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader:
            found.append(int(path.parent.name))
    return found
