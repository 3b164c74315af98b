"""What `scripts/bench.py` makes of its runs: tables, goals, the result file and the picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.results import Goal, write_results
from speculation.ledger import Ledger

ALONE, NEAR_CHAIN, NEAR_TREE = "target alone", "co-located chain", "co-located tree"
FAR_CHAIN, DEFAULT = "WAN chain", "default"


@dataclass
class Run:
    """One answer of one configuration; `report` is the verify node's own (`Done.report`)."""

    configuration: str
    kind: str
    num_tokens: int
    equal: bool
    tokens_per_s: float
    report: dict[str, float]
    bytes_up: int
    bytes_down: int
    setting: str = ""
    rtt_ms: float = 0.0


@dataclass
class Cell:
    """All runs of one configuration at one round trip in one setting."""

    runs: list[Run] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """All tokens over all time, so that a long answer counts for more."""
        return sum(run.num_tokens for run in self.runs) / sum(run.num_tokens / run.tokens_per_s for run in self.runs)

    def figures(self) -> dict[str, Any]:
        """What is printed of a cell."""
        tokens = sum(run.num_tokens for run in self.runs)

        def per_token(name: str) -> float:
            return sum(run.report[name] for run in self.runs) / tokens

        speeds = [run.tokens_per_s for run in self.runs]
        return {
            "tokens_per_s": round(self.tokens_per_s, 2),
            "median": round(statistics.median(speeds), 2),
            "spread": [round(min(speeds), 2), round(max(speeds), 2)],
            "passes_per_token": round(per_token("passes"), 3),
            "mean_acceptance_length": round(
                1 + sum(r.report["accepted"] for r in self.runs) / max(1, sum(r.report["rounds"] for r in self.runs)), 2
            ),
            "rows_per_pass": round(
                sum(r.report["rows"] for r in self.runs) / sum(r.report["passes"] for r in self.runs), 1
            ),
            "verifier_busy_share": round(
                sum(r.report["verify_compute_s"] for r in self.runs) / sum(r.report["answer_s"] for r in self.runs), 3
            ),
            "frames_up_per_token": round(per_token("candidate_frames"), 2),
            "bytes_up_per_token": round(sum(run.bytes_up for run in self.runs) / tokens),
            "bytes_down_per_token": round(sum(run.bytes_down for run in self.runs) / tokens),
            "share": {name: round(per_token(f"tokens_{name}"), 3) for name in ("draft", "local", "plain")},
        }


Cells = dict[tuple[str, str, float], Cell]


def cells_of(runs: Sequence[Run]) -> Cells:
    """By (setting, configuration, round trip)."""
    cells: Cells = {}
    for run in runs:
        cells.setdefault((run.setting, run.configuration, run.rtt_ms), Cell()).runs.append(run)
    return cells


def speed(cells: Cells, setting: str, configuration: str, rtt_ms: float) -> float | None:
    """Tokens/s of a cell; of one without a far link, at the shortest round trip if not at this one."""
    for at in (rtt_ms, 0.0):
        cell = cells.get((setting, configuration, at))
        if cell is not None:
            return cell.tokens_per_s
    return None


OWN_PARTS = (
    "draft overhead", "relay residence, up", "verify overhead", "relay residence, down", "apply", "unaccounted",
)  # fmt: skip
OWN_COST_GOAL_MS, OWN_SHARE_GOAL, PREDICTION_GOAL = 3.0, 0.05, 0.10


def own_cost(ledger: Ledger) -> dict[str, float]:
    """Foredraft's own part of a round: medians in ms, and its share of the whole.

    Queueing is given apart: a frame that arrives in the middle of a pass waits for its end, whoever schedules.
    """
    if not ledger.num_rounds:
        return {"rounds": 0}
    own = [sum(ledger.parts[name][i] for name in OWN_PARTS) for i in range(ledger.num_rounds)]
    return {
        "rounds": ledger.num_rounds,
        "own, ms": round(statistics.median(own) * 1e3, 3),
        "own share": round(sum(own) / sum(ledger.totals), 4),
        "queue at the verifier, ms": round(statistics.median(ledger.parts["queue at the verifier"]) * 1e3, 3),
        "round, ms": round(statistics.median(ledger.totals) * 1e3, 3),
        **{f"{name}, ms": round(statistics.median(ledger.parts[name]) * 1e3, 3) for name in OWN_PARTS},
    }


