"""What `scripts/bench_capacity.py` makes of its curves: figures, goals, a picture."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.replay import Pace
from scripts.bench import DRAFT_PACE, TARGET_PACE
from scripts.capacity_load import Capacity, sessions_at
from scripts.results import Goal, write_results

Curves = dict[str, list[Capacity]]
"""By "SETTING, SERVER": a point for each number of sessions."""
WITHIN = 0.9
LEAST_SHARE = 0.8
FREE_ROWS = 16
"""Rows that cost nothing at the paces of the benchmark."""


def expected_ratio(gamma: int) -> float:
    """1 + γ t_d / t_v, of the paces as stated: what a device gains that need not draft."""
    return 1 + gamma * Pace.parse(DRAFT_PACE).base_s / Pace.parse(TARGET_PACE).base_s


def figures_of(curves: Curves) -> dict[str, Any]:
    """All points, for the results file."""
    return {
        name: {
            str(point.num_sessions): {
                "tokens_per_s": round(point.tokens_per_s, 1),
                "per_session": round(point.per_session, 2),
                "least_share": round(point.least_share(curve[0]), 3),
            }
            for point in curve
        }
        for name, curve in curves.items()
    }


def ratios(curves: Curves) -> dict[str, dict[str, float]]:
    """For each of our servers, and each number of sessions of the co-located one in the same setting: how many times as
    many sessions ours serves at the rate that each of them gets there."""
    found: dict[str, dict[str, float]] = {}
    for name, curve in curves.items():
        setting = name.rpartition(", ")[0]
        beside = next((c for n, c in curves.items() if n.startswith(f"{setting}, co-located")), None)
        if beside is None or beside is curve:
            continue
        found[name] = {
            str(point.num_sessions): round(sessions_at(point.per_session, curve) / point.num_sessions, 2)
            for point in beside
        }
    return found


def goals_of(curves: Curves, gamma: int) -> list[Goal]:
    """Every goal of the issue, met or not."""
    goals = []
    least = expected_ratio(gamma)
    for name, by_number in ratios(curves).items():
        if name.startswith("native"):
            continue
        # Short of saturation the round trip decides how fast a session is, and the figures say so for each number. And
        # while synchronous sessions wait for theirs the target idles, unless rows are scarce.
        if "synchronous" in name and f" {FREE_ROWS} rows" not in name:
            continue
        ratio = list(by_number.values())[-1]
        goals.append(
            Goal(
                f"{name}: times as many sessions as a co-located server with {list(by_number)[-1]}, at the same rate "
                "each",
                f">= {least:.2f} (1 + gamma t_d / t_v), within 10 %", ratio, ratio >= WITHIN * least,
            )
        )  # fmt: skip
    for name, curve in curves.items():
        if "pipeline" not in name:
            continue
        rates = [round(point.tokens_per_s, 1) for point in curve]
        grows = all(more >= 0.97 * one for one, more in itertools.pairwise(rates))
        goals.append(Goal(f"{name}: tokens/s grow with the sessions up to saturation", "never fall", rates, grows))
        slowest = min(point.least_share(curve[0]) for point in curve)
        goals.append(
            Goal(
                f"{name}: the slowest session over its fair share", f">= {LEAST_SHARE}", round(slowest, 3),
                slowest >= LEAST_SHARE,
            )
        )  # fmt: skip
    wrong = [f"{name}, {point.num_sessions}" for name, curve in curves.items() for point in curve if not point.equal]
    goals.append(Goal("answers equal to those of the target alone, token for token", "all", wrong or "all", not wrong))
    return goals


def table(curves: Curves) -> str:
    """Tokens/s of all sessions together, and of each, for people."""
    numbers = sorted({point.num_sessions for curve in curves.values() for point in curve})
    lines = [f"{'tokens/s, all (each)':38}" + "".join(f"{number:>15}" for number in numbers)]
    for name, curve in curves.items():
        cells = {p.num_sessions: f"{p.tokens_per_s:.0f} ({p.per_session:.1f})" for p in curve}
        lines.append(f"{name:38}" + "".join(f"{cells.get(number, ''):>15}" for number in numbers))
    return "\n".join(lines)


def report(
    curves: Curves, busy: dict[str, Any], parameters: dict[str, Any], *, gamma: int, results: Path | None
) -> str:
    """The text to print, last line JSON; writes the files if asked to."""
    goals = goals_of(curves, gamma)
    figures: dict[str, Any] = {
        "tokens/s by sessions": figures_of(curves),
        "times as many sessions as co-located, by its sessions": ratios(curves),
        "1 + gamma t_d / t_v": round(expected_ratio(gamma), 3),
        "where time goes at the most sessions: processor seconds a second, a pass at the verify node": busy,
    }
    if results is not None:
        write_results(
            results,
            command=f"python scripts/bench_capacity.py --results docs/results/{results.name}",
            packages=("torch", "transformers", "websockets", "orjson"),
            models={"target": "SmolLM2-135M-Instruct, recorded or live", "drafter": "emulated, or distilled for it"},
            parameters=parameters,
            figures=figures,
            goals=goals,
        )
        draw(curves, results.with_suffix(""))
    lines = [table(curves)]
    lines += [f"{'met   ' if goal.met else 'MISSED'} {goal.name}: {goal.measured} ({goal.goal})" for goal in goals]
    lines += [f"{name}: {json.dumps(where)}" for name, where in busy.items()]
    return "\n".join([*lines, json.dumps({"figures": figures_of(curves), "parameters": parameters})])


def draw(curves: Curves, stem: Path) -> None:
    """Tokens/s of each session and of all, against the number of sessions, a row for each setting; PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = list(dict.fromkeys(name.rpartition(", ")[0] for name in curves))
    figure, panels = pyplot.subplots(2, len(settings), figsize=(3.6 * len(settings), 6.4), squeeze=False)
    for column, setting in enumerate(settings):
        for name, curve in curves.items():
            if name.rpartition(", ")[0] != setting:
                continue
            server = name.rpartition(", ")[2]
            style = "-" if server == "pipeline" else "--"
            numbers = [point.num_sessions for point in curve]
            for row, values in enumerate((_totals(curve), _each(curve))):
                panels[row][column].plot(numbers, values, style, marker="o", markersize=3, label=server)
        for row, what in enumerate(("tokens/s, all sessions", "tokens/s, each session")):
            panel = panels[row][column]
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
            panel.set_ylim(bottom=0)
            panel.set_xlabel("sessions")
            panel.set_ylabel(what)
            panel.legend(fontsize=7)
        panels[0][column].set_title(setting, fontsize=10)
    figure.tight_layout()
    for suffix in (".png", ".svg"):
        figure.savefig(stem.with_suffix(suffix), dpi=140)


def _totals(curve: Sequence[Capacity]) -> list[float]:
    return [point.tokens_per_s for point in curve]


def _each(curve: Sequence[Capacity]) -> list[float]:
    return [point.per_session for point in curve]
