"""The pipeline under a virtual clock: what a link, a target and a drafter would give, with the real schedulers.

The models are either synthetic (the target continues by a hash, the drafter agrees with it at `--acceptance`) or
recorded (`--recordings`, see `scripts/record_answers.py`): what a real target committed on held-out prompts, and what
a real drafter proposed there (`--drafter recorded`) or a drafter of the hit rates of `engine.replay.emulated` would.
`--sweep` prints a line for each round trip.

    python scripts/simulate.py --rtt-ms 86 --verify-ms 34 --draft-ms 3 --acceptance 0.8
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.errors import EngineError
from engine.replay import Pace, Recording, ReplayDrafter, ReplayTarget, emulated, from_trace, load_recordings
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import hash_logits, ranking
from scripts.simulation import Fault, Simulation, Times, no_fault
from speculation.costs import PassCosts
from speculation.growth import parse_growth
from speculation.local import parse_local
from speculation.selection import BestFirst
from wire.messages import Message, OpenSession

SWEEP_MS = (0.0, 20.0, 50.0, 86.0, 150.0, 230.0)
COST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What can be chosen by name: the same names as the nodes' flags."""

    growth: str = "tree:16x4"
    local: str = "recycle+suffix"
    max_rows: int = 64
    patience_s: float = 0.0
    gated: bool = True
    speculate: bool = True
    drafter: bool = True


def shaken(*, jitter_s: float, stall_every_s: float, stall_s: float, seed: int) -> Fault:
    """Delays of a link: spread around none, and stalls as TCP shows a lost packet, at random times on each leg."""
    if not (jitter_s or stall_every_s):
        return no_fault
    rng = random.Random(seed)

    def fault(leg: str, message: Message) -> Sequence[float]:
        extra_s = rng.uniform(0, jitter_s)
        if stall_every_s and rng.random() < 0.01 / stall_every_s:
            extra_s += stall_s
        return (extra_s,)

    return fault


def simulate_recordings(
    recordings: Sequence[Recording],
    propose: Callable[[Recording], Any],
    times: Times,
    policies: Policies,
    *,
    max_tokens: int = 192,
    fault: Fault = no_fault,
) -> dict[str, float]:
    """Answer each recording's prompt in a simulation of its own; figures over all of them.

    Raises:
        RuntimeError: an answer differs from its recording.
    """
    num_tokens, seconds, sources, totals, frames = 0, 0.0, Counter[str](), Counter[str](), Counter[str]()
    for recording in recordings:
        length = len(recording.prompt) + max_tokens + 8
        # Everything that times a pass stays outside the runners: they are asked and answer at once.
        target = ReplayTarget(
            recordings, pace=Pace(0.0), max_rows=policies.max_rows, max_length=length, real_time=False
        )
        drafter = ReplayDrafter(recordings, propose, pace=Pace(0.0), max_length=length, real_time=False)
        costs = PassCosts({rows: times.verify_pass_s(rows) + times.verify_overhead_s for rows in COST_BUCKETS})
        simulation = Simulation(
            target=target,
            drafter=drafter if policies.drafter else None,
            times=times,
            growth=parse_growth(policies.growth),
            selection=BestFirst(policies.max_rows),
            vocab_size=1 << 20,
            patience_s=policies.patience_s,
            local=parse_local(policies.local),
            costs=costs if policies.patience_s == 0 else None,
            gated=policies.gated,
            fault=fault,
        )
        wanted = recording.answer[:max_tokens]
        request = OpenSession(
            session="s", prompt_ids=recording.prompt, max_tokens=len(wanted), speculate=policies.speculate
        )
        simulation.open(request)
        simulation.run()
        answer = simulation.answers["s"]
        if answer.done is None or tuple(answer.tokens) != wanted:
            raise RuntimeError(f"the answer is not the recorded one: {answer.error or answer.tokens[:20]}")
        num_tokens += len(answer.tokens)
        seconds += answer.token_times[-1] - answer.opened_at
        sources.update(answer.sources)
        totals.update(answer.done.report)
        frames.update(simulation.num_frames)
    return {
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds,
        "target_only_tokens_per_s": 1 / times.verify_pass_s(1),
        "ratio_to_target_only": num_tokens / seconds * times.verify_pass_s(1),
        "passes_per_token": totals["passes"] / num_tokens,
        "rows_per_pass": totals["rows"] / totals["passes"],
        "mean_acceptance_length": 1 + totals["accepted"] / max(1, totals["rounds"]),
        "candidates_per_token": totals["candidates_received"] / num_tokens,
        "frames_up_per_token": frames["draft>relay"] / num_tokens,
        "frames_down_per_token": frames["relay>draft"] / num_tokens,
    } | {f"share_{source}": sources[source] / num_tokens for source in ("draft", "local", "plain")}


