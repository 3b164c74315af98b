"""The hop bench against emulated links whose terms are known: `docs/results/hop.json`.

    python scripts/bench_hop.py --results docs/results/hop.json

Emulator, listener and relay are processes of their own. What is measured is what a user would get: the link, and what
the two ends take to wake up and to answer. The latter is measured as well, over plain loopback in the same run, with a
pause before each request as long as the link's round trip, since a core that has slept longer wakes later. Goals are
held against what was measured, not against the difference.

Through a relay each leg has half the delay and the whole rate. The relay hands on whole frames, so that the
bytes are paid for twice: half the rate is what was set.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.hop import figures_of, measure
from scripts.hop_exchange import MIN_BYTES, Exchange, connected
from scripts.hop_relay import RelayAddress, through
from scripts.hop_report import FIT_SHARE, percentile
from scripts.processes import Parts
from scripts.results import Goal, write_results

OVER = ("tcp", "ws", "relay")
RATES_MBIT = (100.0, 1000.0, None)
DELAYS_MS = (5.0, 20.0)
SIZES = {
    100.0: (16, 256, 4096, 65536, 1 << 18, 1 << 20),
    1000.0: (16, 256, 4096, 65536, 1 << 18, 1_000_000, 1 << 22, 1 << 24),
}
RELAY_MOST_BYTES = 1_000_000  # a frame has 1 MiB
UNLIMITED_SIZES = (16, 256, 4096, 16384)
WITHIN = 0.10


class LinkShape(NamedTuple):
    """Of one leg, one way."""

    delay_ms: float
    rate_mbit: float | None


@contextlib.asynccontextmanager
async def way(parts: Parts, over: str, shape: LinkShape | None) -> AsyncIterator[Exchange]:
    """A way over emulated links, or over plain loopback for no shape."""

    async def link(number: int, port: int) -> int:
        if shape is None:
            return port
        flags = ["--delay-ms", str(shape.delay_ms)]
        flags += ["--rate-mbit", str(shape.rate_mbit)] if shape.rate_mbit else []
        command = ["scripts/link_emulator.py", "--to", f"127.0.0.1:{port}", *flags]
        return (await parts.start(f"link {number}", command)).port

    if over == "relay":
        relay = await parts.start("relay", ["-m", "relay", "--port", "0", "--log-level", "warning"])
        urls = [f"ws://127.0.0.1:{await link(number, relay.port)}" for number in (1, 2)]
        await parts.start("listen", ["scripts/hop.py", "--listen", urls[1]])
        async with through(RelayAddress(url=urls[0], secret=parts.secret)) as relayed:
            yield relayed
    else:
        far = await parts.start("listen", ["scripts/hop.py", "--listen", "127.0.0.1:0", "--over", over])
        async with connected(("127.0.0.1", await link(1, far.port)), over) as exchange:
            yield exchange


async def measure_link(over: str, delay_ms: float, rate_mbit: float | None, seconds: float) -> dict[str, Any]:
    """Fitted terms of one emulated link; `delay_ms` is one way, of both legs together where there are two."""
    legs = 2 if over == "relay" else 1
    with tempfile.TemporaryDirectory(prefix="foredraft-hop-") as folder:
        parts = Parts(Path(folder), secrets.token_urlsafe(24))
        try:
            async with way(parts, over, LinkShape(delay_ms / legs, rate_mbit)) as exchange:
                sizes = SIZES[rate_mbit] if rate_mbit else UNLIMITED_SIZES
                sizes = tuple(size for size in sizes if over != "relay" or size <= RELAY_MOST_BYTES)
                samples = await measure(exchange, sizes, seconds=seconds)
        finally:
            await parts.stop()
    set_rate = rate_mbit and rate_mbit / legs
    return {"set_latency_ms": 2 * delay_ms, "set_rate_mbit": set_rate} | figures_of(samples, over)


async def measure_ends(over: str, pause_ms: float, seconds: float) -> float:
    """Milliseconds of a small request over plain loopback after so long a pause, as the fit takes them."""

    async def rest(request_bytes: int, answer_bytes: int) -> None:
        await asyncio.sleep(pause_ms / 1e3)

    with tempfile.TemporaryDirectory(prefix="foredraft-hop-") as folder:
        parts = Parts(Path(folder), secrets.token_urlsafe(24))
        try:
            async with way(parts, over, None) as exchange:
                samples = await measure(exchange, (MIN_BYTES,), seconds=seconds, rest=rest)
        finally:
            await parts.stop()
    return percentile(samples[MIN_BYTES], FIT_SHARE) * 1e3


def median_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The turn whose latency is the median one, with the median rate of all; and every turn's terms beside them."""
    ordered = sorted(found, key=lambda one: float(one["latency_ms"]))
    rates = sorted(one["rate_mbit"] for one in found if one["rate_mbit"] is not None)
    middle = ordered[len(ordered) // 2]
    turns = [{term: one[term] for term in ("latency_ms", "rate_mbit")} for one in found]
    return middle | {"rate_mbit": rates[len(rates) // 2] if rates else None, "turns": turns}


async def run(seconds: float, repeats: int, results: Path | None) -> int:
    cells = [(over, rate, delay) for over in OVER for rate in RATES_MBIT for delay in DELAYS_MS]
    found: dict[tuple[str, float | None, float], list[dict[str, Any]]] = {cell: [] for cell in cells}
    ends: dict[tuple[str, float], list[float]] = {(over, delay): [] for over in OVER for delay in DELAYS_MS}
    load_before = os.getloadavg()
    for _ in range(repeats):
        for over, rate_mbit, delay_ms in cells:
            found[over, rate_mbit, delay_ms].append(await measure_link(over, delay_ms, rate_mbit, seconds))
        for over, delay_ms in ends:
            ends[over, delay_ms].append(await measure_ends(over, 2 * delay_ms, 2 * seconds))
    links, goals = [], []
    for (over, rate_mbit, delay_ms), turns in found.items():
        ends_ms = statistics.median(ends[over, delay_ms])
        link = median_of(turns)
        link |= {"ends_own_latency_ms": ends_ms, "latency_less_ends_ms": link["latency_ms"] - ends_ms}
        links.append(link)
        name = f"{over}, {f'{rate_mbit:g} Mbit/s' if rate_mbit else 'unthrottled'}, {2 * delay_ms:g} ms"
        for term, wanted in (("latency_ms", 2 * delay_ms), ("rate_mbit", link["set_rate_mbit"])):
            if wanted is None:
                continue
            met = link[term] is not None and abs(link[term] / wanted - 1) <= WITHIN
            goals.append(Goal(f"{name}: fitted {term}", f"within 10 % of {wanted:g}", link[term], met))
            own = f" (the ends' own: {ends_ms:.3f})" if term == "latency_ms" else ""
            print(f"{name}: {term} {link[term]} of {wanted:g}{own}, {'met' if met else 'NOT met'}", flush=True)
    if results:
        write_results(
            results, command="python scripts/bench_hop.py --results docs/results/hop.json", packages=("websockets",),
            models={}, parameters={"seconds_each_size": seconds, "one_way_delays_ms": DELAYS_MS, "turns": repeats},
            figures={"load average before": load_before, "load average after": os.getloadavg(), "links": links},
            goals=goals,
        )  # fmt: skip
    return 0 if all(goal.met for goal in goals) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each size")
    parser.add_argument("--repeats", type=int, default=3, help="turns over all links; medians of them")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    return asyncio.run(run(args.seconds, args.repeats, args.results))


if __name__ == "__main__":
    sys.exit(main())
