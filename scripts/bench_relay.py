"""What the relay costs: latency, throughput, memory and processor time, against a TCP splice and a bare echo.

    python scripts/bench_relay.py [--quick] [--results docs/results/relay.json]

Subjects, in the same run, each on `--core`, with the load on `--load-core`:

    splice   socat, one process for each connection: bytes in, bytes out
    echo     a WebSocket echo on the bare library (scripts/echo_server.py)
    relay    `python -m relay`: frames of one verify node to the clients of so many sessions

Latency is from the write of a frame to the arrival of its whole copy, both in the load process; what is *added* is the
difference of the quantiles. Frames/s/core are frames over the processor time that the subject took for them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_peers import Peer, connect, cpu_s, group_of, join, masked, resident_mb
from scripts.processes import Parts
from scripts.results import Goal, write_results
from wire.codec import encode
from wire.messages import OpenSession, TextDelta

SIZES = {"100 B": 100, "1 KB": 1024, "60 KB": 60_000}
WINDOW = 64
T3_MICRO_SHARE = 0.2
"""Baseline of a t3.micro: 10 % of each of two vCPUs."""
CORE_RATIO = 2.0
"""Assumed: a core of this machine does twice the work of a t3 vCPU (a hyperthread of a 2.5 GHz Xeon)."""


@dataclass
class Subject:
    """A running thing to measure, with its lanes: how to send a frame over lane i, and where its copy arrives."""

    name: str
    pids: Callable[[], list[int]]
    frame: Callable[[int, int], bytes]
    lanes: list[tuple[Peer, Peer]] = field(default_factory=list)


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and p99.9, in ms."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
    return {name: round(ordered[min(int(len(ordered) * q), len(ordered) - 1)] * 1e3, 4) for name, q in at.items()}


def delta_frame(size: int, session: str) -> bytes:
    """A delta of `size` bytes for a session, as a verify node sends it."""
    bare = encode(TextDelta(session=session, start=0, tokens=(1,), text=""))
    return encode(TextDelta(session=session, start=0, tokens=(1,), text="x" * max(0, size - len(bare))))


async def start_relay(parts: Parts, stack: AsyncExitStack, args: argparse.Namespace, num: int, size: int) -> Subject:
    """A relay with `num` sessions, each of a client of its own, all served by one verify node."""
    flags = ["--ping-interval-s", "30", "--log-level", "warning", *args.relay_flags.split()]
    part = await parts.start("relay", ["-m", "relay", "--port", "0", *flags], core=args.core)
    verify = await join(part.port, parts.secret, "verify")
    frames = {i: masked(delta_frame(size, f"s{i}")) for i in range(num)}
    subject = Subject("relay", lambda: [part.process.pid], lambda lane, size: frames[lane])
    for i in range(num):
        client = await join(part.port, parts.secret, "client")
        opened = asyncio.Event()
        verify.on_frame = lambda frame, now, opened=opened: opened.set()  # type: ignore[misc]
        client.send(masked(encode(OpenSession(session=f"s{i}", prompt="x", speculate=False))))
        await asyncio.wait_for(opened.wait(), 30)
        subject.lanes.append((verify, client))
        close_later(stack, client)
    close_later(stack, verify)
    return subject


async def start_echo(parts: Parts, stack: AsyncExitStack, args: argparse.Namespace, num: int, size: int) -> Subject:
    """A WebSocket echo with `num` connections."""
    flags = ["--uvloop"] if args.echo_uvloop else []
    part = await parts.start("echo", ["scripts/echo_server.py", *flags], core=args.core)
    frame = masked(b"x" * size)
    subject = Subject("echo", lambda: [part.process.pid], lambda lane, size: frame)
    for _ in range(num):
        peer = await connect(part.port)
        subject.lanes.append((peer, peer))
        close_later(stack, peer)
    return subject


async def start_splice(parts: Parts, stack: AsyncExitStack, args: argparse.Namespace, num: int, size: int) -> Subject:
    """socat between `num` connections of ours and as many back to us."""
    accepted: asyncio.Queue[Peer] = asyncio.Queue()

    def accept() -> Peer:
        peer = Peer(websocket=False)
        peer.raw_size = size
        accepted.put_nowait(peer)
        return peer

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0, backlog=1024)
    stack.callback(server.close)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    target = server.sockets[0].getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        "socat", f"TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr,nodelay,backlog=1024",
        f"TCP:127.0.0.1:{target},nodelay", start_new_session=True,
    )  # fmt: skip

    def end() -> None:
        os.killpg(process.pid, signal.SIGTERM)

    stack.push_async_callback(process.wait)
    stack.callback(end)
    os.sched_setaffinity(process.pid, {args.core})
    for _ in range(200):
        try:
            (await connect(port, websocket=False)).transport.close()  # type: ignore[union-attr]
            break
        except OSError:
            await asyncio.sleep(0.02)
    await asyncio.wait_for(accepted.get(), 10)
    frame = b"x" * size
    subject = Subject("splice", lambda: group_of(process.pid), lambda lane, size: frame)
    for _ in range(num):
        near = await connect(port, websocket=False)
        subject.lanes.append((near, await asyncio.wait_for(accepted.get(), 10)))
        close_later(stack, near)
    return subject


def close_later(stack: AsyncExitStack, peer: Peer) -> None:
    """Close a connection when the measurement is over."""
    assert peer.transport is not None
    stack.callback(peer.transport.close)


STARTS = {"splice": start_splice, "echo": start_echo, "relay": start_relay}


async def measure_latency(subject: Subject, size: int, *, rate: float, duration_s: float) -> dict[str, Any]:
    """Each lane sends `rate` frames a second, evenly spread; how long each took."""
    loop = asyncio.get_running_loop()
    sent: list[list[float]] = [[] for _ in subject.lanes]
    took: list[float] = []
    all_there = asyncio.Event()
    num_due = 0

    def receive(lane: int) -> Callable[[bytes, float], None]:
        # Frames of a lane stay in order, so the oldest one on its way is the one that has come.
        def on_frame(frame: bytes, now: float) -> None:
            took.append(now - sent[lane].pop(0))
            if len(took) == num_due:
                all_there.set()

        return on_frame

    for i, (_, receiver) in enumerate(subject.lanes):
        receiver.on_frame = receive(i)
    began, began_cpu = loop.time(), cpu_s(subject.pids())
    num = len(subject.lanes)

    async def drive() -> int:
        for i in itertools.count():
            at = began + i / (rate * num)
            if at > began + duration_s:
                return i
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            lane = i % num
            sender = subject.lanes[lane][0]
            sent[lane].append(time.perf_counter())
            sender.send(subject.frame(lane, size))
        raise AssertionError("a count has no end")

    gc.collect()
    gc.disable()
    try:
        num_due = await drive()
        if len(took) < num_due:
            await asyncio.wait_for(all_there.wait(), 20)
    finally:
        gc.enable()
    used = cpu_s(subject.pids()) - began_cpu
    check_alive(subject)
    return {**quantiles(took), "frames": len(took), "cpu_share": round(used / (loop.time() - began), 4)}


async def measure_throughput(subject: Subject, size: int, *, duration_s: float) -> dict[str, Any]:
    """All lanes send as fast as they can, with at most a window of frames under way."""
    loop = asyncio.get_running_loop()
    num_lanes = len(subject.lanes)
    window = max(2, min(WINDOW, 2048 // num_lanes, (2 << 20) // size))
    num = 0
    running = True

    def receive(lane: int) -> Callable[[bytes, float], None]:
        sender, frame = subject.lanes[lane][0], subject.frame(lane, size)
        refill = max(1, window // 2)
        credit = 0

        def on_frame(_: bytes, now: float) -> None:
            nonlocal num, credit
            num += 1
            credit += 1
            if credit == refill and running:
                sender.send(frame * refill)
                credit = 0

        return on_frame

    for i, (_, receiver) in enumerate(subject.lanes):
        receiver.on_frame = receive(i)
    for i, (sender, _) in enumerate(subject.lanes):
        sender.send(subject.frame(i, size) * window)
    await asyncio.sleep(0.3)
    began, began_num, began_cpu = loop.time(), num, cpu_s(subject.pids())
    await asyncio.sleep(duration_s)
    took_s, frames, used = loop.time() - began, num - began_num, cpu_s(subject.pids()) - began_cpu
    running = False
    await asyncio.sleep(0.2)
    check_alive(subject)
    return {
        "frames_per_s": round(frames / took_s),
        # Processor time is counted in ticks of each process: of a hundred idle ones there is nothing to see.
        "frames_per_s_per_core": round(frames / used) if used > took_s / 10 else None,
        "mb_per_s": round(frames * size / took_s / 1e6, 1),
        "cpu_share": round(used / took_s, 3),
    }


def check_alive(subject: Subject) -> None:
    """A subject that closed one of our connections has not been measured, whatever the numbers say."""
    lost = sum(peer.lost for lane in subject.lanes for peer in lane)
    if lost:
        raise RuntimeError(f"{subject.name} closed {lost} connections")


async def with_subject(
    args: argparse.Namespace, name: str, num: int, size: int, measure: Callable[[Subject], Any]
) -> dict[str, Any]:
    """Start a subject, measure it, end it."""
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(Path(folder), secrets.token_urlsafe(16))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(parts.stop)
            subject = await STARTS[name](parts, stack, args, num, size)
            figures: dict[str, Any] = await measure(subject)
    print(f"{name:7} {num:4} sessions {size:6} B  {figures}", file=sys.stderr, flush=True)
    return figures


async def measure_memory(subject: Subject) -> dict[str, Any]:
    """Resident memory with all connected and 50 of them busy, 20 frames a second each."""
    (pid,) = subject.pids()
    idle_mb = resident_mb(pid)
    busy = Subject(subject.name, subject.pids, subject.frame, subject.lanes[:50])
    figures = await measure_latency(busy, 100, rate=20, duration_s=5)
    return {"connected_mb": round(idle_mb, 1), "busy_mb": round(resident_mb(pid), 1), **figures}


async def bench(args: argparse.Namespace) -> dict[str, Any]:
    """All measurements."""
    seconds = 2.0 if args.quick else 6.0
    subjects = [name for name in STARTS if name != "splice" or shutil.which("socat")]
    figures: dict[str, Any] = {"latency": {}, "throughput": {}}
    for label, size in SIZES.items():
        rate = 100 if size < 10_000 else 20
        figures["latency"][f"{label}, 20 sessions x {rate}/s"] = {
            name: await with_subject(
                args, name, 20, size, partial(measure_latency, size=size, rate=rate, duration_s=seconds)
            )
            for name in subjects
        }
    for num, label in itertools.product((1, 20, 100, 500), SIZES):
        if (num in (1, 100, 500) and label == "60 KB" and args.quick) or (num == 500 and label == "60 KB"):
            continue
        figures["throughput"][f"{label}, {num} sessions"] = {
            name: await with_subject(
                args,
                name,
                num,
                SIZES[label],
                partial(measure_throughput, size=SIZES[label], duration_s=seconds / 2),
            )
            for name in subjects
        }
    figures["memory, 1000 connected, 50 busy"] = await with_subject(args, "relay", 1000, 100, measure_memory)
    one = await with_subject(args, "relay", 1, 100, measure_memory)
    figures["memory_per_session_kb"] = round(
        (figures["memory, 1000 connected, 50 busy"]["connected_mb"] - one["connected_mb"]) / 999 * 1e3, 1
    )
    figures["cpu, 20 busy sessions x 20/s"] = await with_subject(
        args, "relay", 20, 100, partial(measure_latency, size=100, rate=20, duration_s=seconds * 2)
    )
    return figures


def goals_of(figures: dict[str, Any]) -> list[Goal]:
    """The issue's goals, met or not."""
    latency = figures["latency"]["100 B, 20 sessions x 100/s"]
    goals = []
    for name, limit_ms in (("p50", 0.25), ("p99", 1.0)):
        if "splice" in latency:
            added = round(latency["relay"][name] - latency["splice"][name], 4)
            goals.append(
                Goal(f"added {name} over the splice, 20 x 100/s, ms", f"<= {limit_ms}", added, added <= limit_ms)
            )
    small = figures["throughput"]["100 B, 20 sessions"]
    relay, echo = (small[name]["frames_per_s_per_core"] for name in ("relay", "echo"))
    goals.append(Goal("small frames/s/core, 20 sessions", ">= 15000", relay, relay >= 15_000))
    ratio = round(echo / relay, 3)
    goals.append(Goal("bare echo / relay, small frames/s/core, 20 sessions", "<= 1.3", ratio, ratio <= 1.3))
    memory = figures["memory, 1000 connected, 50 busy"]["busy_mb"]
    goals.append(Goal("resident MB, 1000 sessions, 50 busy", "< 200", memory, memory < 200))
    share = figures["cpu, 20 busy sessions x 20/s"]["cpu_share"]
    limit = T3_MICRO_SHARE / CORE_RATIO
    goals.append(Goal("share of a core, 20 busy sessions x 20/s", f"< {limit:g}", share, share < limit))
    return goals


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the time")
    parser.add_argument("--core", type=int, default=0, help="core of the subjects")
    parser.add_argument("--load-core", type=int, default=1, help="core of the load")
    parser.add_argument("--relay-flags", default="", help="more flags for the relay")
    parser.add_argument("--echo-uvloop", action="store_true", help="give the echo the relay's event loop")
    parser.add_argument("--results", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    if args.load_core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {args.load_core})
    figures = asyncio.run(bench(args))
    goals = goals_of(figures)
    for goal in goals:
        print(f"{'met ' if goal.met else 'MISS'} {goal.name}: {goal.measured} ({goal.goal})")
    if args.results:
        write_results(
            args.results,
            command="python " + " ".join(sys.argv),
            packages=["websockets", "orjson", *(["uvloop"] if args.echo_uvloop else [])],
            models={},
            parameters={
                "window_frames": WINDOW, "core": args.core, "load_core": args.load_core, "quick": args.quick,
                "relay_flags": args.relay_flags, "core_ratio_to_a_t3_vcpu": CORE_RATIO,
            },
            figures=figures,
            goals=goals,
        )  # fmt: skip


if __name__ == "__main__":
    main()
