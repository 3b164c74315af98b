"""What a pass of the target and a step of the drafter cost, profiled and unprofiled, and the line through the passes.

    foredraft-profile --target MODEL --drafter MODEL --rows 1,2,4,8,16
    foredraft-profile --target-pace 34+0.1/16 --drafter-pace 3+0.02        # sleeps in place of models

A cycle drafts a chain of so many candidates as a pass has rows beyond its pending token, and verifies them. Profiled
cycles have timers around both, which drain the device's queue first, so that neither is blamed for the other's work;
unprofiled ones only have a clock around all of a turn. The two take turns, and their difference is printed: where it is
not small, the profiled durations are not those of the run that you care about. The line through the passes over their
rows says what a pass costs before its first row; where the error of a term exceeds its value, it is no answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.errors import EngineError
from engine.replay import Pace
from engine.runner import DraftRunner, TargetRunner
from scripts.profile_models import load_drafter, load_target, paced_drafter, paced_target, synchronizer
from speculation.fits import FitRefused, fit_line
from speculation.passes import DraftStep, NodeRow, Sampling, VerifyPass, VerifyResult
from speculation.profiling import DeviceTimer, ProfilingCost, profiling_cost

ROWS = (1, 2, 4, 8, 16, 32)
SLOT = 0
CONTEXT_TOKENS = 64
DOUBTFUL_SHARE = 0.05
"""Of a cycle: a larger difference between profiled and unprofiled is pointed at."""


@dataclass
class Cycles:
    """Draft-and-verify cycles of one session, each over the tokens that the last one committed.

    Args:
        drafter: None for passes over candidates that nobody drafted.
        timer: without one the cycles are unprofiled.
    """

    target: TargetRunner
    drafter: DraftRunner | None
    num_rows: int
    timer: DeviceTimer | None = None
    tokens: list[int] = field(default_factory=lambda: [0] * CONTEXT_TOKENS)
    num_drafted_for: int = 0
    accepted: tuple[int, ...] = ()

    def __enter__(self) -> Cycles:
        context = len(self.tokens)
        self.target.open(SLOT, sampling=Sampling(), tokens=self.tokens, num_prompt=context, stop_ids=())
        self.target.prefill(SLOT, 0, context - 1)
        if self.drafter is not None:
            self.drafter.open(SLOT, sampling=Sampling(), num_prompt=context)
        return self

    def __exit__(self, *of: object) -> None:
        self.target.close(SLOT)
        if self.drafter is not None:
            self.drafter.close(SLOT)

    def run(self) -> None:
        """One cycle."""
        candidates = [0] * (self.num_rows - 1)
        if self.drafter is not None and candidates:
            with self._measured("draft"):
                candidates = self._draft(self.drafter, len(candidates))
        with self._measured("verify"):
            (result,) = self.target.verify(
                [
                    VerifyPass(
                        slot=SLOT,
                        start=len(self.tokens),
                        tokens=(self.tokens[-1], *candidates),
                        parents=tuple(range(-1, self.num_rows - 1)),
                        max_tokens=self.num_rows,
                    )
                ]
            )
        if not isinstance(result, VerifyResult):
            raise result
        self.tokens += result.tokens
        # Row i of the chain is node i - 1.
        self.accepted = tuple(row - 1 for row in result.rows)

    def _measured(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.timer.measure(name) if self.timer is not None else contextlib.nullcontext()

    def _draft(self, drafter: DraftRunner, number: int) -> list[int]:
        """A chain of so many candidates; node i is its token i. The last node is never run."""
        held = [node for node in self.accepted if node < number - 1]
        start = self.num_drafted_for + len(held)
        chain: list[int] = []
        while len(chain) < number:
            first, run = not chain, len(chain) - 1
            (result,) = drafter.step(
                [
                    DraftStep(
                        slot=SLOT,
                        accepted=tuple(held) if first else (),
                        keep=frozenset(range(run)) if not first else frozenset(),
                        commit_start=start if first else len(self.tokens),
                        commit=tuple(self.tokens[start:]) if first else (),
                        nodes=() if first else (NodeRow(node=run, parent=run - 1, token=chain[-1]),),
                        expand_root=first,
                        num_children=1,
                        num_ahead=min(drafter.max_ahead, number - len(chain) - 1),
                        first_node=len(chain),
                    )
                ]
            )
            if isinstance(result, Exception):
                raise result
            while len(chain) - 1 in result.children and len(chain) < number:
                chain.append(result.children[len(chain) - 1][0].token)
        self.num_drafted_for = len(self.tokens)
        return chain


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsProfile:
    """Cycles over passes of so many rows; medians in seconds.

    Attributes:
        draft_s, verify_s: of the profiled cycles; no draft_s without candidates from a drafter.
        cost: whole cycles with the timers and without.
    """

    rows: int
    draft_s: float | None
    verify_s: float
    cost: ProfilingCost

    @property
    def draft_token_s(self) -> float | None:
        """Of one candidate."""
        return self.draft_s / (self.rows - 1) if self.draft_s is not None else None


def profile_rows(
    target: TargetRunner, drafter: DraftRunner | None, num_rows: int, *, turns: int, cycles: int,
    synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter,
) -> RowsProfile:  # fmt: skip
    """Turns of so many cycles each, profiled and unprofiled; which of the two comes first changes each time."""
    timer = DeviceTimer(synchronize, clock)

    def turn(timer: DeviceTimer | None) -> float:
        with Cycles(target, drafter, num_rows, timer) as session:
            session.run()  # what a first one sets up is not measured
            if timer is not None:
                timer.forget_last()
            synchronize()
            began = clock()
            for _ in range(cycles):
                session.run()
            synchronize()
            return (clock() - began) / cycles

    profiled: list[float] = []
    unprofiled: list[float] = []
    for number in range(turns):
        for is_profiled in (number % 2 == 0, number % 2 == 1):
            (profiled if is_profiled else unprofiled).append(turn(timer if is_profiled else None))
    draft = timer.durations.get("draft")
    return RowsProfile(
        rows=num_rows,
        draft_s=statistics.median(draft) if draft else None,
        verify_s=statistics.median(timer.durations["verify"]),
        cost=profiling_cost(profiled, unprofiled),
    )


def figures_of(profiles: Sequence[RowsProfile]) -> dict[str, Any]:
    """As JSON has it; a term of the line that is no answer is None, and `refused` says why."""
    fit = fit_line([(profile.rows, profile.verify_s) for profile in profiles], relative=True)
    terms: dict[str, float | None] = {}
    refused = []
    for term, name in (("intercept", "pass_ms"), ("slope", "row_ms")):
        try:
            terms[name] = fit.answer(term) * 1e3
        except FitRefused as exc:
            terms[name] = None
            refused.append(f"{name}, the {term} of the line over all rows, in seconds: {exc}")
    return {
        "rows": [
            {
                "rows": one.rows,
                "draft_ms": one.draft_s and one.draft_s * 1e3,
                "draft_token_ms": one.draft_token_s and one.draft_token_s * 1e3,
                "verify_ms": one.verify_s * 1e3,
                "profiled_cycle_ms": one.cost.profiled_s * 1e3,
                "unprofiled_cycle_ms": one.cost.unprofiled_s * 1e3,
                "difference_ms": one.cost.difference_s * 1e3,
            }
            for one in profiles
        ],
        "verify_fit": terms | {f"{name}_error": error * 1e3 for name, error in
                               (("pass_ms", fit.intercept_error), ("row_ms", fit.slope_error))},
        "refused": refused,
        "doubtful": [
            f"cycles of {one.rows} rows: profiled they take {one.cost.share:+.0%}, so draft and verify are not those "
            "of an unprofiled run"
            for one in profiles
            if abs(one.cost.share) > DOUBTFUL_SHARE
        ],
        "verify_costs": ",".join(f"{one.rows}:{one.verify_s * 1e3:.4g}" for one in profiles),
    }  # fmt: skip


def profile_text(figures: dict[str, Any], profiles: Sequence[RowsProfile]) -> str:
    """For people."""
    lines = [f"{'rows':>5}{'draft ms':>10}{'a token':>9}{'verify ms':>11}  a cycle"]
    for row, profile in zip(figures["rows"], profiles, strict=True):
        draft = "".join(
            f"{'-' if value is None else format(value, '.3f'):>{width}}"
            for value, width in ((row["draft_ms"], 10), (row["draft_token_ms"], 9))
        )
        lines.append(f"{row['rows']:5}{draft}{row['verify_ms']:11.3f}  {profile.cost}")
    fit = figures["verify_fit"]
    for name, what in (("pass_ms", "a pass before its first row"), ("row_ms", "a row more")):
        if fit[name] is not None:
            lines.append(f"{what}: {fit[name]:.4g} ± {fit[f'{name}_error']:.2g} ms")
    lines += [f"refused: {text}" for text in figures["refused"]]
    lines += [f"doubtful: {text}" for text in figures["doubtful"]]
    lines.append(f"for foredraft-plan: --verify-costs {figures['verify_costs']}")
    return "\n".join(lines)


def _rows(text: str) -> tuple[int, ...]:
    rows = sorted({int(part) for part in text.split(",")})
    if len(rows) < 3 or rows[0] < 1:
        raise argparse.ArgumentTypeError(f"at least 3 numbers of rows from 1 on are needed for a line, got {text}")
    return tuple(rows)


def _pace(text: str) -> Pace:
    try:
        return Pace.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--target", metavar="MODEL", help="checkpoint directory or hub id")
    target.add_argument("--target-pace", type=_pace, metavar="MS[+ROW_MS[/FREE]]", help="sleep in place of a target")
    drafter = parser.add_mutually_exclusive_group()
    drafter.add_argument("--drafter", metavar="MODEL", help="checkpoint directory or hub id; left out: passes alone")
    drafter.add_argument("--drafter-pace", type=_pace, metavar="MS[+ROW_MS[/FREE]]", help="sleep in place of a drafter")
    parser.add_argument("--rows", type=_rows, default=ROWS, help="of a pass, its pending token included")
    parser.add_argument("--turns", type=int, default=5, help="profiled and unprofiled, of each number of rows")
    parser.add_argument("--cycles", type=int, default=8, help="of a turn")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
        help="auto: bfloat16 on a GPU, float32 on a CPU",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0: as many as torch takes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("turns", "cycles"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    most = max(args.rows)
    # Each cycle may commit all of its rows.
    length = CONTEXT_TOKENS + (args.cycles + 2) * most
    target: TargetRunner
    drafter: DraftRunner | None = None
    try:
        if args.target_pace is not None:
            target = paced_target(args.target_pace, max_rows=most, max_length=length)
        else:
            target = load_target(args.target, max_rows=most, max_length=length, dtype=args.dtype, threads=args.threads)
        if args.drafter_pace is not None:
            drafter = paced_drafter(args.drafter_pace, max_rows=most, max_length=length)
        elif args.drafter is not None:
            drafter = load_drafter(args.drafter, max_rows=most, max_length=length, dtype=args.dtype)
        synchronize = synchronizer()
        profiles = [
            profile_rows(target, drafter, rows, turns=args.turns, cycles=args.cycles, synchronize=synchronize)
            for rows in args.rows
        ]
    except (EngineError, OSError) as exc:
        print(f"profile: {exc}", file=sys.stderr)
        return 1
    figures = figures_of(profiles)
    print(json.dumps(figures) if args.json else profile_text(figures, profiles))
    return 0


if __name__ == "__main__":
    sys.exit(main())
