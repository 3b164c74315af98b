"""Whether a drafter can move: the hop's cost against the time it frees, as closed forms and from the simulator.

    foredraft-plan --cycle-ms 89.34 --draft-ms 15.88 --tokens-per-s 24.05 --hop-ms 1.713
    foredraft-plan --cycle-ms 58 --draft-ms 24 --gamma 8 --acceptance 0.8 --verify-costs 1:34,9:34 \
        --latency-ms 86 --rate-mbit 1000 --payload-bytes 200 --picture plan.png

Every figure comes with its assumption (`speculation/breakeven.py` derives them). The asynchronous projection runs the
real schedulers under a virtual clock, once for each seed, and carries a 95 % interval over the seeds: it says how far
the simulation scatters, not how far it is from your set-up.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.plan_measured import costs_of, link_of
from speculation.breakeven import (
    Link,
    Relocation,
    capacity_gain,
    mean_tokens,
    relocation_sensitivity,
    synchronous_rate,
    synchronous_rtt_limit_s,
)
from speculation.costs import PassCosts
from speculation.fits import mean_interval

# Of the synthetic drafter `acceptance` is its first child's; the others: `engine.scripted_logits.ranking`.
ASYNCHRONOUS = {"asynchronous chain": "chain:2+46", "asynchronous tree": "tree:8x4"}
SIMULATED_ROWS = 16
STEP = 0.1
PICTURE_POINTS = 7


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is known of a set-up; times in seconds.

    Attributes:
        relocation: the co-located cycle and what of it would move.
        num_drafted, acceptance: γ and α; α None leaves the formulas that need it out.
        costs: of a pass by rows.
        link, num_bytes: the hop that the set-up has; there and back, payload of a cycle.
    """

    relocation: Relocation
    num_drafted: int
    acceptance: float | None
    costs: PassCosts
    link: Link
    num_bytes: float

    @property
    def hop_s(self) -> float:
        """What a cycle waits for the link."""
        return self.link.hop_s(self.num_bytes)

    @property
    def draft_token_s(self) -> float:
        """Time freed by each drafted token."""
        return self.relocation.freed_s / self.num_drafted

    @property
    def target_s(self) -> float:
        """A pass over one row: the target alone."""
        return self.costs.seconds(1)

    @property
    def verify_s(self) -> float:
        """A pass over γ+1 rows."""
        return self.costs.seconds(self.num_drafted + 1)

    def closed_rates(self, hop_s: float) -> dict[str, float]:
        """Tokens/s of each schedule that has a closed form."""
        rates = {
            "target only": 1 / self.target_s,
            "co-located": self.relocation.rate,
            "relocated, drafting overlapped": self.relocation.rate_at(hop_s),
        }
        if self.acceptance is not None:
            rates["synchronous remote"] = synchronous_rate(
                rtt_s=hop_s, acceptance=self.acceptance, num_drafted=self.num_drafted,
                draft_token_s=self.draft_token_s, verify_s=self.verify_s,
            )  # fmt: skip
        return rates


def simulated_rates(inputs: Inputs, growth: str, *, hop_s: float, seeds: int, tokens: int) -> list[float]:
    """Tokens/s of an asynchronous schedule, one for each seed."""
    # The simulator needs torch, which the closed forms do not.
    try:
        from scripts.simulate import Policies, synthetic
        from scripts.simulation import Times, no_fault
    except ModuleNotFoundError as exc:
        told = f"the simulator needs {exc.name}: pip install 'foredraft[node]', or --seeds 0 for the closed forms alone"
        raise ValueError(told) from exc

    row_s = (inputs.costs.seconds(SIMULATED_ROWS) - inputs.target_s) / (SIMULATED_ROWS - 1)
    times = Times(
        rtt_s=hop_s, verify_s=inputs.target_s, verify_row_s=row_s, draft_s=inputs.draft_token_s,
    )  # fmt: skip
    policies = Policies(growth=growth, local="none", max_rows=SIMULATED_ROWS)
    rates = []
    for seed in range(seeds):
        given = argparse.Namespace(seed=seed, acceptance=inputs.acceptance, tokens=tokens)
        rates.append(float(synthetic(given, times, policies, no_fault)["tokens_per_s"]))
    return rates