def goals_of(cells: Cells, ledgers: dict[str, Ledger], predicted: dict[str, float]) -> list[Goal]:
    """Every figure that the benchmark's issue asks for, as far as the run has it."""
    runs = [run for cell in cells.values() for run in cell.runs]
    num_equal = sum(run.equal for run in runs)
    goals = [Goal("answers equal to the target's own", len(runs), num_equal, num_equal == len(runs))]

    def ratio(name: str, setting: str, rtt_ms: float, against: str, least: float, ours: str = DEFAULT) -> None:
        mine, other = speed(cells, setting, ours, rtt_ms), speed(cells, setting, against, rtt_ms)
        if mine is not None and other is not None:
            goals.append(Goal(f"{setting}, {rtt_ms:g} ms: {name}", f">= {least}", round(mine / other, 3),
                              mine / other >= least))  # fmt: skip

    ratio("over target alone", "reference", 86, ALONE, 2.2)
    ratio("over co-located synchronous chain", "reference", 86, NEAR_CHAIN, 1.0)
    ratio("over co-located streamed tree", "reference", 86, NEAR_TREE, 0.70)
    ratio("over WAN synchronous chain", "reference", 86, FAR_CHAIN, 2.0)
    ratio("over co-located synchronous chain", "reference", 0, NEAR_CHAIN, 1.0)
    ratio("over target alone", "reference", 230, ALONE, 1.4)
    ratio("over target alone", "paced", 86, ALONE, 1.5)
    ratio("over co-located synchronous chain", "paced", 86, NEAR_CHAIN, 0.9)
    for setting, _, rtt_ms in sorted(key for key in cells if key[1] == DEFAULT and key[0] == "native"):
        ratio("over target alone", setting, rtt_ms, ALONE, 0.97)
    for setting, ledger in ledgers.items():
        cost = own_cost(ledger)
        if cost["rounds"]:
            ms, share = cost["own, ms"], cost["own share"]
            goals.append(
                Goal(f"{setting}: own cost of a round, median ms", f"<= {OWN_COST_GOAL_MS}", ms, ms <= OWN_COST_GOAL_MS)
            )
            goals.append(
                Goal(f"{setting}: own share of a round", f"<= {OWN_SHARE_GOAL}", share, share <= OWN_SHARE_GOAL)
            )
    for what, expected in predicted.items():
        name, _, rtt = what.rpartition(", ")
        measured = speed(cells, "reference", name, float(rtt.removesuffix(" ms")))
        if measured is not None:
            error = expected / measured - 1
            goals.append(
                Goal(
                    f"simulation against measurement: {what}", f"within {PREDICTION_GOAL:.0%}", round(error, 3),
                    abs(error) <= PREDICTION_GOAL,
                )
            )  # fmt: skip
    return goals


def table(cells: Cells, setting: str) -> str:
    """Tokens/s by configuration and round trip, for people."""
    rtts = sorted({rtt for s, _, rtt in cells if s == setting})
    names = list(dict.fromkeys(name for s, name, _ in cells if s == setting))
    lines = [f"{setting:22}" + "".join(f"{rtt:9g} ms" for rtt in rtts)]
    for name in names:
        row = [cells.get((setting, name, rtt)) for rtt in rtts]
        lines.append(f"{name:22}" + "".join(f"{cell.tokens_per_s:12.1f}" if cell else " " * 12 for cell in row))
    return "\n".join(lines)


def by_kind(cells: Cells, setting: str) -> dict[str, dict[str, dict[str, float]]]:
    """Tokens/s by round trip, kind of prompt and configuration: a local drafter shines where answers repeat prompts."""
    kinds: dict[str, dict[str, dict[str, float]]] = {}
    for (of_setting, name, rtt), cell in cells.items():
        for kind in dict.fromkeys(run.kind for run in cell.runs) if of_setting == setting else ():
            alike = Cell([run for run in cell.runs if run.kind == kind])
            kinds.setdefault(f"{rtt:g} ms", {}).setdefault(kind, {})[name] = round(alike.tokens_per_s, 2)
    return kinds


