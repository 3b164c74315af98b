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
from speculation.trace_join import NUM_SHOWN, Joined
from wire.aio.trace import trace_files

MOST_SESSIONS = 20


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


def sessions_lines(sessions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each of the first MOST_SESSIONS sessions that have passes; nothing for a single one."""
    known = [(name, one) for name, one in sessions.items() if one["passes"]]
    if len(known) < 2:
        return []
    lines = [
        f"{'session':34}{'tokens':>8}{'passes':>8}{'rounds':>8}{'tok/pass':>10}{'pass ms':>9}{'tok/s':>8}  sources"
    ]
    for name, one in known[:MOST_SESSIONS]:
        sources = ", ".join(f"{source} {num}" for source, num in one["tokens_by_source"].items() if num)
        lines.append(
            f"{name[:32]:34}{one['tokens']:8}{one['passes']:8}{one['rounds']:8}{one['tokens_per_pass']:10.3f}"
            f"{one['pass_ms']:9.2f}{one['tokens_per_s'] or 0:8.2f}  {sources}"
        )
    if len(known) > MOST_SESSIONS:
        lines.append(f"... and {len(known) - MOST_SESSIONS} more; --json has them all")
    return lines


def rounds_lines(shown: Sequence[tuple[str, int, float, Sequence[float]]]) -> list[str]:
    """A line for each round: its parts in milliseconds, in the order of PARTS."""
    lines = ["ms of each round: " + ", ".join(f"{index} {name}" for index, name in enumerate(PARTS, 1))]
    lines.append(
        f"{'session':12}{'frame':>6}{'total':>9}" + "".join(f"{index:>8}" for index in range(1, len(PARTS) + 1))
    )
    for session, frame, _, parts in shown:
        values = "".join(f"{value * 1e3:8.2f}" for value in parts)
        lines.append(f"{session[:10]:12}{frame:6}{sum(parts) * 1e3:9.2f}{values}")
    return lines


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
        lines.append("tokens by source, of sessions with candidates if there are any: " + ", ".join(shares))
    if figures["acceptance_by_position"]:
        rates = (f"{place}: {rate:.2f}" for place, rate in figures["acceptance_by_position"].items())
        lines.append("acceptance by position, of the rounds that proposed it: " + ", ".join(rates))
    for name, identity in (("with candidates", "identity"), ("target alone", "identity_target_alone")):
        if found := figures[identity]:
            lines.append(
                f"{name}: tokens/s {found['tokens_per_s']:.2f} = {found['tokens_per_round']:.3f} tokens a pass / "
                f"{found['round_s'] * 1e3:.2f} ms, of the same passes ({found['sessions']} sessions)"
            )
    lines += sessions_lines(figures["by_session"])
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
    parser.add_argument("--session", help="only this one; its name may be cut short")
    parser.add_argument(
        "--rounds", type=int, default=0, metavar="N", help=f"also print each of the first N rounds, {NUM_SHOWN} at most"
    )
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
    if not 0 <= args.rounds <= NUM_SHOWN:
        parser.error(f"--rounds must be 0..{NUM_SHOWN}, got {args.rounds}")
    joined = Joined(only=args.session or "")
    try:
        for process, path in traces.items():
            read_trace(joined, process, path)
        figures = joined.figures()
        figures["warnings"] += joined.check_claims(**given)
        if args.session and not joined.sessions:
            raise TraceUnreadable(f"--session: no session of these traces begins with {args.session}")
        text = report_text(figures)
        if args.rounds:
            text = "\n".join([*rounds_lines(joined.shown[: args.rounds]), text])
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
