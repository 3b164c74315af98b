"""What a hop costs: requests of many sizes, one at a time, over TCP with TCP_NODELAY or over a WebSocket.

    foredraft-hop --listen 127.0.0.1:7000                    # on one machine
    foredraft-hop --connect HOST:7000                        # on the other
    foredraft-hop --connect HOST:7000 --model config.json --aux-layers 8,23,39,55,70 --tokens-per-cycle 3

    foredraft-hop --matrix http://RELAY:8766                 # round trips between all nodes of a relay

One request is under way at a time, since that is what a cycle waits for; bulk throughput is another figure. Ends with
the fitted latency (there and back) and bandwidth, a verdict for each size, and what looks odd.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from websockets.asyncio.client import connect as connect_websocket
from websockets.asyncio.connection import Connection
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websocket
from websockets.exceptions import ConnectionClosed

from scripts.hop_matrix import MatrixRefused, matrix_figures, matrix_text, node_hops, read_snapshots
from scripts.hop_report import Samples, fit_hop, hop_rows, hop_text, model_payload_bytes, oddities
from scripts.link_emulator import Address, parse_address
from speculation.fits import FitRefused

HEADER = struct.Struct("!II")  # bytes of the request with its header, bytes of the answer
MIN_BYTES = 16
MAX_BYTES = 16 << 20
SIZES = tuple(4**power for power in range(2, 13))
WARM_UP = 3
MIN_SAMPLES, MAX_SAMPLES = 5, 200
REPLY_TIMEOUT_S = 60.0
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


async def measure(
    exchange: Exchange, sizes: Sequence[int], *, seconds: float, down: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, list[float]]:  # fmt: skip
    """Seconds of each exchange by payload size; at least MIN_SAMPLES of each size, then until `seconds` are over."""
    samples: dict[int, list[float]] = {}
    for size in sizes:
        shape = (MIN_BYTES, size) if down else (size, MIN_BYTES)
        for _ in range(WARM_UP):
            await asyncio.wait_for(exchange(*shape), REPLY_TIMEOUT_S)
        values: list[float] = []
        began = clock()
        while len(values) < MIN_SAMPLES or (len(values) < MAX_SAMPLES and clock() - began < seconds):
            sent = clock()
            await asyncio.wait_for(exchange(*shape), REPLY_TIMEOUT_S)
            values.append(clock() - sent)
        samples[size] = values
    return samples


async def measure_after_idle(
    exchange: Exchange, size: int, *, idle_s: float, repeats: int = 3, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[float], list[float]]:
    """The same request back to back, and after a pause; both in seconds."""

    async def once() -> float:
        sent = clock()
        await asyncio.wait_for(exchange(size, MIN_BYTES), REPLY_TIMEOUT_S)
        return clock() - sent

    await once()
    warm = [await once() for _ in range(repeats)]
    idle = []
    for _ in range(repeats):
        await asyncio.sleep(idle_s)
        idle.append(await once())
    return warm, idle


async def find_idle_limit(
    connect: Callable[[], contextlib.AbstractAsyncContextManager[Exchange]], pauses_s: Sequence[float],
    *, reply_timeout_s: float = 10.0,
) -> tuple[float, float] | None:  # fmt: skip
    """Longest pause that a connection survived and the first that it did not; None if it survived all."""
    survived = 0.0
    for pause_s in pauses_s:
        try:
            async with connect() as exchange:
                await asyncio.wait_for(exchange(MIN_BYTES, MIN_BYTES), reply_timeout_s)
                await asyncio.sleep(pause_s)
                await asyncio.wait_for(exchange(MIN_BYTES, MIN_BYTES), reply_timeout_s)
        except (HopError, TimeoutError):
            return survived, pause_s
        survived = pause_s
    return None


async def bench(args: argparse.Namespace, sizes: Sequence[int]) -> dict[str, Any]:
    """Everything that the command prints. Raises `HopError`, or `FitRefused` when times do not make a line."""
    async with connected(args.connect, args.over) as exchange:
        up = await measure(exchange, sizes, seconds=args.seconds)
        down = await measure(exchange, sizes, seconds=args.seconds, down=True)
        warm_s, idle_s = await measure_after_idle(exchange, max(sizes), idle_s=args.idle_s) if args.idle_s else ([], [])
    limit = None
    if args.idle_limit_s:
        limit = await find_idle_limit(lambda: connected(args.connect, args.over), args.idle_limit_s)
    fit, fit_down = fit_hop(up), fit_hop(down)
    odd = oddities(
        up=fit, down=fit_down, nominal_mbit=args.nominal_mbit, samples=up, warm_s=warm_s, after_idle_s=idle_s,
        idle_limit=limit,
    )  # fmt: skip
    rows = hop_rows(up, fit)
    print(json.dumps(figures_of(up, args.over) | {"odd": odd}) if args.json else hop_text(rows, fit, odd))
    return figures_of(up, args.over)


def figures_of(samples: Samples, over: str) -> dict[str, Any]:
    """A measurement as JSON has it."""
    fit = fit_hop(samples)
    rate = fit.rate_bytes_per_s
    return {
        "over": over,
        "latency_ms": fit.latency_s * 1e3,
        "latency_error_ms": fit.line.intercept_error * 1e3,
        "rate_mbit": rate and rate * 8e-6,
        "crossover_bytes": fit.crossover_bytes if rate else None,
        "sizes": hop_rows(samples, fit),
    }


async def listen(address: Address, over: str) -> None:
    """Serve until a signal."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with listening(address, over) as port:
        print(json.dumps({"ready": True, "port": port, "over": over}), flush=True)
        await stop.wait()