def kind_table(cells: Cells, setting: str, rtt_ms: float) -> str:
    """Tokens/s by configuration and kind of prompt at one round trip, for people."""
    kinds = by_kind(cells, setting).get(f"{rtt_ms:g} ms", {})
    names = list(dict.fromkeys(name for speeds in kinds.values() for name in speeds))
    lines = [f"{f'{setting}, {rtt_ms:g} ms':22}" + "".join(f"{kind:>12}" for kind in kinds)]
    for name in names:
        cells_shown = (f"{speeds[name]:12.1f}" if name in speeds else " " * 12 for speeds in kinds.values())
        lines.append(f"{name:22}" + "".join(cells_shown))
    return "\n".join(lines)


def report(
    runs: Sequence[Run],
    ledgers: dict[str, Ledger],
    predicted: dict[str, float],
    parameters: dict[str, Any],
    results: Path | None,
) -> str:
    """The text to print, last line JSON; writes the files if asked to."""
    cells = cells_of(runs)
    settings = list(dict.fromkeys(run.setting for run in runs))
    goals = goals_of(cells, ledgers, predicted)
    figures: dict[str, Any] = {
        setting: {
            f"{rtt:g} ms": {name: cell.figures() for (s, name, r), cell in cells.items() if s == setting and r == rtt}
            for rtt in sorted({rtt for s, _, rtt in cells if s == setting})
        }
        for setting in settings
    }
    figures["tokens/s by kind of prompt"] = {setting: by_kind(cells, setting) for setting in settings}
    figures["own cost of the default's rounds"] = {setting: own_cost(ledger) for setting, ledger in ledgers.items()}
    figures["simulated tokens/s, reference"] = {what: round(value, 2) for what, value in predicted.items()}
    if results is not None:
        write_results(
            results,
            command="python scripts/bench.py --results docs/results/bench.json",
            packages=("torch", "transformers", "websockets", "orjson"),
            models={"target": "SmolLM2-135M-Instruct", "drafter": "models/smollm2-135m-drafter, or emulated"},
            parameters=parameters,
            figures=figures,
            goals=goals,
        )
        draw(cells, settings, results.with_suffix(""))
    lines = [table(cells, setting) for setting in settings]
    lines += [kind_table(cells, setting, 86) for setting in settings if (setting, DEFAULT, 86) in cells]
    lines += [f"{'met   ' if goal.met else 'MISSED'} {goal.name}: {goal.measured} ({goal.goal})" for goal in goals]
    speeds = {f"{s}/{name}/{rtt:g}": round(cell.tokens_per_s, 2) for (s, name, rtt), cell in cells.items()}
    return "\n".join([*lines, json.dumps({"tokens_per_s": speeds, "parameters": parameters})])


def draw(cells: Cells, settings: Sequence[str], stem: Path) -> None:
    """Tokens/s against the round trip, one panel for each setting, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(settings), figsize=(5.2 * len(settings), 4.4), squeeze=False)
    lookup: Callable[[str, str], list[tuple[float, float]]] = lambda setting, name: sorted(  # noqa: E731
        (rtt, cell.tokens_per_s) for (s, n, rtt), cell in cells.items() if s == setting and n == name
    )
    for panel, setting in zip(panels[0], settings, strict=True):
        names = list(dict.fromkeys(name for s, name, _ in cells if s == setting))
        for name in names:
            points = lookup(setting, name)
            if len(points) == 1:
                panel.axhline(points[0][1], linestyle=":", linewidth=1.2, color="grey")
                panel.annotate(name, (230, points[0][1]), fontsize=7, ha="right", va="bottom", color="grey")
            else:
                style = "-" if name == DEFAULT else "--"
                panel.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
        panel.set_title(setting)
        panel.set_xlabel("round trip, ms")
        panel.set_ylabel("tokens/s")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix), dpi=140)
