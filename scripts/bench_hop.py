"""The hop bench against emulated links whose terms are known: `docs/results/hop.json`.

    python scripts/bench_hop.py --results docs/results/hop.json

The emulator and the listener are processes of their own; the emulator's timers then add about 0.2 ms each way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.hop import figures_of, measure
from scripts.hop_exchange import connected
from scripts.processes import Parts
from scripts.results import Goal, write_results

RATES_MBIT = (100.0, 1000.0, None)
DELAYS_MS = (5.0, 20.0)
SIZES = {100.0: (16, 256, 4096, 65536, 1 << 18, 1 << 20), 1000.0: (16, 256, 4096, 65536, 1 << 20, 1 << 22, 1 << 24)}
UNLIMITED_SIZES = (16, 256, 4096, 16384)
WITHIN = 0.10


async def measure_link(over: str, delay_ms: float, rate_mbit: float | None, seconds: float) -> dict[str, Any]:
    """Fitted terms of one emulated link."""
    with tempfile.TemporaryDirectory(prefix="foredraft-hop-") as folder:
        parts = Parts(Path(folder), secrets.token_urlsafe(24))
        try:
            far = await parts.start("listen", ["scripts/hop.py", "--listen", "127.0.0.1:0", "--over", over])
            shape = ["--delay-ms", str(delay_ms), *(["--rate-mbit", str(rate_mbit)] if rate_mbit else [])]
            link = await parts.start("link", ["scripts/link_emulator.py", "--to", f"127.0.0.1:{far.port}", *shape])
            async with connected(("127.0.0.1", link.port), over) as exchange:
                sizes = SIZES[rate_mbit] if rate_mbit else UNLIMITED_SIZES
                samples = await measure(exchange, sizes, seconds=seconds)
        finally:
            await parts.stop()
    return {"set_latency_ms": 2 * delay_ms, "set_rate_mbit": rate_mbit} | figures_of(samples, over)


def median_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The turn whose latency is the median one, with the median rate of all; and every turn's terms beside them."""
    ordered = sorted(found, key=lambda one: float(one["latency_ms"]))
    rates = sorted(one["rate_mbit"] for one in found if one["rate_mbit"] is not None)
    middle = ordered[len(ordered) // 2]
    turns = [{term: one[term] for term in ("latency_ms", "rate_mbit")} for one in found]
    return middle | {"rate_mbit": rates[len(rates) // 2] if rates else None, "turns": turns}


async def run(seconds: float, repeats: int, results: Path | None) -> int:
    cells = [(over, rate, delay) for over in ("tcp", "ws") for rate in RATES_MBIT for delay in DELAYS_MS]
    # What the emulator and both ends take of their own: a link that is told to delay nothing.
    cells += [("tcp", None, 0.0), ("ws", None, 0.0)]
    found: dict[tuple[str, float | None, float], list[dict[str, Any]]] = {cell: [] for cell in cells}
    load_before = os.getloadavg()
    for _ in range(repeats):
        for over, rate_mbit, delay_ms in cells:
            found[over, rate_mbit, delay_ms].append(await measure_link(over, delay_ms, rate_mbit, seconds))
    links, goals, own_ms = [], [], {}
    for (over, rate_mbit, delay_ms), turns in found.items():
        link = median_of(turns)
        if delay_ms == 0:
            own_ms[over] = link["latency_ms"]
            continue
        links.append(link)
        name = f"{over}, {f'{rate_mbit:g} Mbit/s' if rate_mbit else 'unthrottled'}, {2 * delay_ms:g} ms"
        for term, wanted in (("latency_ms", 2 * delay_ms), ("rate_mbit", rate_mbit)):
            if wanted is None:
                continue
            met = link[term] is not None and abs(link[term] / wanted - 1) <= WITHIN
            goals.append(Goal(f"{name}: fitted {term}", f"within 10 % of {wanted:g}", link[term], met))
            print(f"{name}: {term} {link[term]} of {wanted:g}, {'met' if met else 'NOT met'}", flush=True)
    print(f"of it the emulator's and both ends' own, ms: {own_ms}")
    if results:
        write_results(
            results, command="python scripts/bench_hop.py --results docs/results/hop.json", packages=("websockets",),
            models={}, parameters={"seconds_each_size": seconds, "one_way_delays_ms": DELAYS_MS, "turns": repeats},
            figures={"latency of a link told to delay nothing, ms": own_ms, "load average before": load_before,
                     "load average after": os.getloadavg(), "links": links},
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
