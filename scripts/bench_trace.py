"""What tracing costs and how fast a trace is read: `docs/results/trace.json`.

    python scripts/bench_trace.py --run FOLDER --results docs/results/trace.json

FOLDER holds the traces of a real run (`scripts/demo.py --keep FOLDER`): how many events a pass has and how long it
takes come from there. The cost is processor time, of the writer's thread too: on one core it competes with the model.
It is found twice: as what an event costs, times the events of a pass; and as the difference of pipelines with tracing
and without, in turns (`trace_turns`), with its 95 % interval, which has to lie below the goal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.report import read_trace
from scripts.results import Goal, write_results
from speculation.ledger import Round
from speculation.trace_join import Joined
from wire.aio.trace import TraceWriter
from wire.messages import RoundTiming

NUM_ROUNDS = 1_000_000
NUM_EVENTS = 50_000  # below the writer's queue, so that none is dropped
COST_GOAL, UNACCOUNTED_GOAL, READ_GOAL_S, MEMORY_GOAL_MB = 0.01, 0.02, 30.0, 1000.0


def sample_round(number: int) -> dict[str, Any]:
    """A round as the draft node traces it; a new one starts every 30 ms and takes 130."""
    at = 1000.0 + number * 0.03
    return {
        "started_at": at, "sent_at": at + 0.0051234567, "received_at": at + 0.1301234567,
        "applied_at": at + 0.1303456789, "draft_s": 0.0041234567, "relay_down_s": 0.0002345678,
        "draft_hop_rtt_s": 0.0431234567, "verify_hop_rtt_s": 0.0432345678,
        "timing": {"frame": number, "relay_s": 0.0002123456, "queue_s": 0.0081234567, "verify_s": 0.0221234567,
                   "overhead_s": 0.0101234567},
    }  # fmt: skip


def cost_of_an_event_s(folder: Path) -> float:
    """Processor seconds of one event, from the call to the disk."""
    fields = sample_round(1)
    timing = RoundTiming(**fields.pop("timing"))
    writer = TraceWriter(folder / "cost.jsonl")
    began = time.process_time()
    for _ in range(NUM_EVENTS):
        # As the draft node does it: the event itself has to be built first.
        writer.write("round", 1.0, session="s", **asdict(Round(**fields, timing=timing)))
    writer.close()
    if writer.num_dropped:
        raise RuntimeError(f"{writer.num_dropped} events were dropped, so the cost is not that of writing them")
    return (time.process_time() - began) / NUM_EVENTS


def read_a_million(folder: Path) -> dict[str, float]:
    """Time and memory of the whole command, in a process of its own."""
    path = folder / "million.jsonl"
    with path.open("wb") as file:
        for number in range(NUM_ROUNDS):
            event = {"event": "round", "now": 1.0, "session": f"s{number // 200}", **sample_round(number)}
            file.write(orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE))
    began = time.perf_counter()
    command = [sys.executable, "scripts/report.py", "--draft", str(path), "--html", str(folder / "report.html")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    return {"seconds": seconds, "peak_mb": peak_mb, "trace_mb": path.stat().st_size / 1e6}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of a run's draft.jsonl, relay.jsonl and verify.jsonl"
    )
    parser.add_argument("--turns", type=int, default=60, help="of a pipeline with tracing and of one without")
    parser.add_argument(
        "--answers", type=int, default=1, help="of a turn; short ones, so that the two of a pair meet the same machine"
    )
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    joined, shares = Joined(), {}
    num_events = {name: read_trace(joined, name, args.run / f"{name}.jsonl") for name in ("draft", "relay", "verify")}
    num_passes = sum(one.num_passes for one in joined.sessions.values())
    busy_s = sum(one.lasted_s for one in joined.sessions.values())
    with tempfile.TemporaryDirectory(prefix="foredraft-trace-") as name:
        event_s = cost_of_an_event_s(Path(name))
        for process, num in num_events.items():
            shares[process] = event_s * num / busy_s
        reading = read_a_million(Path(name))
        # Not above: torch comes with it, and a child's peak memory counts from its parent's.
        from scripts.trace_turns import comparison, turns_of_both

        (Path(name) / "turns").mkdir()
        folder = Path(name) / "turns"
        taken = asyncio.run(turns_of_both(folder, secrets.token_urlsafe(24), turns=args.turns, answers=args.answers))
    compared = comparison(taken)
    pass_s = busy_s / num_passes
    difference = compared["processor time of a pass, us"]
    added_share, low, high = (us * 1e-6 / pass_s for us in (difference["difference"], *difference["difference_95"]))
    # An interval as wide as the goal would meet it by chance.
    resolved = (high - low) / 2 <= COST_GOAL
    unaccounted, worst = joined.unaccounted_share, max(shares.values())
    goals = [
        Goal("cost of tracing, share of a node's time", f"<= {COST_GOAL}", worst, worst <= COST_GOAL),
        Goal(
            "with tracing less without, of all three processes, share of a pass; upper end of its 95 % interval",
            f"<= {COST_GOAL}, and the interval no wider than that each way",
            high,
            high <= COST_GOAL and resolved,
        ),
        Goal(
            "unaccounted share of rounds", f"<= {UNACCOUNTED_GOAL}", unaccounted, abs(unaccounted) <= UNACCOUNTED_GOAL
        ),
        Goal("reading a million rounds, s", f"< {READ_GOAL_S}", reading["seconds"], reading["seconds"] < READ_GOAL_S),
        Goal("memory for it, MB", f"< {MEMORY_GOAL_MB}", reading["peak_mb"], reading["peak_mb"] < MEMORY_GOAL_MB),
    ]
    for goal in goals:
        print(f"{goal.name}: {goal.measured:.4g} (goal {goal.goal}), {'met' if goal.met else 'NOT met'}")
    if args.results:
        write_results(
            args.results, command="python scripts/bench_trace.py --run FOLDER --results docs/results/trace.json",
            packages=("orjson",), models={},
            parameters={"rounds": NUM_ROUNDS, "run": "scripts/demo.py --keep FOLDER", "turns": args.turns,
                        "answers of a turn": args.answers},
            figures={"warnings of the report": joined.warnings(), "event_us": event_s * 1e6, "events": num_events,
                     "passes": num_passes, "load average": os.getloadavg(), "pass_ms": busy_s / num_passes * 1e3,
                     "cost_share": shares, "with and without tracing":
                     compared | {"share of a pass": added_share, "share_95": [low, high]},
                     "reading": reading},
            goals=goals,
        )  # fmt: skip
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
