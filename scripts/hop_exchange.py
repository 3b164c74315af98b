"""One request at a time over TCP with TCP_NODELAY or over a WebSocket, and the end that answers.

A request says how long it is and how long its answer has to be. `hop_relay` has the same through a relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from websockets.asyncio.client import connect as connect_websocket
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websocket
from websockets.exceptions import ConnectionClosed

from scripts.link_emulator import Address

HEADER = struct.Struct("!II")  # bytes of the request with its header, bytes of the answer
MIN_BYTES = 16
MAX_BYTES = 16 << 20
CONNECT_TIMEOUT_S = 10.0
SCRATCH_BYTES = 1 << 20
FRAGMENT_BYTES = 32 << 10
"""Of a WebSocket message, as the nodes cut their frames: masking one piece then overlaps with the way of the last."""


class HopError(Exception):
    """The other side cannot be reached, or does not answer as a hop bench does."""


class Exchange(Protocol):
    """One connection: sends a request and returns when the whole answer is there."""

    async def __call__(self, request_bytes: int, answer_bytes: int) -> None: ...


@functools.lru_cache(maxsize=4)
def filler(num_bytes: int) -> bytes:
    """So many zeros; kept, since making them is not the link's time."""
    return bytes(num_bytes)


@functools.lru_cache(maxsize=4)
def request(request_bytes: int, answer_bytes: int) -> bytes:
    """A request of exactly so many bytes, which asks for an answer of so many."""
    for name, value in (("request", request_bytes), ("answer", answer_bytes)):
        if not MIN_BYTES <= value <= MAX_BYTES:
            raise ValueError(f"{name} must have {MIN_BYTES}..{MAX_BYTES} bytes, got {value}")
    return HEADER.pack(request_bytes, answer_bytes).ljust(request_bytes, b"\0")


def answer_to(header: bytes) -> tuple[int, int]:
    """Sizes of a request and its answer. Raises `HopError` for what no request begins with."""
    if len(header) < HEADER.size:
        raise HopError(f"a request has at least {HEADER.size} bytes, got {len(header)}")
    request_bytes, answer_bytes = HEADER.unpack_from(header)
    if not (MIN_BYTES <= request_bytes <= MAX_BYTES and MIN_BYTES <= answer_bytes <= MAX_BYTES):
        raise HopError(f"sizes of a request must be {MIN_BYTES}..{MAX_BYTES}, got {request_bytes} and {answer_bytes}")
    return request_bytes, answer_bytes


def fragments(message: bytes) -> Iterable[memoryview]:
    """The pieces of a WebSocket message."""
    view = memoryview(message)
    return [view[start : start + FRAGMENT_BYTES] for start in range(0, len(view), FRAGMENT_BYTES)]


@contextlib.asynccontextmanager
async def listening(address: Address, over: str) -> AsyncIterator[int]:
    """Answer requests while the block lasts; gives the port."""
    if over == "tcp":
        listener = socket.create_server(address)
        listener.setblocking(False)
        accepting = asyncio.create_task(_accept(listener), name="hop accept")
        with listener:
            try:
                yield int(listener.getsockname()[1])
            finally:
                accepting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await accepting
    else:
        async with serve_websocket(
            _answer_websocket, *address, compression=None, max_size=MAX_BYTES, ping_interval=None
        ) as websockets:
            yield int(next(iter(websockets.sockets)).getsockname()[1])


async def _accept(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        while True:
            connection, _ = await loop.sock_accept(listener)
            tasks.create_task(_answer_tcp(connection), name="hop answer")


async def _answer_tcp(connection: socket.socket) -> None:
    loop, scratch = asyncio.get_running_loop(), bytearray(SCRATCH_BYTES)
    with connection:
        _set_up(connection)
        with contextlib.suppress(EOFError, OSError, HopError):
            while True:
                request_bytes, answer_bytes = answer_to(await _receive(connection, HEADER.size, scratch))
                await _receive(connection, request_bytes - HEADER.size, scratch)
                await loop.sock_sendall(connection, filler(answer_bytes))


async def _answer_websocket(websocket: ServerConnection) -> None:
    with contextlib.suppress(ConnectionClosed, HopError):
        while True:
            header, num_bytes = await _receive_message(websocket)
            request_bytes, answer_bytes = answer_to(header)
            if num_bytes != request_bytes:
                raise HopError(f"a request of {request_bytes} bytes came with {num_bytes}")
            await websocket.send(fragments(filler(answer_bytes)))


async def _receive_message(websocket: Connection) -> tuple[bytes, int]:
    """Begin and size of the next message; the rest is not kept."""
    header, num_bytes = b"", 0
    async for piece in websocket.recv_streaming(decode=False):
        header, num_bytes = header or piece[: HEADER.size], num_bytes + len(piece)
    return header, num_bytes


async def _receive(connection: socket.socket, num_bytes: int, scratch: bytearray) -> bytes:
    """Take so many bytes off the socket; gives the last piece. They are not kept: copying is not the link's time."""
    loop, got = asyncio.get_running_loop(), 0
    room, num = memoryview(scratch), 0
    while got < num_bytes:
        num = await loop.sock_recv_into(connection, room[: min(len(room), num_bytes - got)])
        if num == 0:
            raise EOFError("the connection was closed")
        got += num
    return bytes(room[: min(num, HEADER.size)])


@contextlib.asynccontextmanager
async def connected(address: Address, over: str) -> AsyncIterator[Exchange]:
    """A connection to a listening hop bench. Raises `HopError` when there is none."""
    try:
        if over == "tcp":
            loop, scratch = asyncio.get_running_loop(), bytearray(SCRATCH_BYTES)
            with await asyncio.to_thread(socket.create_connection, address, CONNECT_TIMEOUT_S) as connection:
                _set_up(connection)

                async def exchange(request_bytes: int, answer_bytes: int) -> None:
                    await loop.sock_sendall(connection, request(request_bytes, answer_bytes))
                    await _receive(connection, answer_bytes, scratch)

                yield exchange
        else:
            async with connect_websocket(
                f"ws://{address[0]}:{address[1]}", compression=None, max_size=MAX_BYTES, ping_interval=None, proxy=None
            ) as websocket:

                async def exchange_websocket(request_bytes: int, answer_bytes: int) -> None:
                    await websocket.send(fragments(request(request_bytes, answer_bytes)))
                    _, got = await _receive_message(websocket)
                    if got != answer_bytes:
                        raise HopError(f"asked for {answer_bytes} bytes, got {got}: not a hop bench of this kind")

                yield exchange_websocket
    except (OSError, EOFError, ConnectionClosed) as exc:
        raise HopError(f"{address[0]}:{address[1]} over {over}: {exc or type(exc).__name__}") from exc


def _set_up(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