def synthetic(args: argparse.Namespace, times: Times, policies: Policies, fault: Fault) -> dict[str, Any]:
    """One answer of the scripted models."""
    vocab_size = 64
    logits = hash_logits(vocab_size, args.seed, 4.0)
    length = args.tokens + 64
    target = ScriptedTarget(logits, num_slots=1, max_length=length, max_rows=policies.max_rows, vocab_size=vocab_size)
    drafter = ScriptedDrafter(
        ranking(logits, args.acceptance, args.seed), num_slots=1, max_length=length, vocab_size=vocab_size
    )
    simulation = Simulation(
        target=target, drafter=drafter, times=times, growth=parse_growth(policies.growth),
        selection=BestFirst(policies.max_rows), vocab_size=vocab_size, patience_s=policies.patience_s,
        local=parse_local(policies.local), gated=policies.gated, fault=fault,
    )  # fmt: skip
    prompt = tuple(random.Random(args.seed).choices(range(vocab_size), k=8))
    simulation.open(OpenSession(session="s", prompt_ids=prompt, max_tokens=args.tokens))
    simulation.run()
    answer = simulation.answers["s"]
    assert answer.done is not None
    busy = simulation.busy_share("verify", answer.token_times[0], answer.token_times[-1])
    return {
        "tokens": len(answer.tokens),
        "tokens_per_s": answer.tokens_per_s,
        "target_only_tokens_per_s": 1 / times.verify_s,
        "ratio_to_target_only": answer.tokens_per_s * times.verify_s,
        "verifier_busy_share": busy,
        "candidate_frames": simulation.num_frames["draft>relay"],
        "report": {name: round(value, 4) for name, value in answer.done.report.items()},
    }


def _check(args: argparse.Namespace) -> None:
    """Raises `ValueError` that names the flag and its bounds."""
    least = {
        "rtt_ms": 0, "jitter_ms": 0, "stall_every_s": 0, "stall_ms": 0, "verify_ms": 0.001, "verify_row_ms": 0,
        "free_rows": 1, "draft_ms": 0, "draft_row_ms": 0, "tokens": 2, "max_rows": 1, "patience_ms": 0,
    }  # fmt: skip
    for name, low in least.items():
        if not low <= getattr(args, name) < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(args, name)}")
    if not 0 <= args.acceptance <= 1:
        raise ValueError(f"--acceptance must lie within 0..1, got {args.acceptance}")
    for flag, parse, text in (("growth", parse_growth, args.growth), ("local", parse_local, args.local)):
        try:
            parse(text)
        except ValueError as exc:
            raise ValueError(f"--{flag}: {exc}") from exc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt-ms", type=float, default=86.0, help="draft to verify and back")
    parser.add_argument("--sweep", action="store_true", help=f"round trips of {SWEEP_MS} ms")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="up to so much more on each leg")
    parser.add_argument("--stall-every-s", type=float, default=0.0, help="a lost packet about so often on each leg")
    parser.add_argument("--stall-ms", type=float, default=200.0, help="what a lost packet costs")
    parser.add_argument("--verify-ms", type=float, default=34.0, help="a one-row pass of the target")
    parser.add_argument("--verify-row-ms", type=float, default=0.0, help="each row beyond the free ones")
    parser.add_argument("--free-rows", type=int, default=1)
    parser.add_argument("--draft-ms", type=float, default=3.0, help="one step of the drafter")
    parser.add_argument("--draft-row-ms", type=float, default=0.0, help="each further row of it")
    parser.add_argument("--acceptance", type=float, default=0.8, help="chance that a candidate is the target's token")
    parser.add_argument("--recordings", type=Path, help="answers of a real target instead of synthetic ones")
    parser.add_argument("--drafter", choices=["recorded", "emulated", "none"], default="emulated")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--growth", default="tree:32x6", help="see node_draft --help")
    parser.add_argument("--local", default="none", help="see node_verify --help")
    parser.add_argument("--max-rows", type=int, default=16, help="rows of a pass, pending token included")
    parser.add_argument("--patience-ms", type=float, default=0.0, help="wait so long for candidates; 0: never idle")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        _check(args)
        recordings = load_recordings(args.recordings) if args.recordings else []
        if args.recordings and not recordings:
            raise ValueError(f"--recordings: {args.recordings} has none")
    except (ValueError, EngineError) as exc:
        parser.error(str(exc))
    policies = Policies(
        growth=args.growth, local=args.local, max_rows=args.max_rows, patience_s=args.patience_ms / 1e3,
        drafter=args.drafter != "none",
    )  # fmt: skip
    for rtt_ms in SWEEP_MS if args.sweep else (args.rtt_ms,):
        times = Times(
            rtt_s=rtt_ms / 1e3, verify_s=args.verify_ms / 1e3, verify_row_s=args.verify_row_ms / 1e3,
            free_rows=args.free_rows, draft_s=args.draft_ms / 1e3, draft_row_s=args.draft_row_ms / 1e3,
        )  # fmt: skip
        fault = shaken(
            jitter_s=args.jitter_ms / 1e3, stall_every_s=args.stall_every_s, stall_s=args.stall_ms / 1e3,
            seed=args.seed,
        )  # fmt: skip
        if args.recordings:
            propose = from_trace if args.drafter == "recorded" else emulated
            figures: dict[str, Any] = simulate_recordings(
                recordings, propose, times, policies, max_tokens=args.tokens, fault=fault
            )
        else:
            figures = synthetic(args, times, policies, fault)
        shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
        print(json.dumps({"rtt_ms": rtt_ms} | shown | {"parameters": {k: str(v) for k, v in vars(args).items()}}))


if __name__ == "__main__":
    main()
