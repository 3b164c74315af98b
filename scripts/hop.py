"""What a hop costs: requests of many sizes, one at a time, over TCP with TCP_NODELAY, a WebSocket or a relay.

    foredraft-hop --listen 127.0.0.1:7000                    # on one machine
    foredraft-hop --connect HOST:7000                        # on the other
    foredraft-hop --connect HOST:7000 --model config.json --aux-layers 8,23,39,55,70 --tokens-per-cycle 3

    foredraft-hop --listen wss://RELAY:8765                  # through a relay: both ends dial it, as its clients
    foredraft-hop --connect wss://RELAY:8765

    foredraft-hop --matrix http://RELAY:8766                 # round trips between all nodes of a relay

One request is under way at a time, since that is what a cycle waits for; bulk throughput is another figure. Ends with
the fitted latency (there and back) and bandwidth, a verdict for each size, and what looks odd.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.hop_exchange import MIN_BYTES, Exchange, HopError, connected, listening, request
from scripts.hop_matrix import MatrixRefused, matrix_figures, matrix_text, node_hops, read_snapshots
from scripts.hop_relay import RelayAddress, RelayExchange, answering, through
from scripts.hop_report import Samples, fit_hop, hop_rows, hop_text, model_payload_bytes, oddities
from scripts.link_emulator import Address, parse_address
from speculation.fits import FitRefused

SIZES = tuple(4**power for power in range(2, 13))
WARM_UP = 3
MIN_SAMPLES, MAX_SAMPLES = 5, 200
REPLY_TIMEOUT_S = 60.0

Rest = Callable[[int, int], Awaitable[None]]
"""Called with the sizes of the next request and its answer; returns when the way may be used."""


async def measure(
    exchange: Exchange, sizes: Sequence[int], *, seconds: float, down: bool = False,
    clock: Callable[[], float] = time.perf_counter, rest: Rest | None = None,
) -> dict[int, list[float]]:  # fmt: skip
    """Seconds of each exchange by payload size; at least MIN_SAMPLES of each size, then until `seconds` are over.

    `rest` is awaited before each exchange and is not measured.
    """

    async def ready() -> None:
        if rest is not None:
            await rest(*shape)

    samples: dict[int, list[float]] = {}
    for size in sizes:
        shape = (MIN_BYTES, size) if down else (size, MIN_BYTES)
        for _ in range(WARM_UP):
            await ready()
            await asyncio.wait_for(exchange(*shape), REPLY_TIMEOUT_S)
        values: list[float] = []
        began = clock()
        while len(values) < MIN_SAMPLES or (len(values) < MAX_SAMPLES and clock() - began < seconds):
            await ready()
            sent = clock()
            await asyncio.wait_for(exchange(*shape), REPLY_TIMEOUT_S)
            values.append(clock() - sent)
        samples[size] = values
    return samples


async def measure_after_idle(
    exchange: Exchange, size: int, *, idle_s: float, repeats: int = 3, clock: Callable[[], float] = time.perf_counter,
    rest: Rest | None = None,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """The same request back to back, and after a pause; both in seconds."""

    async def once() -> float:
        if rest is not None:
            await rest(size, MIN_BYTES)
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


@contextlib.asynccontextmanager
async def _way(to: Address | str, args: argparse.Namespace) -> AsyncIterator[tuple[Exchange, Rest | None]]:
    """A way to the answering end, at an address or, for a URL, through the relay there."""
    if isinstance(to, str):
        async with through(_relay_of(to, args)) as exchange:
            yield exchange, exchange.rest
    else:
        async with connected(to, args.over) as exchange:
            yield exchange, None


def _relay_of(url: str, args: argparse.Namespace) -> RelayAddress:
    return RelayAddress(url=url, secret=os.environ.get("FOREDRAFT_SECRET", ""), name=args.name, ca_file=args.ca_file)


async def bench(args: argparse.Namespace, sizes: Sequence[int]) -> dict[str, Any]:
    """Everything that the command prints. Raises `HopError`, or `FitRefused` when times do not make a line."""
    left_out: list[str] = []
    async with _way(args.connect, args) as (exchange, rest):
        if isinstance(exchange, RelayExchange):
            sizes, left_out = exchange.admitted(sizes, MIN_BYTES)
        up = await measure(exchange, sizes, seconds=args.seconds, rest=rest)
        down = await measure(exchange, sizes, seconds=args.seconds, down=True, rest=rest)
        warm_s: list[float] = []
        idle_s: list[float] = []
        if args.idle_s:
            warm_s, idle_s = await measure_after_idle(exchange, max(sizes), idle_s=args.idle_s, rest=rest)
    limit = None
    if args.idle_limit_s:
        limit = await find_idle_limit(lambda: connected(args.connect, args.over), args.idle_limit_s)
    fit, fit_down = fit_hop(up), fit_hop(down)
    odd = oddities(
        up=fit, down=fit_down, nominal_mbit=args.nominal_mbit, samples=up, warm_s=warm_s, after_idle_s=idle_s,
        idle_limit=limit,
    )  # fmt: skip
    figures = figures_of(up, "relay" if isinstance(args.connect, str) else args.over)
    down_mbit = fit_down.rate_bytes_per_s and fit_down.rate_bytes_per_s * 8e-6
    figures |= {"latency_down_ms": fit_down.latency_s * 1e3, "rate_down_mbit": down_mbit}
    if args.json:
        print(json.dumps(figures | {"odd": odd, "left_out": left_out}))
    else:
        print("\n".join([hop_text(hop_rows(up, fit), fit, fit_down, odd), *left_out]))
    return figures


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
    stop = _stop_on_signal()
    async with listening(address, over) as port:
        print(json.dumps({"ready": True, "port": port, "over": over}), flush=True)
        await stop.wait()


async def listen_at_relay(at: RelayAddress) -> None:
    """Answer the probes that the relay brings until a signal. Raises `HopError` when the link to it ends."""
    async with answering(at) as running:
        stop = _stop_on_signal()
        print(json.dumps({"ready": True, "relay": at.url, "over": "relay", "name": at.name}), flush=True)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if running.done():
            running.result()


def _stop_on_signal() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


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


def _place(text: str) -> Address | str:
    """HOST:PORT, or the URL of a relay."""
    return text if text.startswith(("ws://", "wss://")) else parse_address(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument("--listen", type=_place, metavar="HOST:PORT|URL", help="answer; port 0: any; at a relay's URL")
    side.add_argument("--connect", type=_place, metavar="HOST:PORT|URL", help="measure; through a relay's URL")
    side.add_argument("--matrix", metavar="URL", help="the relay's HTTP side; FOREDRAFT_SECRET holds an admin's secret")
    parser.add_argument(
        "--name", default="hop", help="of the end at a relay; several pairs measure under different ones"
    )
    parser.add_argument("--ca-file", type=Path, help="of a relay's wss:// URL: a private authority, PEM")
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
        elif isinstance(args.connect, str) and args.idle_limit_s:
            parser.error("--idle-limit-s measures no relay: its links' own pings keep them from being idle")
        elif isinstance(args.connect, str) and args.nominal_mbit:
            parser.error("--nominal-mbit is one link's, and a way through a relay has two")
        elif isinstance(args.listen, str):
            asyncio.run(listen_at_relay(_relay_of(args.listen, args)))
        elif args.listen:
            asyncio.run(listen(args.listen, args.over))
        else:
            asyncio.run(bench(args, _sizes(args)))
    except KeyboardInterrupt:
        return 130
    except (HopError, MatrixRefused, FitRefused, TimeoutError) as exc:
        print(f"hop: {exc or 'no answer in time'}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as exc:
        parser.error(str(exc))
    return 0


if __name__ == "__main__":
    sys.exit(main())
