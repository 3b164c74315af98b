"""Does drafting from far away pay? All schedules, all round trips, in one run: `make bench`.

Each configuration is a pipeline of its own (relay, nodes, a link emulator on each leg, real sockets), all up at the
same time and idle but for the one that is asked. Prompts are held-out; for each prompt and round trip the
configurations are asked one after the other, so that what disturbs the machine disturbs all of them.

Three settings:

    reference  the target commits its recorded answers at 34 ms a pass (0.1 ms for each row beyond 16), the drafter is
               emulated: 3 ms a step (0.02 for each further row), hit rates of a 0.5B drafter of a 7B (top-1 0.735,
               top-4 0.924). Processes, sockets, links and all of Foredraft's code are real.
    paced      the target as above, the drafter shipped for it runs live
    native     both models run live, at this machine's own speed

    python scripts/bench.py --results docs/results/bench.json
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.replay import Recording, load_recordings, save_recordings
from relay.client import Delta, Finished, StreamClient
from scripts.bench_predict import OwnTimes, best_chains, own_times, predictions
from scripts.bench_report import Run, report
from scripts.demo import read_ledger
from scripts.demo_model import ensure_demo_checkpoint
from scripts.processes import ROOT, Part, Parts
from scripts.record_answers import record
from speculation.ledger import Ledger
from wire.connection import NUM_RTT_SAMPLES

DRAFTER = ROOT / "models" / "smollm2-135m-drafter"
RTTS_MS = (0.0, 20.0, 50.0, 86.0, 150.0, 230.0)
LIVE_RTTS_MS = (0.0, 86.0, 230.0)
TARGET_PACE, DRAFT_PACE = "34+0.1/16", "3+0.02"
PING_INTERVAL_S = 0.2
SYNCHRONOUS = ("--patience-ms", "5000", "--local", "none", "--switch-off", "never", "--row-costs", "free")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run the pipeline: flags of both nodes; `far` if its links have the round trip under test."""

    name: str
    growth: str | None
    verify: tuple[str, ...] = ()
    far: bool = True


def configurations(near_chain: int, far_chain: int, tree: str) -> list[Configuration]:
    """All of them; the target alone is a request flag of the last but one."""
    no_local = ("--local", "none")
    return [
        Configuration("co-located chain", f"chain:{near_chain}", SYNCHRONOUS, far=False),
        Configuration("co-located tree", tree, no_local, far=False),
        Configuration("WAN chain", f"chain:{far_chain}", SYNCHRONOUS),
        Configuration("WAN streamed chain", "chain:2+46", no_local),
        Configuration("WAN streamed tree", tree, no_local),
        Configuration("default", tree),
        Configuration("local alone", None, far=False),
    ]


@dataclass
class Pipeline:
    """The running processes of one configuration."""

    configuration: Configuration
    client: StreamClient
    links: list[Part] = field(default_factory=list)
    delay_file: Path | None = None

    async def set_rtt(self, rtt_ms: float) -> None:
        """Have the links delay by a quarter of the round trip each."""
        if self.configuration.far and self.delay_file is not None:
            self.delay_file.write_text(str(rtt_ms / 4))
            await self.link_bytes()

    async def link_bytes(self) -> tuple[int, int]:
        """Bytes so far from the draft node to the relay, and back."""
        sums = (0, 0)
        for link in self.links:
            os.kill(link.process.pid, signal.SIGHUP)
            assert link.process.stdout is not None
            line = json.loads(await link.process.stdout.readline())
            if link.name.endswith("draft"):
                sums = (line["up_bytes"], line["down_bytes"])
        return sums


async def start(
    parts: Parts, configuration: Configuration, *, target: Sequence[str], drafter: Sequence[str], stack: AsyncExitStack
) -> Pipeline:
    """Start one configuration's processes."""
    name = configuration.name.replace(" ", "-")
    # The ledger takes the wire from pings; they come often here, because the links are changed under way.
    ping = ["--ping-interval-s", str(PING_INTERVAL_S)]
    relay = await parts.start(f"{name}-relay", ["-m", "relay", "--port", "0", *ping])
    delay_file = parts.folder / f"{name}.delay"
    delay_file.write_text("0")
    roles = ["verify"] if configuration.growth is None else ["verify", "draft"]
    links = [
        await parts.start(
            f"{name}-link-{role}",
            ["scripts/link_emulator.py", "--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{relay.port}",
             "--delay-ms", "0", "--delay-file", str(delay_file)],
        )
        for role in roles
    ]  # fmt: skip
    flags = {
        "verify": [*target, *configuration.verify],
        "draft": [*drafter, "--growth", configuration.growth or "", "--trace", str(parts.folder / f"{name}.jsonl")],
    }
    await asyncio.gather(
        *(
            parts.start(
                f"{name}-{role}",
                ["-m", f"node_{role}", "--relay", f"ws://127.0.0.1:{link.port}", *flags[role]],
                core=0 if role == "verify" else 1,
                timeout_s=300,
            )
            for role, link in zip(roles, links, strict=True)
        )
    )
    client = await stack.enter_async_context(StreamClient(f"ws://127.0.0.1:{relay.port}", secret=parts.secret))
    return Pipeline(configuration, client, links, delay_file)


