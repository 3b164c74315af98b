"""Waterfall and stacked bars of a report as SVG, and one HTML page that needs nothing else. Pure: text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from speculation.ledger import PARTS

COLOURS = (
    "#1b9e77", "#66c2a5", "#7570b3", "#9e9ac8", "#bcbddc", "#fdae61", "#d73027", "#f46d43", "#8073ac", "#b2abd2",
    "#542788", "#4d4d4d", "#c8c8c8",
)  # fmt: skip
WIDTH, LABEL, ROW, GAP = 960, 150, 16, 4


def _svg(height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif" '
        f'font-size="11">{"".join(body)}</svg>'
    )


def _row(label: str, y: float, start: float, seconds: Sequence[float], scale: float) -> list[str]:
    """A row of stacked stretches from `start` on; what is not positive has no width."""
    marks = [f'<text x="0" y="{y + ROW - 4:g}">{escape(label)}</text>']
    x = LABEL + start * scale
    for name, colour, value in zip(PARTS, COLOURS, seconds, strict=True):
        width = max(value, 0.0) * scale
        if width > 0:
            marks.append(
                f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{ROW}" fill="{colour}">'
                f"<title>{escape(name)}: {value * 1e3:.2f} ms</title></rect>"
            )
        x += width
    return marks


def legend_svg() -> str:
    """The colours of the parts."""
    body = []
    for index, (name, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        x, y = index % 4 * WIDTH / 4, index // 4 * (ROW + GAP)
        body.append(f'<rect x="{x:g}" y="{y:g}" width="{ROW}" height="{ROW}" fill="{colour}"/>')
        body.append(f'<text x="{x + ROW + 6:g}" y="{y + ROW - 4:g}">{escape(name)}</text>')
    return _svg((len(PARTS) + 3) // 4 * (ROW + GAP), body)


def waterfall_svg(shown: Sequence[tuple[str, int, float, Sequence[float]]]) -> str:
    """The first rounds against the draft node's clock: a bar each, so that what overlaps can be seen."""
    if not shown:
        return _svg(ROW, ['<text x="0" y="12">no rounds</text>'])
    first = min(start for _, _, start, _ in shown)
    last = max(start + sum(max(value, 0.0) for value in parts) for _, _, start, parts in shown)
    scale = (WIDTH - LABEL) / max(last - first, 1e-9)
    body = []
    for index, (session, frame, start, parts) in enumerate(shown):
        body += _row(f"{session[:10]} frame {frame}", index * (ROW + GAP), start - first, parts, scale)
    height = len(shown) * (ROW + GAP) + ROW
    body.append(f'<text x="{LABEL}" y="{height - 4}">0</text>')
    body.append(f'<text x="{WIDTH}" y="{height - 4}" text-anchor="end">{(last - first) * 1e3:.0f} ms</text>')
    return _svg(height, body)


def bars_svg(figures: Mapping[str, Any]) -> str:
    """Sum and path of all rounds, stacked by part, on one scale."""
    if not figures["rounds"]:
        return _svg(ROW, ['<text x="0" y="12">no rounds</text>'])
    rows = [(name, [figures["parts"][part][name] for part in PARTS]) for name in ("sum_s", "path_s")]
    most = max(sum(max(value, 0.0) for value in values) for _, values in rows)
    scale = (WIDTH - LABEL) / max(most, 1e-9)
    body = []
    for index, (name, values) in enumerate(rows):
        label = f"{'sum of rounds' if name == 'sum_s' else 'path'} {figures[name]:.2f} s"
        body += _row(label, index * (ROW + GAP), 0.0, values, scale)
    return _svg(len(rows) * (ROW + GAP), body)


def page(figures: Mapping[str, Any], shown: Sequence[tuple[str, int, float, Sequence[float]]], text: str) -> str:
    """One HTML page without a script, a font or a link to anything outside."""
    warnings = "".join(f"<p class='warning'>{escape(warning)}</p>" for warning in figures["warnings"])
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Foredraft: where the time goes</title>"
        "<style>body{font-family:sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}svg{width:100%}"
        ".warning{background:#fee;border-left:4px solid #c00;padding:.5em}pre{overflow:auto}</style>"
        f"<h1>Where the time goes</h1>{warnings}{legend_svg()}"
        f"<h2>All rounds, stacked</h2>{bars_svg(figures)}"
        f"<h2>The first {len(shown)} rounds</h2>{waterfall_svg(shown)}"
        f"<h2>Figures</h2><pre>{escape(text)}</pre></html>\n"
    )
