"""One leg of a wide-area network as a TCP proxy: delay, jitter, bandwidth, stalls, cuts and half-open death.

    python scripts/link_emulator.py --listen 127.0.0.1:0 --to 127.0.0.1:8765 --delay-ms 21.5 --jitter-ms 1

It carries bytes and knows nothing of what they mean. Each chunk read from one side is written to the other after
its serialisation time and the one-way delay, in order, in both directions alike. `link_shape.Shaper` holds that
arithmetic; `emulated_link` runs the proxy inside a test; `main` runs it as a process, which prints one JSON line
when it listens and one with its counters when it ends (SIGTERM or SIGINT; exit code 0). SIGHUP changes the delay.

What it does not do: the TCP handshake is not delayed (only bytes are), each connection has the whole rate for
itself, and packets are never lost (TCP would hide that: `--stall-*` shows what TCP makes of a loss).

Accuracy: the delay counts from the time at which the system stamped the bytes (`link_clock`), the process runs on
`select`, whose timeouts have microseconds, and just before something is due it does not sleep. Round trips of 16 bytes
at 5 ms each way, on two shared cores: 0.24 ms above 10 ms (10th percentile of 294), of which the two ends alone take
0.21 when they have slept as long. Inside a test the running loop is used: up to 1 ms more each way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import os
import random
import selectors
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.link_clock import Arrivals, ask_for_stamps, tighten_timers
from scripts.link_shape import Ending, LinkShape, Shaper

# A core that slept long wakes late by some 0.3 ms, one that slept a millisecond hardly: so a long wait ends in a short.
FINE_WAIT_S = 0.001
SPIN_S = 0.0001  # before something is due the loop is not put to sleep any more, which would wake it late

Address = tuple[str, int]


@dataclass(slots=True)
class LinkStats:
    """Counters of a link over all its connections. `up` is from the listening side to the target."""

    num_connections: int = 0
    num_refused: int = 0
    num_cut: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    swallowed_bytes: int = 0


class _Direction:
    """Moves bytes of one direction between two sockets, as its shaper says."""

    def __init__(self, source: socket.socket, sink: socket.socket, shape: LinkShape, rng: random.Random) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._arrivals = Arrivals(source, shape.read_bytes)
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self.shaper = Shaper(shape, rng=rng, now=self._loop.time())

    async def read(self, on_swallow: Callable[[], None]) -> None:
        shaper, waited_until = self.shaper, 0.0
        while True:
            while shaper.is_full:
                self._has_room.clear()
                await self._has_room.wait()
                waited_until = self._loop.time()
            try:
                data, arrived_at = await self._arrivals.next(waited_until)
            except OSError:
                self.end(Ending.CUT)
                return
            if not data:
                self.end(Ending.FIN)
                return
            shaper.push(data, arrived_at)
            if shaper.swallowing:
                on_swallow()
            self._changed.set()

    async def write(self, reverse: _Direction) -> None:
        """Deliver until the end; raises `ConnectionResetError` for a cut, which takes the whole connection down."""
        shaper = self.shaper
        while not shaper.is_finished:
            item = shaper.pop(self._loop.time())
            if item is None:
                await self._wait(shaper.next_due())
                continue
            self._has_room.set()
            if item is Ending.CUT:
                raise ConnectionResetError
            try:
                if isinstance(item, bytes):
                    await self._loop.sock_sendall(self._sink, item)
                else:
                    self._sink.shutdown(socket.SHUT_WR)
            except OSError as exc:
                # The receiver is gone. Its reset travels back behind the bytes that it had sent before.
                if reverse.shaper.is_finished and not reverse.shaper.swallowing:
                    raise ConnectionResetError from exc
                reverse.end(Ending.CUT)

    def end(self, ending: Ending) -> None:
        self.shaper.end(ending, self._loop.time())
        self._changed.set()

    def stall(self, seconds: float) -> None:
        self.shaper.stall(self._loop.time() + seconds)

    async def _wait(self, due: float | None) -> None:
        """Return at `due` or a little before it, or when something entered."""
        self._changed.clear()
        timer = None
        if due is not None:
            left_s = due - self._loop.time()
            if left_s <= SPIN_S:
                await asyncio.sleep(0)
                return
            timer = self._loop.call_at(due - (FINE_WAIT_S if left_s > FINE_WAIT_S else SPIN_S), self._changed.set)
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()


class _Connection:
    def __init__(self, near: socket.socket, far: socket.socket, shape: LinkShape, seed: str) -> None:
        self._shape = shape
        self._sockets = (near, far)
        self.up = _Direction(near, far, shape, random.Random(f"{seed}/up"))
        self.down = _Direction(far, near, shape, random.Random(f"{seed}/down"))
        self.cut = asyncio.Event()

    async def carry(self) -> bool:
        """Carry bytes until both directions ended; True when the connection was cut."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shape.cut_after_s):
                await self._carry()
                return self.cut.is_set()
        self.cut.set()
        self._reset()
        return True

    async def _carry(self) -> None:
        tasks = [
            asyncio.create_task(self.up.read(self.swallow), name="link up read"),
            asyncio.create_task(self.up.write(self.down), name="link up write"),
            asyncio.create_task(self.down.read(self.swallow), name="link down read"),
            asyncio.create_task(self.down.write(self.up), name="link down write"),
        ]
        cut = asyncio.create_task(self.cut.wait(), name="link cut")
        carried = asyncio.gather(*tasks)
        try:
            watched: list[asyncio.Future[Any]] = [carried, cut]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if carried.done() and (failure := carried.exception()) is not None:
                if not isinstance(failure, ConnectionResetError):
                    raise failure
                self.cut.set()
        finally:
            for task in (*tasks, cut):
                task.cancel()
            await asyncio.gather(*tasks, cut, carried, return_exceptions=True)
        if self.cut.is_set():
            self._reset()

    def swallow(self) -> None:
        self.up.shaper.swallowing = self.down.shaper.swallowing = True

    def _reset(self) -> None:
        for end in self._sockets:
            # Lingering for 0 s makes close() send a reset instead of an orderly end.
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class EmulatedLink:
    """A running link. The verbs act on the connections that exist now; later ones start afresh."""

    def __init__(self, listener: socket.socket, to: Address, shape: LinkShape, seed: int) -> None:
        self._listener = listener
        self._to = to
        self._shape = shape
        self._seed = seed
        self._live: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stats = LinkStats()

    @property
    def address(self) -> Address:
        """Where the link listens."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def port(self) -> int:
        """The port of `address`."""
        return self.address[1]

    def cut(self) -> None:
        """Reset both sides; what is under way is lost."""
        for connection in self._live:
            connection.cut.set()

    def swallow(self) -> None:
        """Half-open: what enters from now on vanishes, what is under way arrives, nothing is closed."""
        for connection in self._live:
            connection.swallow()

    def stall(self, seconds: float) -> None:
        """Hold everything back for this long, then deliver it at once, in order."""
        for connection in self._live:
            connection.up.stall(seconds)
            connection.down.stall(seconds)

    def set_delay(self, delay_s: float) -> None:
        """Change the one-way delay, of later connections too."""
        self._shape = replace(self._shape, delay_s=delay_s)
        for connection in self._live:
            connection.up.shaper.set_delay(delay_s)
            connection.down.shaper.set_delay(delay_s)

    def delivered_bytes(self) -> dict[str, int]:
        """Up (towards `--to`) and down, of all connections so far."""
        up = self.stats.up_bytes + sum(c.up.shaper.num_delivered_bytes for c in self._live)
        down = self.stats.down_bytes + sum(c.down.shaper.num_delivered_bytes for c in self._live)
        return {"up_bytes": up, "down_bytes": down}

    async def serve(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                near, _ = await loop.sock_accept(self._listener)
                task = asyncio.create_task(self._run(near), name="link connection")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, near: socket.socket) -> None:
        number = self.stats.num_connections
        self.stats.num_connections += 1
        far = socket.socket(socket.AF_INET6 if ":" in self._to[0] else socket.AF_INET, socket.SOCK_STREAM)
        far.setblocking(False)
        with near, far:
            try:
                await asyncio.get_running_loop().sock_connect(far, self._to)
            except OSError:
                self.stats.num_refused += 1
                return
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ask_for_stamps(end)
            connection = _Connection(near, far, self._shape, f"{self._seed}/{number}")
            self._live.add(connection)
            try:
                self.stats.num_cut += await connection.carry()
            finally:
                self._live.discard(connection)
                up, down = connection.up.shaper, connection.down.shaper
                self.stats.up_bytes += up.num_delivered_bytes
                self.stats.down_bytes += down.num_delivered_bytes
                self.stats.swallowed_bytes += up.num_swallowed_bytes + down.num_swallowed_bytes


@contextlib.asynccontextmanager
async def emulated_link(
    to: Address, shape: LinkShape, *, listen: Address = ("127.0.0.1", 0), seed: int = 0
) -> AsyncIterator[EmulatedLink]:
    """A link to `to` that lasts as long as the block. Raises `OSError` when the address cannot be listened on."""
    listener = socket.create_server(listen, family=socket.AF_INET6 if ":" in listen[0] else socket.AF_INET)
    listener.setblocking(False)
    with listener:
        link = EmulatedLink(listener, to, shape, seed)
        server = asyncio.create_task(link.serve(), name="link accept")
        try:
            yield link
        finally:
            server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await server


def parse_address(text: str) -> Address:
    """HOST:PORT of a command line; raises `argparse.ArgumentTypeError`."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _resolve(address: Address, *, allow_remote: bool) -> Address:
    """The address with its host as a number. Raises `ValueError` for another machine's unless that is allowed."""
    try:
        host = str(socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as exc:
        raise ValueError(f"cannot resolve {address[0]}: {exc.strerror}") from exc
    if not allow_remote and not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"{address[0]} is not this machine's loopback: add --allow-remote if that is meant")
    return host, address[1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s --to HOST:PORT [options]",
        description="Emulate one leg of a wide-area network between two TCP peers (bytes only, both directions alike).",
    )
    parser.add_argument(
        "--listen", type=parse_address, default=("127.0.0.1", 0), metavar="HOST:PORT", help="port 0: any"
    )
    parser.add_argument("--to", type=parse_address, required=True, metavar="HOST:PORT", help="where connections lead")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one-way delay")
    parser.add_argument(
        "--delay-file", type=Path, help="on SIGHUP the delay becomes the number in it, in ms; bytes so far are printed"
    )
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="uniform spread around the delay; order is kept")
    parser.add_argument("--rate-mbit", type=float, help="bandwidth of each connection and direction")
    parser.add_argument("--stall-every-s", type=float, help="hold everything back this often, as a retransmission does")
    parser.add_argument("--stall-ms", type=float, default=0.0, help="for this long")
    parser.add_argument("--cut-after-s", type=float, help="reset both sides this long after the connection was made")
    parser.add_argument("--cut-after-bytes", type=int, help="reset both sides once a direction delivered this many")
    parser.add_argument("--swallow-after-bytes", type=int, help="half-open: later bytes vanish, nothing is closed")
    parser.add_argument("--buffer-bytes", type=int, help="bytes under way above which reading pauses (default: 2 BDP)")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--allow-remote", action="store_true", help="allow addresses other than loopback")
    return parser