async def ask(pipeline: Pipeline, recording: Recording, num_tokens: int, *, speculate: bool = True) -> Run:
    """One answer, and whether it is the recorded one."""
    before = await pipeline.link_bytes()
    tokens: list[int] = []
    finished: Finished | None = None
    async for event in pipeline.client.stream(prompt_ids=recording.prompt, max_tokens=num_tokens, speculate=speculate):
        match event:
            case Delta():
                tokens += event.tokens
            case Finished():
                finished = event
    after = await pipeline.link_bytes()
    name = pipeline.configuration.name if speculate else "target alone"
    if finished is None or not tokens:
        raise RuntimeError(f"{name}: no answer came")
    return Run(
        configuration=name,
        kind=recording.kind,
        num_tokens=len(tokens),
        equal=tuple(tokens) == recording.answer[: len(tokens)],
        tokens_per_s=finished.tokens_per_s,
        report=dict(finished.report),
        bytes_up=after[0] - before[0],
        bytes_down=after[1] - before[1],
    )


async def run_setting(
    setting: str, args: argparse.Namespace, recordings: list[Recording], model: str
) -> tuple[list[Run], Ledger, OwnTimes]:
    """All configurations of one setting at all round trips; the ledger of the default's rounds, and our own times."""
    near, far = best_chains(recordings)
    rows = str(args.native_rows if setting == "native" else args.max_rows)
    node = ["--model", model, "--max-length", "1024"]
    target = [*node, "--max-rows", rows]
    if setting != "native":
        target += ["--replay", str(args.recordings), "--pace", TARGET_PACE]
    drafter = [*node, "--drafter", f"distilled:{DRAFTER}"]
    if setting == "reference":
        drafter = [*node, "--drafter", f"emulated:{args.recordings}", "--pace", DRAFT_PACE]
    tree = args.tree if setting == "reference" else args.live_tree
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="foredraft-bench-") as folder:
        parts = Parts(Path(args.keep or folder), secrets.token_urlsafe(24))
        parts.folder.mkdir(parents=True, exist_ok=True)
        try:
            async with AsyncExitStack() as stack:
                pipelines = {}
                for configuration in configurations(near, far, tree):
                    say(f"{setting}: starting {configuration.name}")
                    pipelines[configuration.name] = await start(
                        parts, configuration, target=target, drafter=drafter, stack=stack
                    )
                for rtt_ms in args.rtts if setting == "reference" else args.live_rtts:
                    for pipeline in pipelines.values():
                        await pipeline.set_rtt(rtt_ms)
                    await asyncio.sleep(NUM_RTT_SAMPLES * PING_INTERVAL_S)
                    for recording in recordings[: args.prompts]:
                        runs += await ask_all(pipelines, recording, args.tokens, setting, rtt_ms)
        finally:
            await asyncio.shield(parts.stop())
        trace = parts.folder / "default.jsonl"
        ledger, own = read_ledger(trace), own_times(trace)
    return runs, ledger, own


async def ask_all(
    pipelines: dict[str, Pipeline], recording: Recording, num_tokens: int, setting: str, rtt_ms: float
) -> list[Run]:
    """One prompt, all configurations; those without a far link at the shortest round trip alone."""
    runs = []
    for name, pipeline in pipelines.items():
        if pipeline.configuration.far or rtt_ms == 0 or name == "co-located chain":
            runs.append(await ask(pipeline, recording, num_tokens))
    runs.append(await ask(pipelines["default"], recording, num_tokens, speculate=False))
    for run in runs:
        run.setting, run.rtt_ms = setting, rtt_ms
    shown = ", ".join(f"{run.configuration} {run.tokens_per_s:.1f}" for run in runs)
    say(f"{setting}, {rtt_ms:g} ms, {recording.kind}: {shown}")
    return runs


