"""Where every millisecond of a run went: the draft, relay and verify traces joined, in tables, JSON and pictures.

    foredraft-report --draft draft.jsonl --verify verify.jsonl --relay relay.jsonl --html report.html
    foredraft-report --worked-example

Write the traces with `--trace FILE` of each process. They are joined by session and frame, never by clock. Figures that
you hold against the run (`--tokens-per-s`, `--tokens-per-round`, `--round-ms`) are checked: tokens/s = tokens per round
over round time, on the same rounds. A round of that identity is a pass of the target, plain ones included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.report_pictures import bars_svg, page, waterfall_svg
from speculation.identity import worked_example
from speculation.ledger import PARTS
from speculation.trace_join import Joined
from wire.aio.trace import trace_files


class TraceUnreadable(ValueError):
    """A trace is missing, or a line of it is not an event."""


def read_trace(joined: Joined, process: str, path: Path) -> int:
    """Add every event of a trace, its rotated files first; the number of lines.

    A last line that was cut off, as of a process that was killed, is passed over.

    Raises:
        TraceUnreadable: names the file, the line and what is wrong.
    """
    files = trace_files(path)
    if not files:
        raise TraceUnreadable(f"--{process}: there is no trace {path}")
    num_lines = 0
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    joined.add(process, orjson.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError) as exc:
                    if not line.endswith(b"\n"):
                        continue
                    raise TraceUnreadable(f"--{process}: {file}, line {number}: {exc!r}") from exc
                num_lines += 1
    return num_lines


def report_text(figures: Mapping[str, Any]) -> str:
    """The tables, for people."""
    lines = []
    if figures["rounds"]:
        sum_s, path_s = figures["sum_s"], figures["path_s"]
        lines.append(f"{'a round':28}{'mean ms':>10}{'median ms':>11}{'of sum':>9}{'on path s':>11}{'of path':>9}")
        for name in PARTS:
            part = figures["parts"][name]
            lines.append(
                f"{name:28}{part['mean_ms']:10.2f}{part['median_ms']:11.2f}{part['sum_s'] / sum_s:9.1%}"
                f"{part['path_s']:11.3f}{part['path_s'] / path_s if path_s else 0:9.1%}"
            )
        lines += [
            f"{figures['rounds']} rounds: {sum_s:.3f} s in sum, {path_s:.3f} s on the path, "
            f"{figures['overlapped_s']:.3f} s overlapped; no round on the path for "
            f"{figures['no_round_on_the_path_s']:.3f} s",
            f"unaccounted: {figures['unaccounted_share']:.2%}",
        ]
    else:
        lines.append("no round was answered, so there is no ledger")
    if figures["tokens_by_source"]:
        total = sum(figures["tokens_by_source"].values())
        shares = (f"{name} {num} ({num / total:.0%})" for name, num in figures["tokens_by_source"].items() if total)
        lines.append("tokens by source: " + ", ".join(shares))
    if figures["acceptance_by_position"]:
        rates = (f"{place}: {rate:.2f}" for place, rate in figures["acceptance_by_position"].items())
        lines.append("acceptance by position, mean over sessions by their rounds: " + ", ".join(rates))
    if identity := figures["identity"]:
        lines.append(
            f"tokens/s {identity['tokens_per_s']:.2f} = {identity['tokens_per_round']:.3f} tokens a pass / "
            f"{identity['round_s'] * 1e3:.2f} ms, of the same passes"
        )
    return "\n".join([*lines, *(f"warning: {warning}" for warning in figures["warnings"])])


def draw_png(figures: Mapping[str, Any], path: Path) -> None:
    """Stacked bars of sum and path."""
    try:
        import matplotlib as mpl
    except ImportError as exc:
        raise TraceUnreadable("--plot to a .png needs matplotlib: pip install 'foredraft[bench]'") from exc
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    from scripts.report_pictures import COLOURS

    drawing, axes = plt.subplots(figsize=(9, 3.5))
    left = [0.0, 0.0]
    for name, colour in zip(PARTS, COLOURS, strict=True):
        values = [max(0.0, figures["parts"].get(name, {}).get(column, 0.0)) for column in ("path_s", "sum_s")]
        axes.barh(["path", "sum of rounds"], values, left=left, color=colour, label=name)
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.set_xlabel("seconds")
    axes.legend(ncols=3, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    drawing.savefig(path, bbox_inches="tight")
    plt.close(drawing)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for process in ("draft", "relay", "verify"):
        parser.add_argument(f"--{process}", type=Path, metavar="TRACE", help=f"of the {process} process")
    parser.add_argument("--tokens-per-s", type=float, help="a figure to check against the run")
    parser.add_argument("--tokens-per-round", type=float, help="a figure to check against the run")
    parser.add_argument("--round-ms", type=float, help="a figure to check against the run")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--html", type=Path, help="write one self-contained page")
    parser.add_argument("--plot", type=Path, action="append", default=[], help="stacked bars, .png or .svg; repeatable")
    parser.add_argument("--waterfall", type=Path, help="the first rounds as .svg")
    parser.add_argument("--worked-example", action="store_true", help="what a published pair of figures implies")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.worked_example:
        for name, value in worked_example().items():
            print(f"{name:52}{value:9.2f}")
        return 0
    traces = {name: getattr(args, name) for name in ("draft", "relay", "verify") if getattr(args, name)}
    if not traces:
        parser.error("give at least one of --draft, --verify, --relay, or --worked-example")
    if unknown := [str(path) for path in args.plot if path.suffix not in (".png", ".svg")]:
        parser.error(f"--plot must end in .png or .svg, got {', '.join(unknown)}")
    claims = {"tokens_per_s": args.tokens_per_s, "tokens_per_round": args.tokens_per_round}
    claims["round_s"] = None if args.round_ms is None else args.round_ms / 1e3
    given = {name: value for name, value in claims.items() if value is not None}
    if wrong := [f"{name} {value:g}" for name, value in given.items() if value <= 0]:
        parser.error(f"figures to check must be positive, got {', '.join(wrong)}")
    joined = Joined()
    try:
        for process, path in traces.items():
            read_trace(joined, process, path)
        figures = joined.figures()
        figures["warnings"] += joined.check_claims(**given)
        text = report_text(figures)
        print(text)
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")
        if args.html:
            args.html.write_text(page(figures, joined.shown, text))
        if args.waterfall:
            args.waterfall.write_text(waterfall_svg(joined.shown))
        for path in args.plot:
            if path.suffix == ".svg":
                path.write_text(bars_svg(figures))
            else:
                draw_png(figures, path)
    except (TraceUnreadable, OSError) as exc:
        print(f"report: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