def _sizes(args: argparse.Namespace) -> list[int]:
    sizes = list(args.sizes)
    if args.model:
        config = json.loads((args.model / "config.json" if args.model.is_dir() else args.model).read_text())
        payload = model_payload_bytes(config, aux_layers=args.aux_layers, tokens_per_cycle=args.tokens_per_cycle)
        print(f"payload of a cycle: {payload} bytes", file=sys.stderr)
        sizes.append(payload)
    for size in sizes:
        request(size, MIN_BYTES)
    return sorted(set(sizes))


def _numbers(kind: type) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("--listen", type=parse_address, metavar="HOST:PORT", help="answer; port 0: any")
    side.add_argument("--connect", type=parse_address, metavar="HOST:PORT", help="measure")
    side.add_argument("--matrix", metavar="URL", help="the relay's HTTP side; FOREDRAFT_SECRET holds an admin's secret")
    parser.add_argument("--snapshots", type=int, default=5, help="of --matrix, one a second")
    parser.add_argument("--over", choices=["tcp", "ws"], default="tcp", help="the same on both sides")
    parser.add_argument("--sizes", type=_numbers(int), default=SIZES, help="bytes, 16 to 16 MiB")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size and direction")
    parser.add_argument("--model", type=Path, help="config.json or its folder: also measure this model's payload")
    parser.add_argument("--aux-layers", type=_numbers(int), default=[], help="layers whose hidden states travel")
    parser.add_argument("--tokens-per-cycle", type=float, default=1.0)
    parser.add_argument("--nominal-mbit", type=float, help="what the link is said to carry")
    parser.add_argument("--idle-s", type=float, default=1.0, help="pause before a request after idle; 0: leave it out")
    parser.add_argument("--idle-limit-s", type=_numbers(float), default=[], help="pauses to try, e.g. 30,60,350,900")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        if args.matrix:
            if args.snapshots < 1:
                parser.error(f"--snapshots must be at least 1, got {args.snapshots}")
            snapshots = read_snapshots(args.matrix, os.environ.get("FOREDRAFT_SECRET", ""), args.snapshots)
            matrix = matrix_figures(node_hops(snapshots))
            print(json.dumps(matrix) if args.json else matrix_text(matrix))
        elif args.listen:
            asyncio.run(listen(args.listen, args.over))
        else:
            asyncio.run(bench(args, _sizes(args)))
    except (HopError, MatrixRefused, FitRefused, TimeoutError) as exc:
        print(f"hop: {exc or 'no answer in time'}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as exc:
        parser.error(str(exc))
    return 0


if __name__ == "__main__":
    sys.exit(main())
