"""The main job on one machine: two "regions" and a relay as processes, a wide-area link between them, a real model.

    python scripts/demo.py [--rtt-ms 86] ["your question"]

Starts the relay, a link emulator on each leg, a draft node and a verify node; asks a question through the streaming
client; prints the answer as it arrives; asks again with the target alone, and compares tokens and speed. Ends with the
ledger of the rounds. Everything it started is gone when it ends, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from relay.client import Delta, Finished, StreamClient
from scripts.demo_model import DemoModelError, ensure_demo_checkpoint
from scripts.processes import ROOT, Part, Parts, StartFailed
from scripts.results import Goal, write_results
from speculation.ledger import Ledger, Round
from wire.errors import WireError
from wire.messages import RoundTiming
from wire.sampling import Sampling

QUESTION = "Why is the sky blue? Explain it to a child, then name three other things that scatter light."
TRAINED = ROOT / "models" / "smollm2-135m-drafter"
RELAY_MEMORY_GOAL_MB = 80.0
UNACCOUNTED_GOAL = 0.02
SHADES = {"draft": "\x1b[32m", "local": "\x1b[36m", "plain": ""}


def say(text: str) -> None:
    """A progress line, on standard error, so that standard output holds the answer and the figures."""
    print(f"  {text}", file=sys.stderr, flush=True)


async def start_pipeline(parts: Parts, args: argparse.Namespace, model: str) -> dict[str, Part]:
    """Start the five processes; the two nodes load at the same time."""
    started = time.monotonic()
    relay = await parts.start("relay", ["-m", "relay", "--port", "0", "--trace", str(parts.folder / "relay.jsonl")])
    legs = {}
    for leg in ("draft", "verify"):
        # Each frame between the nodes crosses two legs, and a round trip crosses each of them twice.
        delay_ms = str(args.rtt_ms / 4)
        legs[leg] = await parts.start(
            f"link-{leg}",
            ["scripts/link_emulator.py", "--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{relay.port}",
             "--delay-ms", delay_ms],
        )  # fmt: skip
    say("loading the target and the drafter")

    def node(role: str, *flags: str) -> list[str]:
        trace = parts.folder / f"{role}.jsonl"
        return ["-m", f"node_{role}", "--relay", f"ws://127.0.0.1:{legs[role].port}", "--trace", str(trace), *flags]

    verify, draft = await asyncio.gather(
        parts.start("verify", node("verify", "--model", model, "--max-length", str(args.max_length),
                                       "--max-rows", str(args.max_rows)), core=0),
        parts.start(
            "draft",
            node("draft", "--model", args.draft_model or model, "--drafter", args.drafter, "--growth", args.growth,
                 "--max-length", str(args.max_length)),
            core=1,
        ),
    )  # fmt: skip
    say(f"all five processes are up after {time.monotonic() - started:.1f} s")
    return {"relay": relay, "verify": verify, "draft": draft, **{f"link-{leg}": part for leg, part in legs.items()}}


async def ask(client: StreamClient, args: argparse.Namespace, *, speculate: bool) -> tuple[list[int], Finished]:
    """Stream one answer to standard output; its token ids and the closing record."""
    tokens: list[int] = []
    colour = sys.stdout.isatty()
    async for event in client.stream(
        messages=[("user", args.question)],
        max_tokens=args.max_tokens,
        sampling=Sampling(temperature=args.temperature, seed=args.seed),
        speculate=speculate,
    ):
        match event:
            case Delta():
                tokens += event.tokens
                shade = SHADES[event.sources[-1]] if colour and event.sources else ""
                print(f"{shade}{event.text}\x1b[0m" if shade else event.text, end="", flush=True)
            case Finished():
                print(flush=True)
                return tokens, event
    raise AssertionError("a stream ends with Finished or an exception")


def read_ledger(trace: Path) -> Ledger:
    """The rounds that the draft node traced."""
    ledger = Ledger()
    for line in trace.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event.pop("event") == "round":
            del event["now"], event["session"]
            ledger.add(Round(**{**event, "timing": RoundTiming(**event["timing"])}))
    return ledger


def figures_of(tokens: list[int], finished: Finished) -> dict[str, float]:
    """The figures of one answer that the summary shows."""
    report = finished.report
    return {
        "tokens": len(tokens),
        "time_to_first_token_s": finished.time_to_first_token_s,
        "tokens_per_s": finished.tokens_per_s,
        "rounds": report["rounds"],
        "passes": report["passes"],
        "acceptance_rate": report["acceptance_rate"],
        "mean_acceptance_length": report["mean_acceptance_length"],
    }


def summary(with_draft: dict[str, float], alone: dict[str, float], equal: bool) -> str:
    """What the newcomer reads at the end."""
    ratio = with_draft["tokens_per_s"] / alone["tokens_per_s"]
    return "\n".join(
        [
            f"tokens                  {with_draft['tokens']:.0f}  (the target alone: the same tokens: {equal})",
            f"time to first token     {with_draft['time_to_first_token_s'] * 1e3:.0f} ms",
            f"tokens/s                {with_draft['tokens_per_s']:.2f}  (target alone {alone['tokens_per_s']:.2f}, "
            f"ratio {ratio:.2f})",
            f"acceptance rate         {with_draft['acceptance_rate']:.3f}",
            f"mean acceptance length  {with_draft['mean_acceptance_length']:.2f}",
            f"rounds / passes         {with_draft['rounds']:.0f} / {with_draft['passes']:.0f}",
        ]
    )


async def run(args: argparse.Namespace) -> int:
    """The whole demo; the exit code."""
    began = time.monotonic()
    model = args.model or str(ensure_demo_checkpoint())
    with tempfile.TemporaryDirectory(prefix="foredraft-") as folder:
        parts = Parts(Path(args.keep or folder), secrets.token_urlsafe(24))
        parts.folder.mkdir(parents=True, exist_ok=True)
        try:
            started = await start_pipeline(parts, args, model)
            relay_rest_mb = started["relay"].resident_mb()
            async with StreamClient(f"ws://127.0.0.1:{started['relay'].port}", secret=parts.secret) as client:
                say(f"asking, with the drafter {args.rtt_ms:g} ms away ({time.monotonic() - began:.1f} s after start)")
                print(f"\n> {args.question}\n", flush=True)
                tokens, finished = await ask(client, args, speculate=True)
                say("asking again, the target alone")
                alone_tokens, alone = await ask(client, args, speculate=False)
            codes = await parts.stop()
        except (StartFailed, WireError) as exc:
            print(f"demo: {exc}", file=sys.stderr)
            return 1
        finally:
            await asyncio.shield(parts.stop())
        ledger = read_ledger(parts.folder / "draft.jsonl")
    equal = tokens == alone_tokens
    with_draft, by_itself = figures_of(tokens, finished), figures_of(alone_tokens, alone)
    print(f"\n{summary(with_draft, by_itself, equal)}\n\n{ledger.format_table()}")
    if bad := {name: code for name, code in codes.items() if code != 0}:
        print(f"demo: these processes did not end well: {bad}", file=sys.stderr)
    if args.results:
        report(args, with_draft, by_itself, equal, ledger, relay_rest_mb, model)
    return 0 if equal and not bad else 1


def report(
    args: argparse.Namespace,
    with_draft: dict[str, float],
    alone: dict[str, float],
    equal: bool,
    ledger: Ledger,
    relay_rest_mb: float,
    model: str,
) -> None:
    """Write `docs/results/demo.json`."""
    unaccounted = ledger.unaccounted_share
    goals = [
        Goal("streamed tokens equal those of the target alone", True, equal, equal),
        Goal(
            "unaccounted share of a round", f"<= {UNACCOUNTED_GOAL}", round(unaccounted, 4),
            abs(unaccounted) <= UNACCOUNTED_GOAL,
        ),
        Goal(
            "relay resident at rest, MB", f"< {RELAY_MEMORY_GOAL_MB}", round(relay_rest_mb, 1),
            relay_rest_mb < RELAY_MEMORY_GOAL_MB,
        ),
    ]  # fmt: skip
    write_results(
        Path(args.results),
        command="python scripts/demo.py --results docs/results/demo.json",
        packages=("torch", "transformers", "websockets", "orjson"),
        models={
            "target": Path(model).name,
            "drafter": f"{Path(args.draft_model or model).name}, {Path(args.drafter).name}",
        },
        parameters={
            "rtt_ms": args.rtt_ms, "growth": args.growth, "max_tokens": args.max_tokens,
            "temperature": args.temperature, "seed": args.seed, "question": args.question,
            "pinning": "verify on core 0, draft on core 1, one thread each",
        },
        figures={
            "with_draft": with_draft,
            "target_alone": alone,
            "ratio_to_target_alone": with_draft["tokens_per_s"] / alone["tokens_per_s"],
            "ledger": ledger.figures(),
        },
        goals=goals,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--rtt-ms", type=float, default=86.0, help="draft node to verify node and back")
    parser.add_argument("--model", help="target checkpoint or hub id; default: SmolLM2-135M-Instruct from a package")
    parser.add_argument("--draft-model", help="drafter checkpoint or hub id; default: the target's")
    parser.add_argument("--drafter", help="see node_draft --help; default: the one trained for SmolLM2, else ngram")
    parser.add_argument("--growth", default="tree:4x4", help="see node_draft --help")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--max-length", type=int, default=1024, help="most tokens of prompt and answer")
    parser.add_argument(
        "--max-rows", type=int, default=16, help="rows of a verify pass; on a CPU each further one costs"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="keep logs and traces in this folder")
    parser.add_argument("--results", help="write the figures to this file")
    args = parser.parse_args(argv)
    # Without a --model the target is the one that the shipped drafter was trained for.
    args.drafter = args.drafter or ("ngram" if args.model or args.draft_model else f"distilled:{TRAINED}")
    # A plain kill ends the demo as Ctrl-C does: with everything it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return asyncio.run(run(args))
    except DemoModelError as exc:
        print(f"demo: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