def assisted_tokens_per_s(model: str, recordings: Sequence[Recording], num_tokens: int) -> float:
    """What a user would pick instead on one machine: transformers' `assistant_model`, the target's first two layers.

    The shipped drafter's reduced head is nothing that transformers loads.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    torch.set_num_threads(1)
    target: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assistant: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, num_hidden_layers=2).eval()
    tokens, began = 0, time.perf_counter()
    for recording in recordings:
        ids = torch.tensor([recording.prompt])
        with torch.inference_mode():
            answer = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
                assistant_model=assistant,
            )  # fmt: skip
        tokens += answer.shape[1] - ids.shape[1]
    return tokens / (time.perf_counter() - began)


def say(text: str) -> None:
    """A progress line."""
    print(f"  {text}", file=sys.stderr, flush=True)


def ensure_recordings(path: Path, model: str) -> list[Recording]:
    """The recordings, made first if there are none: four held-out prompts of each kind."""
    if not path.exists():
        say(f"recording the target's answers to {path} (some minutes, once)")
        save_recordings(path, record(model, DRAFTER, per_kind=4, min_tokens=96, max_tokens=192))
    # One of each kind in turn, so that a run over a few prompts has all kinds.
    by_kind: dict[str, list[Recording]] = defaultdict(list)
    for recording in load_recordings(path):
        by_kind[recording.kind].append(recording)
    turns = max(map(len, by_kind.values()))
    return [rows[turn] for turn in range(turns) for rows in by_kind.values() if turn < len(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["reference", "paced", "native"])
    parser.add_argument("--rtts", nargs="+", type=float, default=list(RTTS_MS), help="round trips, ms")
    parser.add_argument("--live-rtts", nargs="+", type=float, default=list(LIVE_RTTS_MS), help="where models run live")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--tree", default="tree:32x6", help="growth of the tree configurations")
    parser.add_argument("--live-tree", default="tree:4x4", help="the same where a live drafter runs on a CPU")
    parser.add_argument("--max-rows", type=int, default=64, help="rows of a paced pass")
    parser.add_argument("--native-rows", type=int, default=16, help="rows of a pass on a CPU")
    parser.add_argument("--recordings", type=Path, default=Path("~/.cache/foredraft/recordings.json.gz").expanduser())
    parser.add_argument("--results", type=Path, help="write the figures here, and a picture beside it")
    parser.add_argument("--keep", help="keep logs and traces in this folder")
    args = parser.parse_args()
    if args.results is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--results draws a picture and needs matplotlib: pip install -e '.[bench]'")
    began = time.monotonic()
    model = str(ensure_demo_checkpoint())
    recordings = ensure_recordings(args.recordings, model)
    runs: list[Run] = []
    ledgers: dict[str, Ledger] = {}
    own: dict[str, OwnTimes] = {}
    for setting in args.settings:
        answered, ledgers[setting], own[setting] = asyncio.run(run_setting(setting, args, recordings, model))
        runs += answered
    predicted = {}
    if "reference" in args.settings:
        predicted = predictions(
            runs, own["reference"], recordings[: args.prompts], growth=args.tree, max_tokens=args.tokens
        )
    parameters: dict[str, Any] = {
        "settings": args.settings, "rtts_ms": args.rtts, "live_rtts_ms": args.live_rtts,
        "prompts": args.prompts, "tokens": args.tokens,
        "tree": args.tree, "live tree": args.live_tree, "max_rows": args.max_rows, "native_rows": args.native_rows,
        "chains (side by side, far)": best_chains(recordings), "target pace": TARGET_PACE, "draft pace": DRAFT_PACE,
        "pinning": "verify nodes on core 0, draft nodes on core 1, one thread each",
        "minutes": round((time.monotonic() - began) / 60, 1),
    }  # fmt: skip
    if "native" in args.settings:
        say("native: transformers' assistant_model")
        assisted = assisted_tokens_per_s(model, recordings[: args.prompts], args.tokens)
        parameters["transformers assistant_model, tokens/s on the native prompts"] = round(assisted, 2)
    print(report(runs, ledgers, predicted, parameters, args.results))
    medians = statistics.median(run.tokens_per_s for run in runs)
    say(f"{len(runs)} answers, median {medians:.1f} tokens/s, {parameters['minutes']} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