def simulated_sensitivity(inputs: Inputs, *, seeds: int, tokens: int) -> dict[str, float]:
    """Relative change of the chain's tokens/s when one input grows by `STEP`; the same seeds on both sides."""
    assert inputs.acceptance is not None

    def rate(changed: Inputs, hop_s: float) -> float:
        growth = ASYNCHRONOUS["asynchronous chain"]
        return mean_interval(simulated_rates(changed, growth, hop_s=hop_s, seeds=seeds, tokens=tokens))[0]

    def changed(**fields: Any) -> Inputs:
        return Inputs(**({name: getattr(inputs, name) for name in Inputs.__dataclass_fields__} | fields))

    parts = inputs.relocation
    slower = Relocation(
        cycle_s=parts.cycle_s + STEP * parts.freed_s, draft_forward_s=parts.freed_s * (1 + STEP),
        tokens_per_cycle=parts.tokens_per_cycle,
    )  # fmt: skip
    rows = sorted({1, inputs.num_drafted + 1, SIMULATED_ROWS})
    base = rate(inputs, inputs.hop_s)
    return {
        "hop": rate(inputs, inputs.hop_s * (1 + STEP)) / base - 1,
        "draft time": rate(changed(relocation=slower), inputs.hop_s) / base - 1,
        "verify time": rate(
            changed(costs=PassCosts({n: inputs.costs.seconds(n) * (1 + STEP) for n in rows})), inputs.hop_s
        ) / base - 1,
        # Rejections, not acceptances, grow less by the step: an acceptance cannot pass 1.
        "rejections": rate(changed(acceptance=1 - (1 - inputs.acceptance) * (1 + STEP)), inputs.hop_s) / base - 1,
    }  # fmt: skip


def plan_figures(inputs: Inputs, *, seeds: int, tokens: int) -> dict[str, Any]:
    """Everything that the command prints, as JSON has it. `seeds` 0 leaves the simulator out."""
    parts, link, num_bytes = inputs.relocation, inputs.link, inputs.num_bytes
    bandwidth = parts.break_even_rate_bytes_per_s(payload_bytes=num_bytes, latency_s=link.latency_s)
    figures: dict[str, Any] = {
        "cycle_ms": parts.cycle_s * 1e3,
        "freed_ms": parts.freed_s * 1e3,
        "freed_share": parts.freed_share,
        "hop_ms": inputs.hop_s * 1e3,
        "hop_over_freed": inputs.hop_s / parts.freed_s if parts.freed_s else math.inf,
        "break_even_hop_ms": parts.freed_s * 1e3,
        "break_even_rate_mbit_at_this_latency": bandwidth and bandwidth * 8 / 1e6,
        "relocated_gain": parts.gain_at(inputs.hop_s),
        "tokens_per_s": inputs.closed_rates(inputs.hop_s),
        "capacity_gain": capacity_gain(
            num_drafted=inputs.num_drafted, draft_token_s=inputs.draft_token_s, verify_s=inputs.verify_s
        ),
        "gain_change_at_plus_10_percent": relocation_sensitivity(parts, link, num_bytes, step=STEP),
    }
    if link.rate_bytes_per_s is not None:
        latency = parts.break_even_latency_s(payload_bytes=num_bytes, rate_bytes_per_s=link.rate_bytes_per_s)
        figures["break_even_latency_ms_at_this_rate"] = latency and latency * 1e3
    if inputs.acceptance is not None:
        known: dict[str, Any] = {
            "acceptance": inputs.acceptance, "num_drafted": inputs.num_drafted,
            "draft_token_s": inputs.draft_token_s, "target_s": inputs.target_s,
        }  # fmt: skip
        figures["tau"] = mean_tokens(acceptance=inputs.acceptance, num_drafted=inputs.num_drafted)
        figures["synchronous_rtt_limit_ms"] = synchronous_rtt_limit_s(**known) * 1e3
        figures["synchronous_rtt_limit_ms_with_this_verify_curve"] = (
            synchronous_rtt_limit_s(**known, verify_s=inputs.verify_s) * 1e3
        )
        if seeds:
            figures["asynchronous_tokens_per_s"] = intervals = {}
            for name, growth in ASYNCHRONOUS.items():
                rates = simulated_rates(inputs, growth, hop_s=inputs.hop_s, seeds=seeds, tokens=tokens)
                intervals[name] = dict(zip(("mean", "low", "high"), mean_interval(rates), strict=True))
            figures["asynchronous_change_at_plus_10_percent"] = simulated_sensitivity(
                inputs, seeds=seeds, tokens=tokens
            )
    return figures


