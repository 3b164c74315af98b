"""What the panel shows is counted from the events."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from relay.client import Delta, Finished
from relay.panel import BAR_CHARS, PanelState, bar, render, shade


def finished(**report: float) -> Finished:
    return Finished(
        finish_reason="stop", prompt_tokens=1, completion_tokens=6, report=report, time_to_first_token_s=0.1,
        tokens_per_s=12.0, time_per_output_token_s=0.1, chunk_gap_s=0.2, num_chunks=3,
    )  # fmt: skip


def test_speed_sources_and_places_are_counted() -> None:
    state = PanelState(started_at=10.0)
    assert (state.tokens_per_s, state.time_to_first_token_s, state.acceptance()) == (0.0, None, [])
    state.take(Delta("", (1,), 0, ("plain",)), 10.5)
    state.take(Delta("ab", (2, 3, 4), 1, ("draft", "draft", "plain")), 11.0)
    state.take(Delta("c", (5, 6), 4, ("local", "plain")), 12.0)
    assert state.time_to_first_token_s == 1.0, "text, not a token without any"
    assert state.tokens_per_s == 3.0
    assert state.sources == {"plain": 3, "draft": 2, "local": 1}
    assert state.acceptance() == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    state.take(finished(acceptance_at_1=0.9, acceptance_at_2=0.8, round_verify_s=0.03), 12.1)
    assert state.acceptance() == [0.9, 0.8], "the report's figures are those of the rounds that proposed"
    assert state.tokens_per_s == 12.0
    assert state.ledger_ms() == {"verify compute": 30.0}


def test_a_piece_is_shaded_by_most_of_its_tokens() -> None:
    assert shade(Delta("x", (1, 2, 3), 0, ("draft", "draft", "plain"))) == "draft"
    assert shade(Delta("x", (1,), 0)) == "plain"


def test_bars_are_as_long_as_their_share() -> None:
    assert bar(0.0) == ""
    assert bar(1.0) == bar(7.0) == "█" * BAR_CHARS
    assert bar(0.5) == "█" * (BAR_CHARS // 2)
    assert len(bar(0.99)) == BAR_CHARS


def test_text_that_looks_like_markup_is_shown_as_it_is() -> None:
    state = PanelState(started_at=0.0)
    state.take(Delta("[bold]x[/bold]", (1,), 0, ("plain",)), 1.0)
    out = Console(file=io.StringIO(), width=80)
    out.print(render(state))
    assert "[bold]x[/bold]" in out.file.getvalue()  # type: ignore[attr-defined]


def test_of_a_long_answer_the_end_is_shown_while_it_grows() -> None:
    state = PanelState(started_at=0.0)
    for start in range(50):
        state.take(Delta(f"word{start} ", (1,), start, ("plain",)), 1.0)
    out = Console(file=io.StringIO(), width=80)
    out.print(render(state, max_chars=40))
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "word49" in shown
    assert "word10 " not in shown
    out.print(render(state))
    assert "word10 " in out.file.getvalue()  # type: ignore[attr-defined]


def test_a_long_answer_costs_no_more_to_draw_than_what_is_shown_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PanelState(started_at=0.0)
    for start in range(5_000):
        state.take(Delta("word ", (1,), start, ("plain",)), 1.0)
    appended: list[str] = []
    real = Text.append
    monkeypatch.setattr(Text, "append", lambda self, *given: (appended.append(given[0]), real(self, *given))[1])
    render(state, max_chars=100)
    assert appended.count("word ") == 20


def test_control_characters_of_an_answer_are_shown_and_not_obeyed() -> None:
    state = PanelState(started_at=0.0)
    state.take(Delta("a\x1b]52;c;eA==\x07b\x9bJ", (1,), 0, ("plain",)), 1.0)
    out = Console(file=io.StringIO(), width=80)
    out.print(render(state))
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert r"a\x1b]52;c;eA==\x07b\x9bJ" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)
