"""How many sessions does a verify node serve, and how fast? 1 to 16 of them, 86 ms away from their drafter.

Users ask one recorded prompt after the other; tokens are counted while all of them are busy. Servers:

    pipeline      relay, verify node, draft node and a link emulator on each leg as processes, with the defaults
    synchronous   the same with chains of γ candidates that each session waits for: while one waits, others are verified
    co-located    both models on one device: γ draft steps for all its sessions, then one pass (`scripts/colocated.py`)

Settings:

    paced      the target commits recorded answers at 34 ms a pass, 0.1 ms more for each row beyond 16; the drafter is
               emulated at 3 ms a step, 0.02 for each further row. A pass is held to 16 rows (what is free), then to 64
    native     SmolLM2-135M and its drafter live on this machine's cores, one for each node
    simulated  the paced setting under a virtual clock, to 32 sessions: what the schedule alone would give

    python scripts/bench_capacity.py --results docs/results/capacity.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.replay import Pace, Recording, ReplayDrafter, ReplayTarget, emulated
from relay.client import Delta
from scripts.bench import (
    DRAFT_PACE,
    DRAFTER,
    SYNCHRONOUS,
    TARGET_PACE,
    Configuration,
    Pipeline,
    ensure_recordings,
    say,
    start,
)
from scripts.bench_predict import REFERENCE_TIMES
from scripts.capacity_load import Answered, Capacity, measured, shares
from scripts.capacity_report import Curves, report
from scripts.colocated import ColocatedServer
from scripts.demo_model import ensure_demo_checkpoint
from scripts.processes import Parts
from scripts.simulation import Simulation
from speculation.costs import PassCosts
from speculation.growth import parse_growth
from speculation.local import parse_local
from speculation.selection import BestFirst
from wire.messages import OpenSession

RTT_MS = 86.0
NUMBERS = (1, 2, 4, 8, 16)
SIMULATED = (1, 4, 16, 32)
ROWS = (16, 64)
GAMMA = 4
NATIVE_GAMMA = 2
NATIVE_ROWS = 16
COST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_LENGTH = 1024
NUM_TEXTS = 8
"""Two of each kind: answers long enough that they do not consist of the first round trip."""


async def ask_all(
    pipeline: Pipeline, users: Sequence[Sequence[Recording]], num_tokens: int
) -> tuple[list[list[Answered]], dict[str, float]]:
    """All users at a time, over one client; and where the time of the answers went at the verify node, ms a pass."""
    sums: Counter[str] = Counter()

    async def one(recordings: Sequence[Recording]) -> list[Answered]:
        answers = []
        for recording in recordings:
            answered = Answered(recording, time.perf_counter())
            answers.append(answered)
            stream = pipeline.client.stream(prompt_ids=recording.prompt, max_tokens=num_tokens, ignore_eos=True)
            async for event in stream:
                if isinstance(event, Delta):
                    answered.take(event.tokens, time.perf_counter())
                else:
                    sums.update(event.report)
        return answers

    answered = list(await asyncio.gather(*(one(recordings) for recordings in users)))
    spent_s = {"in the target": sums["verify_compute_s"], "around it": sums["verify_overhead_s"]}
    spent_s["until the next pass"] = sums["answer_s"] - sum(spent_s.values())
    return answered, {what: round(seconds / sums["passes"] * 1e3, 2) for what, seconds in spent_s.items()}


def cpu_s(parts: Parts) -> dict[str, float]:
    """Processor time of each process so far, and of this one, in seconds."""
    used = {}
    for part in parts.running:
        fields = Path(f"/proc/{part.process.pid}/stat").read_text().rpartition(")")[2].split()
        used[part.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used | {"clients": time.process_time()}


async def live(
    name: str,
    pipeline: Pipeline,
    parts: Parts,
    recordings: Sequence[Recording],
    numbers: Sequence[int],
    num_tokens: int,
) -> tuple[list[Capacity], dict[str, float]]:
    """One server's curve, and where time goes at the most sessions: processor time of its processes for each second,
    and a pass of the verify node in ms."""
    await pipeline.set_rtt(RTT_MS)
    await asyncio.sleep(0.5)
    curve: list[Capacity] = []
    busy: dict[str, float] = {}
    spent_ms: dict[str, float] = {}
    for number in numbers:
        before, began = cpu_s(parts), time.perf_counter()
        users, spent_ms = await ask_all(pipeline, shares(recordings, number, num_tokens), num_tokens)
        lasted_s = time.perf_counter() - began
        busy = {part: (used - before[part]) / lasted_s for part, used in cpu_s(parts).items()}
        curve.append(measured(users))
        told(name, curve[-1])
    prefix = pipeline.configuration.name.replace(" ", "-") + "-"
    own = {part.removeprefix(prefix): busy[part] for part in busy if part == "clients" or part.startswith(prefix)}
    shown = {f"{part}, processor": round(share, 2) for part, share in own.items()}
    return curve, shown | {f"a pass, ms {what}": ms for what, ms in spent_ms.items()}


def told(name: str, point: Capacity) -> None:
    """Say what was measured."""
    say(
        f"{name}, {point.num_sessions} sessions: {point.tokens_per_s:.1f} tokens/s, {point.per_session:.1f} each"
        + ("" if point.equal else ", WRONG ANSWERS")
    )  # fmt: skip


def paced_colocated(
    recordings: Sequence[Recording], max_rows: int, numbers: Sequence[int], num_tokens: int
) -> list[Capacity]:
    """The co-located server at the paces of the paced setting, in real time."""
    curve = []
    for number in numbers:
        target = ReplayTarget(
            recordings, pace=Pace.parse(TARGET_PACE), num_slots=number, max_length=MAX_LENGTH, max_rows=max_rows
        )
        drafter = ReplayDrafter(
            recordings, emulated, pace=Pace.parse(DRAFT_PACE), num_slots=number, max_length=MAX_LENGTH
        )
        server = ColocatedServer(target, drafter, gamma=GAMMA, max_rows=max_rows)
        curve.append(measured(server.run(shares(recordings, number, num_tokens), num_tokens)))
        told(f"paced, {max_rows} rows, co-located γ={GAMMA}", curve[-1])
    return curve


def native_colocated(
    model: str, recordings: Sequence[Recording], numbers: Sequence[int], num_tokens: int
) -> list[Capacity]:
    """The co-located server with the models themselves, on one core."""
    import torch

    from engine.checkpoint import Checkpoint
    from engine.distilled import load_distilled
    from engine.drafter import HFDrafter
    from engine.prepare import ready_model
    from engine.target import HFTarget

    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    checkpoint = Checkpoint(model, max_length=MAX_LENGTH)
    vocab_size = checkpoint.tokenizer.vocab_size
    sizes: dict[str, Any] = {"num_slots": max(numbers), "max_length": MAX_LENGTH, "capture": False, "check": False}
    target = HFTarget(
        ready_model(checkpoint.load(dtype="float32"), max_tree_rows=max(numbers) * (1 + NATIVE_GAMMA), **sizes),
        vocab_size=vocab_size,
    )
    lm = load_distilled(DRAFTER, checkpoint, dtype="int8", device="cpu")
    drafter = HFDrafter(ready_model(lm, max_tree_rows=256, **sizes), vocab_size=vocab_size)
    curve = []
    for number in numbers:
        server = ColocatedServer(
            target, drafter, gamma=NATIVE_GAMMA, max_rows=target.max_rows, vocab_size=vocab_size
        )  # fmt: skip
        curve.append(measured(server.run(shares(recordings, number, num_tokens), num_tokens)))
        told(f"native, co-located γ={NATIVE_GAMMA}", curve[-1])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return curve


def simulated(
    recordings: Sequence[Recording], kind: str, max_rows: int, numbers: Sequence[int], num_tokens: int, tree: str
) -> list[Capacity]:
    """One server's curve under the virtual clock: "pipeline", "synchronous" or "co-located"."""
    curve = []
    colocated, waits = kind == "co-located", kind != "pipeline"
    times = replace(REFERENCE_TIMES, rtt_s=0.0 if colocated else RTT_MS / 1e3)
    for number in numbers:
        simulation = Simulation(
            target=ReplayTarget(
                recordings, pace=Pace(0.0), num_slots=number, max_length=MAX_LENGTH, max_rows=max_rows, real_time=False
            ),
            drafter=ReplayDrafter(
                recordings, emulated, pace=Pace(0.0), num_slots=number, max_length=MAX_LENGTH, real_time=False
            ),
            times=times, growth=parse_growth(f"chain:{GAMMA}" if waits else tree), selection=BestFirst(max_rows),
            vocab_size=1 << 20, patience_s=5.0 if waits else 0.0,
            local=parse_local("none" if waits else "recycle+suffix"),
            costs=None if waits else PassCosts({rows: times.verify_pass_s(rows) for rows in COST_BUCKETS}),
            gated=not waits, shared_device=colocated,
        )  # fmt: skip
        users = shares(recordings, number, num_tokens)
        curve.append(measured(_run(simulation, users, num_tokens)))
        told(f"simulated, {max_rows} rows, {kind}", curve[-1])
    return curve