def _shape(arguments: argparse.Namespace) -> LinkShape:
    return LinkShape(
        delay_s=arguments.delay_ms / 1e3,
        jitter_s=arguments.jitter_ms / 1e3,
        rate_bytes_per_s=None if arguments.rate_mbit is None else arguments.rate_mbit * 1e6 / 8,
        stall_every_s=arguments.stall_every_s,
        stall_s=arguments.stall_ms / 1e3,
        cut_after_s=arguments.cut_after_s,
        cut_after_bytes=arguments.cut_after_bytes,
        swallow_after_bytes=arguments.swallow_after_bytes,
        buffer_bytes=arguments.buffer_bytes,
    )


async def _run_until_signalled(listen: Address, to: Address, shape: LinkShape, seed: int, delay: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with emulated_link(to, shape, listen=listen, seed=seed) as link:
        listens = {"listen": "{}:{}".format(*link.address), "port": link.port, "to": "{}:{}".format(*to)}
        print(json.dumps({"ready": True, **listens, "shape": asdict(shape), "seed": seed}), flush=True)

        def reload() -> None:
            if delay is not None:
                link.set_delay(float(delay.read_text()) / 1e3)
            print(json.dumps({"event": "reload", **link.delivered_bytes()}), flush=True)

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        await stop.wait()
    # After the block: each connection adds its counts when it ends.
    print(json.dumps({"event": "exit", **asdict(link.stats)}), flush=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0 after a signal, 1 for a failure, 2 for wrong usage."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        shape = _shape(arguments)
        listen = _resolve(arguments.listen, allow_remote=arguments.allow_remote)
        to = _resolve(arguments.to, allow_remote=arguments.allow_remote)
    except ValueError as exc:
        parser.error(str(exc))
    tighten_timers()
    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
            runner.run(_run_until_signalled(listen, to, shape, arguments.seed, arguments.delay_file))
    except OSError as exc:
        print("link_emulator: cannot listen on {}:{}:".format(*listen), os.strerror(exc.errno or 0), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
