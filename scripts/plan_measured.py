"""What `foredraft-plan` is told by measurements instead of by hand: a link, and what a pass costs by its rows."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

import orjson

from speculation.breakeven import Link
from speculation.costs import PassCosts
from wire.aio.trace import trace_files

MIN_PASSES = 3


def link_of(path: Path) -> Link:
    """The link that `foredraft-hop --connect HOST:PORT --json` measured.

    Raises:
        ValueError: the file is not such a measurement.
    """
    try:
        found = json.loads(path.read_text())
        latency_s, rate_mbit = found["latency_ms"] / 1e3, found["rate_mbit"]
        if not (latency_s > 0 and (rate_mbit is None or rate_mbit > 0)):
            raise ValueError(f"latency_ms {found['latency_ms']}, rate_mbit {rate_mbit}")
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"--link: {path} is not what foredraft-hop --json prints: {exc}") from exc
    return Link(latency_s=latency_s, rate_bytes_per_s=rate_mbit and rate_mbit * 1e6 / 8)


def costs_of(path: Path) -> PassCosts:
    """Median seconds of a verify node's passes, Python around the model included, by rows of the whole pass.

    Sizes with fewer than MIN_PASSES passes say too little.

    Raises:
        ValueError: the trace cannot be read, or does not say what the target alone costs.
    """
    seconds: dict[int, list[float]] = defaultdict(list)
    try:
        for file in trace_files(path):
            for line in file.read_bytes().splitlines(keepends=True):
                try:
                    event = orjson.loads(line)
                except ValueError:
                    # Of a process that was killed the last line may be cut.
                    if line.endswith(b"\n"):
                        raise
                    continue
                # Each session of a shared pass tells the times of all of it, so a median may take them all.
                if event.get("event") == "verify":
                    seconds[event["pass_rows"]].append(event["compute_s"] + event["overhead_s"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"--verify-trace: {path} is not a verify node's trace: {exc!r}") from exc
    known = {rows: statistics.median(values) for rows, values in seconds.items() if len(values) >= MIN_PASSES}
    if 1 not in known:
        raise ValueError(
            f"--verify-trace: {path} has fewer than {MIN_PASSES} passes over one row, which is the target alone"
        )
    return PassCosts(known)
