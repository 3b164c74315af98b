"""Everything goes wrong: does every answer come out as if nothing had, and is nothing lost, doubled or left behind?

    python scripts/chaos.py virtual [--seed 1] [--seeds 1] [--virtual-sessions 2000]
    python scripts/chaos.py processes [--seconds 300] [--sessions 100] [--seed 1]
    python scripts/chaos.py all --results docs/results/chaos.json

`virtual`: the relay, nodes and clients themselves, in memory and under a virtual clock (`chaos_virtual.py`). A seed
is a run: one that fails is named, and fails again. `processes`: real processes, a real model and emulated links, in
real time (`chaos_processes.py`). An answer that finished must equal its reference token for token and character for
character; one that did not must have ended with an error that a missing part explains, and be the reference's
beginning. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import chaos_processes, chaos_virtual
from scripts.results import Goal, write_results

GROWN_MB = 20.0


def run_virtual(args: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """One run for each seed, and one again to see that it replays."""
    shape = chaos_virtual.Shape(num_sessions=args.virtual_sessions, arrive_s=args.virtual_sessions * 0.15)
    runs: dict[str, Any] = {}
    for seed in range(args.seed, args.seed + args.seeds):
        began = time.perf_counter()
        runs[f"seed {seed}"] = figures = chaos_virtual.run_world(seed, shape)
        figures["took_s"] = round(time.perf_counter() - began, 1)
        bad = faults_of(figures)
        print(
            f"virtual, seed {seed}: {figures['ended']} sessions, {figures['tokens']} tokens, "
            f"{figures['virtual_s']:g} virtual s in {figures['took_s']:g} s: {bad or 'nothing wrong'}",
            flush=True,
        )
        if bad:
            print(json.dumps(figures, indent=1))
            print(f"again: python scripts/chaos.py virtual --seed {seed} --virtual-sessions {args.virtual_sessions}")
    small = chaos_virtual.Shape(num_sessions=100, arrive_s=20.0)
    digests = {chaos_virtual.run_world(args.seed, small)["digest"] for _ in range(2)}
    every = list(runs.values())
    goals = [
        *goals_of("virtual", every),
        Goal("virtual: a run again with the same seed is the same run", True, len(digests) == 1, len(digests) == 1),
    ]
    return runs, goals


def run_processes(args: argparse.Namespace) -> tuple[dict[str, Any], list[Goal]]:
    """One run."""
    shape = chaos_processes.Shape(seconds=args.seconds, num_sessions=args.sessions)
    folder = Path(tempfile.mkdtemp(prefix="foredraft-chaos-"))
    figures = asyncio.run(chaos_processes.run_processes(args.seed, shape, folder))
    bad = faults_of(figures)
    print(f"processes: {figures['sessions']} answers, {figures['tokens']} tokens: {bad or 'nothing wrong'}")
    if bad:
        print(json.dumps(figures, indent=1))
        print(f"logs: {folder}")
    else:
        shutil.rmtree(folder)
    grown = figures["most_grown_mb"]
    return figures, [
        *goals_of("processes", [figures]),
        Goal("processes: growth of a process's memory since it had settled, MB", f"< {GROWN_MB:g}", grown,
             grown < GROWN_MB),
    ]  # fmt: skip


def goals_of(world: str, runs: list[dict[str, Any]]) -> list[Goal]:
    """What the issue asks to be shown, over all runs."""
    counts = {
        "answers that are not their reference, or end without a reason": sum(run["num_wrong"] for run in runs),
        "answers without an end": sum(hung(run) for run in runs),
        "processes that died and were not killed": sum(len(run["died"]) for run in runs),
        "sessions, bytes and tasks left behind": sum(sum(run["left"].values()) for run in runs),
    }
    return [Goal(f"{world}: {name}", 0, count, count == 0) for name, count in counts.items()]


def faults_of(figures: dict[str, Any]) -> str:
    """What went wrong in a run, in words; empty for nothing."""
    return ", ".join(f"{goal.name}: {goal.measured}" for goal in goals_of("run", [figures]) if not goal.met)


def hung(figures: dict[str, Any]) -> int:
    """Answers that have not ended."""
    return int(figures["hung"] if "hung" in figures else figures["sessions"] - figures["ended"])


def main() -> int:
    """The command; 1 if anything was lost, doubled, hung or died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=["virtual", "processes", "all"])
    parser.add_argument("--seed", type=int, default=1, help="of what goes wrong; in real time it does not replay")
    parser.add_argument("--seeds", type=int, default=1, help="virtual: so many runs, each with the next seed")
    parser.add_argument("--virtual-sessions", type=int, default=2000, help="virtual: answers in a run")
    parser.add_argument("--sessions", type=int, default=100, help="processes: answers under way at a time")
    parser.add_argument("--seconds", type=float, default=300.0, help="processes: how long")
    parser.add_argument("--results", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    figures: dict[str, Any] = {}
    goals: list[Goal] = []
    for world, run in (("virtual", run_virtual), ("processes", run_processes)):
        if args.world in (world, "all"):
            figures[world], new = run(args)
            goals += new
    for goal in goals:
        print(f"{'met ' if goal.met else 'MISS'} {goal.name}: {goal.measured} ({goal.goal})")
    if args.results:
        write_results(
            args.results,
            command="python " + " ".join(sys.argv),
            packages=["websockets", "orjson", "torch"],
            models={
                "virtual": "scripted target, drafter that agrees to 0.8",
                "processes": "random weights of a tiny llama; one drafter with the target's own weights, one without",
            },
            parameters={k: v for k, v in vars(args).items() if k != "results"},
            figures=figures,
            goals=goals,
        )
    return int(not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
