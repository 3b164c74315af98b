"""The client's live panel: the text shaded by where its tokens came from, speed, acceptance, and where a round goes.

`PanelState` holds what is shown and is plain arithmetic; `PanelDisplay` draws it with rich.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from relay.client import Delta, Event, Finished
from wire.printable import for_terminal

STYLES = {"draft": "bold cyan", "local": "magenta", "plain": "dim"}
"""By source: bold, plain and dim too, for those who see no colours."""
LABELS = {"draft": "far drafter", "local": "local drafter", "plain": "target alone"}
BAR_CHARS = 30
MAX_PLACES = 8
OTHER_LINES = 22
"""Of a terminal, what the frame and the figures take while an answer grows."""
ROUND_PARTS = {
    "round_draft_s": "draft compute",
    "round_draft_overhead_s": "draft overhead",
    "round_relay_s": "relay, up",
    "round_hop_s": "wire, relay to verify and back",
    "round_queue_s": "queue at the verifier",
    "round_verify_s": "verify compute",
    "round_verify_overhead_s": "verify overhead",
}


@dataclass(slots=True)
class PanelState:
    """What has come so far; times are seconds of one clock.

    Attributes:
        accepted: at place i, the deltas that had at least i drafted tokens, until the report knows better.
    """

    started_at: float
    pieces: list[tuple[str, str]] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    num_deltas: int = 0
    num_tokens: int = 0
    first_text_at: float | None = None
    last_at: float | None = None
    finished: Finished | None = None

    def take(self, event: Event, now: float) -> None:
        """Take one event."""
        if isinstance(event, Finished):
            self.finished = event
            return
        self.num_deltas += 1
        self.num_tokens += len(event.tokens)
        self.sources.update(event.sources)
        for place in range(1, sum(source != "plain" for source in event.sources) + 1):
            self.accepted[place] += 1
        self.last_at = now
        if event.text:
            self.pieces.append((for_terminal(event.text), shade(event)))
            if self.first_text_at is None:
                self.first_text_at = now

    @property
    def tokens_per_s(self) -> float:
        """From the request to the last token."""
        if self.finished is not None:
            return self.finished.tokens_per_s
        if self.last_at is None or self.last_at <= self.started_at:
            return 0.0
        return self.num_tokens / (self.last_at - self.started_at)

    @property
    def time_to_first_token_s(self) -> float | None:
        """From the request to the first text."""
        return None if self.first_text_at is None else self.first_text_at - self.started_at

    def acceptance(self) -> list[float]:
        """By place: while it runs the share of passes that committed so many drafted tokens; at the end the share of
        the rounds that proposed a candidate there."""
        if self.finished is not None:
            rates = (self.finished.report.get(f"acceptance_at_{place}") for place in range(1, MAX_PLACES + 1))
            return [rate for rate in rates if rate is not None]
        return [self.accepted[place] / self.num_deltas for place in range(1, MAX_PLACES + 1) if self.accepted[place]]

    def ledger_ms(self) -> dict[str, float]:
        """A mean round by part, once the answer is complete."""
        report = self.finished.report if self.finished is not None else {}
        return {name: report[key] * 1e3 for key, name in ROUND_PARTS.items() if key in report}


def shade(delta: Delta) -> str:
    """The source of most of a delta's tokens: its text cannot be split among them."""
    counted = Counter(delta.sources).most_common(1)
    return counted[0][0] if counted else "plain"


def bar(share: float) -> str:
    """A bar of up to BAR_CHARS characters, in eighths of one."""
    eighths = round(min(max(share, 0.0), 1.0) * BAR_CHARS * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


class PanelDisplay:
    """Draws a `PanelState` in place, a few times a second."""

    def __init__(self, console: Console | None = None) -> None:
        self.state = PanelState(time.monotonic())
        self._console = console or Console()
        self._live = Live(console=self._console, refresh_per_second=8)
        self._live.start()

    def show(self, event: Event) -> None:
        """Take one event; the last one ends the panel."""
        self.state.take(event, time.monotonic())
        if isinstance(event, Finished):
            self._live.update(render(self.state))
            self.close()
            return
        # Of a long answer the end is shown, so that the figures stay on the screen; at the end all of it.
        num_lines = max(3, self._console.height - OTHER_LINES)
        self._live.update(render(self.state, max_chars=num_lines * self._console.width))

    def close(self) -> None:
        """Leave what is drawn and give the terminal back."""
        self._live.stop()


def render(state: PanelState, *, max_chars: int | None = None) -> Group:
    """The panel, with the last `max_chars` of the text."""
    text = Text()
    for piece, source in state.pieces if max_chars is None else newest(state.pieces, max_chars):
        text.append(piece, STYLES[source])
    if max_chars is not None and len(text) > max_chars:
        text = text[-max_chars:]
    figures = Table.grid(padding=(0, 2))
    for name, value in _figures(state):
        figures.add_row(name, value)
    parts: list[RenderableType] = [Panel(text, title="answer", subtitle=_legend(state)), figures]
    if rates := state.acceptance():
        rows = ((f"place {place}", rate, f"{rate:.2f}") for place, rate in enumerate(rates, 1))
        parts.append(_bars("accepted, by place after the pending token", rows))
    if ledger := state.ledger_ms():
        total = sum(ledger.values())
        rows = ((name, part / total if total else 0.0, f"{part:.1f} ms") for name, part in ledger.items())
        parts.append(_bars(f"a round as the verify node sees it, {total:.1f} ms", rows))
    return Group(*parts)


def newest(pieces: list[tuple[str, str]], num_chars: int) -> list[tuple[str, str]]:
    """As many of the last pieces as have `num_chars`: what all of them cost would grow with each."""
    first = len(pieces)
    while first > 0 and num_chars > 0:
        first -= 1
        num_chars -= len(pieces[first][0])
    return pieces[first:]


def _figures(state: PanelState) -> Iterator[tuple[str, str]]:
    first_s = state.time_to_first_token_s
    reason = f" ({state.finished.finish_reason})" if state.finished is not None else ""
    yield "tokens", f"{state.num_tokens}{reason}"
    yield "tokens/s", f"{state.tokens_per_s:.1f}"
    yield "first token", "-" if first_s is None else f"{first_s * 1e3:.0f} ms"
    if state.num_deltas:
        yield "tokens a pass", f"{state.num_tokens / state.num_deltas:.2f}"


def _legend(state: PanelState) -> Text:
    text = Text()
    for source, label in LABELS.items():
        text.append(f" {label} {state.sources[source]} ", STYLES[source])
    return text


def _bars(title: str, rows: Iterator[tuple[str, float, str]]) -> Panel:
    table = Table.grid(padding=(0, 1))
    for name, share, value in rows:
        table.add_row(name, Text(bar(share), "cyan"), value)
    return Panel(table, title=title, title_align="left")