def plan_text(inputs: Inputs, figures: Mapping[str, Any]) -> str:
    """For people: each figure with the assumption it rests on."""
    lines = [
        f"freed by moving the drafter   {figures['freed_ms']:8.2f} ms  of a cycle of {figures['cycle_ms']:.2f} ms "
        f"({figures['freed_share']:.1%})",
        f"the hop costs                 {figures['hop_ms']:8.3f} ms  {figures['hop_over_freed']:.0%} of what it frees; "
        f"it breaks even at {figures['break_even_hop_ms']:.2f} ms",
        f"gain of relocating            {figures['relocated_gain']:+8.1%}     if drafting is entirely overlapped",
    ]
    rate = figures["break_even_rate_mbit_at_this_latency"]
    if inputs.num_bytes:
        lines.append(
            f"break-even bandwidth          {rate:8.1f} Mbit/s at this latency and {inputs.num_bytes:.0f} bytes a cycle"
            if rate
            else "break-even bandwidth              none: the latency alone exceeds what is freed"
        )
    lines += ["", "tokens/s at this hop"]
    lines += [f"  {name:34}{value:8.2f}" for name, value in figures["tokens_per_s"].items()]
    for name, value in figures.get("asynchronous_tokens_per_s", {}).items():
        lines.append(f"  {name:34}{value['mean']:8.2f}  ({value['low']:.2f} to {value['high']:.2f}, simulated)")
    lines += ["", "closed forms, and where they hold"]
    if "tau" in figures:
        lines += [
            f"  synchronous remote drafting beats target-only below a round trip of "
            f"{figures['synchronous_rtt_limit_ms']:.2f} ms: RTT < (tau-1) t_target - gamma t_draft, tau = "
            f"{figures['tau']:.2f}",
            "    one round in flight, independent acceptances, a pass that costs the same for gamma+1 rows as for one;",
            f"    with this verify curve {figures['synchronous_rtt_limit_ms_with_this_verify_curve']:.2f} ms",
        ]
    else:
        lines.append("  synchronous limit: needs --acceptance")
    lines += [
        f"  capacity gain {figures['capacity_gain']:.2f} = 1 + gamma t_d / t_v: for a saturated verifier that drafted",
        "",
        "change of the gain when one input grows by 10 %",
    ]
    lines += [f"  {name:20}{value:+8.2%}" for name, value in figures["gain_change_at_plus_10_percent"].items()]
    if sensitivity := figures.get("asynchronous_change_at_plus_10_percent"):
        lines += ["", "change of the asynchronous chain's tokens/s when one input grows by 10 %"]
        lines += [f"  {name:20}{value:+8.2%}" for name, value in sensitivity.items()]
    return "\n".join(lines)


