"""The same pipeline with tracing and without, in turns: what tracing adds, with its uncertainty.

Two pipelines of three processes each stand side by side, over tiny checkpoints, so that passes are many and short and
little hides what an event costs. They are asked in turns, one at a time, and which of the two comes first changes. What
is compared is the processor time of the three processes for a pass of the target: it holds all that tracing does, the
writers' threads included, and a machine's other work disturbs it less than it does the time that passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.tiny import tiny_checkpoint
from relay.client import Finished, StreamClient
from scripts.processes import Parts
from speculation.fits import mean_interval

MAX_LENGTH = 512
ANSWER_TOKENS = 400
PROMPT = "Why is the sky blue?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of one pipeline; the times are of a pass of its target, in seconds."""

    traced: bool
    processor_s: float
    wall_s: float
    num_passes: int


def processor_s(pids: Sequence[int]) -> float:
    """Processor time that these processes' threads have taken, to the nanosecond; none of ours ends meanwhile."""
    return (
        sum(int(path.read_text().split()[0]) for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        * 1e-9
    )


@contextlib.asynccontextmanager
async def pipeline(
    folder: Path, secret: str, model: Path, *, traced: bool
) -> AsyncIterator[tuple[StreamClient, list[int]]]:
    """A relay and two nodes that are ready; a client of theirs, and their process ids."""
    parts = Parts(folder, secret)

    def trace(name: str) -> list[str]:
        return ["--trace", str(folder / f"{name}.jsonl")] if traced else []

    try:
        relay = await parts.start("relay", ["-m", "relay", "--port", "0", *trace("relay")])
        for role in ("verify", "draft"):
            flags = ["--relay", f"ws://127.0.0.1:{relay.port}", "--model", str(model), "--max-length", str(MAX_LENGTH)]
            await parts.start(role, ["-m", f"node_{role}", *flags, *trace(role)])
        async with StreamClient(f"ws://127.0.0.1:{relay.port}", secret=secret) as client:
            yield client, [part.process.pid for part in parts.running]
    finally:
        await parts.stop()


async def take_turn(client: StreamClient, pids: Sequence[int], *, traced: bool, answers: int) -> Turn:
    """So many answers, one after the other."""
    loop = asyncio.get_running_loop()
    before_s, began, passes = processor_s(pids), loop.time(), 0.0
    for _ in range(answers):
        async for event in client.stream(prompt=PROMPT, max_tokens=ANSWER_TOKENS, ignore_eos=True):
            if isinstance(event, Finished):
                passes += event.report["passes"]
    wall_s = loop.time() - began
    used_s = processor_s(pids) - before_s
    return Turn(traced=traced, processor_s=used_s / passes, wall_s=wall_s / passes, num_passes=int(passes))


async def turns_of_both(folder: Path, secret: str, *, turns: int, answers: int) -> list[Turn]:
    """So many turns of each pipeline, after one that is not counted."""
    # A drafter with the target's own weights is always right, so that rounds are many and each is traced.
    model = await asyncio.to_thread(tiny_checkpoint, folder / "model", seed=7, arch="llama")
    folders = {traced: folder / f"traced-{traced}" for traced in (True, False)}
    for one in folders.values():
        await asyncio.to_thread(one.mkdir)
    taken = []
    async with AsyncExitStack() as stack:
        both = {
            traced: await stack.enter_async_context(pipeline(one, secret, model, traced=traced))
            for traced, one in folders.items()
        }
        for traced, (client, pids) in both.items():
            await take_turn(client, pids, traced=traced, answers=1)
        for number in range(turns):
            for traced in (number % 2 == 0, number % 2 == 1):
                client, pids = both[traced]
                taken.append(await take_turn(client, pids, traced=traced, answers=answers))
    return taken


def comparison(turns: Sequence[Turn]) -> dict[str, Any]:
    """What a pass takes with tracing and without, in microseconds, and the mean difference of the pairs of turns with
    its 95 % interval."""
    pairs = [(one, other) if one.traced else (other, one) for one, other in zip(turns[::2], turns[1::2], strict=True)]
    figures: dict[str, Any] = {"turns of each": len(pairs), "passes": sum(turn.num_passes for turn in turns)}
    for name in ("processor_s", "wall_s"):
        values = {
            traced: [getattr(turn, name) * 1e6 for turn in turns if turn.traced is traced] for traced in (True, False)
        }
        mean, low, high = mean_interval([(getattr(a, name) - getattr(b, name)) * 1e6 for a, b in pairs])
        figures[f"{name.removesuffix('_s')} time of a pass, us"] = {
            "traced": statistics.median(values[True]),
            "untraced": statistics.median(values[False]),
            "difference": mean,
            "difference_95": [low, high],
        }
    return figures