def _run(simulation: Simulation, users: Sequence[Sequence[Recording]], num_tokens: int) -> list[list[Answered]]:
    """Have each user ask one prompt after the other in the simulation."""

    def ask(user: int, turn: int) -> None:
        recording = users[user][turn]
        request = OpenSession(session=f"{user}:{turn}", prompt_ids=recording.prompt, max_tokens=num_tokens)
        simulation.open(request, at_s=simulation.now)

    def on_done(session: str) -> None:
        user, turn = map(int, session.split(":"))
        if turn + 1 < len(users[user]):
            ask(user, turn + 1)

    simulation.on_done = on_done
    for user in range(len(users)):
        ask(user, 0)
    simulation.run()
    found: list[list[Answered]] = []
    for user, recordings in enumerate(users):
        found.append([])
        for turn, recording in enumerate(recordings):
            answer = simulation.answers[f"{user}:{turn}"]
            found[-1].append(Answered(recording, answer.opened_at, list(answer.tokens), list(answer.token_times)))
    return found


async def run_live(args: argparse.Namespace, recordings: list[Recording], model: str) -> tuple[Curves, dict[str, Any]]:
    """The pipelines of the paced and the native setting, one after the other."""
    slots = str(max(args.numbers))
    node = ["--model", model, "--max-length", str(MAX_LENGTH), "--slots", slots]
    replayed = ["--replay", str(args.recordings), "--pace", TARGET_PACE]
    emulation = [*node, "--drafter", f"emulated:{args.recordings}", "--pace", DRAFT_PACE]
    first, second = (str(rows) for rows in ROWS)
    servers = {
        f"paced, {first} rows, pipeline": (
            Configuration("rows-a", args.tree), [*node, "--max-rows", first, *replayed], emulation
        ),
        f"paced, {first} rows, synchronous γ={GAMMA}": (
            Configuration("synchronous", f"chain:{GAMMA}", SYNCHRONOUS),
            [*node, "--max-rows", first, *replayed], emulation,
        ),
        f"paced, {second} rows, pipeline": (
            Configuration("rows-b", args.tree), [*node, "--max-rows", second, *replayed], emulation
        ),
        "native, pipeline": (
            Configuration("native", args.live_tree), [*node, "--max-rows", str(NATIVE_ROWS)],
            [*node, "--drafter", f"distilled:{DRAFTER}"],
        ),
    }  # fmt: skip
    curves: Curves = {}
    busy: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="foredraft-capacity-") as folder:
        parts = Parts(Path(args.keep or folder), secrets.token_urlsafe(24))
        parts.folder.mkdir(parents=True, exist_ok=True)
        try:
            async with AsyncExitStack() as stack:
                for name, (configuration, target, drafter) in servers.items():
                    setting = name.partition(",")[0]
                    if setting not in args.settings:
                        continue
                    say(f"starting {name}")
                    pipeline = await start(parts, configuration, target=target, drafter=drafter, stack=stack)
                    # Where each session waits for a round trip, a few of them say nothing about capacity.
                    numbers = [n for n in args.numbers if "synchronous" not in name or n >= 4]
                    num_tokens = args.native_tokens if setting == "native" else args.tokens
                    asked = recordings[:4] if setting == "native" else recordings
                    curves[name], busy[name] = await live(name, pipeline, parts, asked, numbers, num_tokens)
        finally:
            await asyncio.shield(parts.stop())
    return curves, busy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["paced", "native", "simulated"])
    parser.add_argument("--numbers", nargs="+", type=int, default=list(NUMBERS), help="sessions at a time")
    parser.add_argument("--tokens", type=int, default=80, help="tokens of an answer")
    parser.add_argument("--native-tokens", type=int, default=24, help="the same where the models run live")
    parser.add_argument("--tree", default="tree:16x4", help="growth of the pipeline")
    parser.add_argument("--live-tree", default="tree:4x4", help="the same where the drafter runs live on a CPU")
    parser.add_argument("--recordings", type=Path, default=Path("~/.cache/foredraft/recordings.json.gz").expanduser())
    parser.add_argument("--results", type=Path, help="write the figures here, and a picture beside it")
    parser.add_argument("--keep", help="keep logs and traces in this folder")
    args = parser.parse_args()
    began = time.monotonic()
    model = str(ensure_demo_checkpoint())
    recordings = ensure_recordings(args.recordings, model)[:NUM_TEXTS]
    curves, busy = asyncio.run(run_live(args, recordings, model))
    if "paced" in args.settings:
        for rows in ROWS:
            curves[f"paced, {rows} rows, co-located γ={GAMMA}"] = paced_colocated(
                recordings, rows, args.numbers, args.tokens
            )
    if "native" in args.settings:
        curves[f"native, co-located γ={NATIVE_GAMMA}"] = native_colocated(
            model, recordings[:4], args.numbers, args.native_tokens
        )
    if "simulated" in args.settings:
        for rows in ROWS:
            for kind in ("pipeline", "synchronous", "co-located"):
                if kind == "synchronous" and rows != ROWS[0]:
                    continue
                numbers = [n for n in SIMULATED if kind == "pipeline" or n <= max(args.numbers)]
                name = f"simulated, {rows} rows, {kind}" + ("" if kind == "pipeline" else f" γ={GAMMA}")
                curves[name] = simulated(recordings, kind, rows, numbers, args.tokens, args.tree)
    parameters: dict[str, Any] = {
        "rtt_ms": RTT_MS, "sessions": args.numbers, "tokens": args.tokens, "native tokens": args.native_tokens,
        "rows of a pass": list(ROWS), "native rows of a pass": NATIVE_ROWS, "tree": args.tree,
        "live tree": args.live_tree, "gamma": GAMMA, "native gamma": NATIVE_GAMMA, "target pace": TARGET_PACE,
        "draft pace": DRAFT_PACE, "pinning": "verify nodes on core 0, draft nodes on core 1, one thread each",
        "minutes": round((time.monotonic() - began) / 60, 1),
    }  # fmt: skip
    print(report(curves, busy, parameters, gamma=GAMMA, results=args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