def draw(inputs: Inputs, path: Path, *, seeds: int, tokens: int) -> None:
    """tok/s against the hop, all schedules, with this link marked; PNG or SVG by the name's ending."""
    try:
        import matplotlib as mpl
    except ImportError as exc:
        raise ValueError("--picture needs matplotlib: pip install 'foredraft[bench]'") from exc
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    most_s = max(2 * inputs.relocation.freed_s, 2 * inputs.hop_s)
    fine = [most_s * i / 200 for i in range(201)]
    figure, axes = plt.subplots(figsize=(8, 5))
    for name in inputs.closed_rates(0.0):
        axes.plot([x * 1e3 for x in fine], [inputs.closed_rates(x)[name] for x in fine], label=name)
    if inputs.acceptance is not None and seeds:
        coarse = [most_s * i / (PICTURE_POINTS - 1) for i in range(PICTURE_POINTS)]
        for name, growth in ASYNCHRONOUS.items():
            rates = [simulated_rates(inputs, growth, hop_s=x, seeds=seeds, tokens=tokens) for x in coarse]
            points = [mean_interval(of_seeds) for of_seeds in rates]
            bars = [[mean - low for mean, low, _ in points], [high - mean for mean, _, high in points]]
            axes.errorbar([x * 1e3 for x in coarse], [p[0] for p in points], yerr=bars, marker="o", capsize=3,
                          label=f"{name} (simulated)")  # fmt: skip
    axes.axvline(inputs.hop_s * 1e3, color="black", linestyle=":", label=f"this link, {inputs.hop_s * 1e3:.3g} ms")
    axes.set(xlabel="hop of a cycle, there and back with its payload, ms", ylabel="tokens/s", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _costs(text: str) -> PassCosts:
    try:
        pairs = [entry.split(":") for entry in text.split(",")]
        return PassCosts({int(rows): float(milliseconds) / 1e3 for rows, milliseconds in pairs})
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWS:MS,ROWS:MS,...: {exc}") from exc


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cycle = parser.add_argument_group("the co-located cycle")
    cycle.add_argument("--cycle-ms", type=float, required=True)
    cycle.add_argument("--draft-ms", type=float, required=True, help="draft forward of a cycle")
    cycle.add_argument("--sampling-ms", type=float, default=0.0, help="of the draft")
    cycle.add_argument("--context-ms", type=float, default=0.0, help="context update of the drafter")
    rate = cycle.add_mutually_exclusive_group(required=True)
    rate.add_argument("--tokens-per-s", type=float, help="of the same run as --cycle-ms")
    rate.add_argument("--tokens-per-cycle", type=float, help="of the same run as --cycle-ms")
    cycle.add_argument("--gamma", type=int, default=8, help="tokens drafted in a cycle")
    cycle.add_argument("--acceptance", type=float, help="chance that a candidate is the target's token")
    costs = cycle.add_mutually_exclusive_group()
    costs.add_argument("--verify-trace", type=Path, help="measured: a verify node's --trace, with passes over one row")
    costs.add_argument("--verify-costs", type=_costs, help="ROWS:MS,...; default: flat, the cycle less what is freed")
    link = parser.add_argument_group("the link; there and back")
    hop = link.add_mutually_exclusive_group()
    hop.add_argument("--hop-ms", type=float, help="as measured with the payload, instead of the next two")
    hop.add_argument("--link", type=Path, help="measured: what foredraft-hop --json printed, instead of the next two")
    link.add_argument("--latency-ms", type=float, default=0.0)
    link.add_argument("--rate-mbit", type=float, help="default: unlimited")
    link.add_argument("--payload-bytes", type=float, default=0.0, help="of a cycle")
    parser.add_argument("--seeds", type=int, default=5, help="simulations of a point; 0: closed forms only")
    parser.add_argument("--tokens", type=int, default=200, help="length of a simulated answer")
    parser.add_argument("--picture", type=Path, help="write tok/s against the hop to this .png or .svg")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def inputs_of(args: argparse.Namespace) -> Inputs:
    """Raises `ValueError` that names what is wrong."""
    for name in ("gamma", "seeds"):
        least = 1 if name == "gamma" else 0
        if getattr(args, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if args.seeds == 1:
        raise ValueError("--seeds must be 0 or at least 2, got 1: one run has no interval")
    if args.acceptance is not None and not 0 <= args.acceptance <= 1:
        raise ValueError(f"--acceptance must lie within 0..1, got {args.acceptance}")
    cycle_s = args.cycle_ms / 1e3
    tokens_per_cycle = args.tokens_per_cycle if args.tokens_per_cycle is not None else args.tokens_per_s * cycle_s
    relocation = Relocation(
        cycle_s=cycle_s, draft_forward_s=args.draft_ms / 1e3, sampling_s=args.sampling_ms / 1e3,
        context_update_s=args.context_ms / 1e3, tokens_per_cycle=tokens_per_cycle,
    )  # fmt: skip
    for name in ("hop_ms", "latency_ms", "rate_mbit", "payload_bytes"):
        value = getattr(args, name)
        if value is not None and value < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {value:g}")
    if args.rate_mbit == 0:
        raise ValueError("--rate-mbit must be positive, got 0: leave it out for an unlimited link")
    if args.link and (args.latency_ms or args.rate_mbit):
        raise ValueError("--link brings latency and rate: leave --latency-ms and --rate-mbit out")
    if args.link:
        link = link_of(args.link)
    elif args.hop_ms is not None:
        link = Link(latency_s=args.hop_ms / 1e3)
    else:
        link = Link(latency_s=args.latency_ms / 1e3, rate_bytes_per_s=args.rate_mbit and args.rate_mbit * 1e6 / 8)
    measured = costs_of(args.verify_trace) if args.verify_trace else args.verify_costs
    costs = measured or PassCosts({1: cycle_s - relocation.freed_s})
    return Inputs(
        relocation=relocation, num_drafted=args.gamma, acceptance=args.acceptance, costs=costs, link=link,
        num_bytes=0.0 if args.hop_ms is not None else args.payload_bytes,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        inputs = inputs_of(args)
        figures = plan_figures(inputs, seeds=args.seeds, tokens=args.tokens)
        print(json.dumps(figures) if args.json else plan_text(inputs, figures))
        if args.picture:
            draw(inputs, args.picture, seeds=args.seeds, tokens=args.tokens)
    except (ValueError, OSError) as exc:
        parser.error(str(exc))
    return 0


if __name__ == "__main__":
    sys.exit(main())
