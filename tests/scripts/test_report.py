"""`foredraft-report` over traces on disk: tables, JSON, pages, pictures, and traces that cannot be read."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from scripts.bench_trace import sample_round
from scripts.report import main
from wire.aio.trace import TraceWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The traces of a run of three rounds and three passes in one session called <b>."""
    with_rounds = TraceWriter(tmp_path / "draft.jsonl")
    for number in range(3):
        with_rounds.write("round", 1.0, session="<b>", **sample_round(number))
    with_rounds.close()
    passes = TraceWriter(tmp_path / "verify.jsonl")
    for number in range(3):
        passes.write("verify", 7.0 + number, session="<b>", began=6.0 + number, num_rows=4, num_tokens=2)
    report = {
        "passes": 3,
        "rounds": 3,
        "tokens_draft": 4,
        "tokens_plain": 2,
        "acceptance_at_1": 0.75,
        "proposed_at_1": 3,
    }
    passes.write("session_ended", 9.0, session="<b>", reason="length", report=report)
    passes.close()
    return tmp_path


def flags(run: Path, *more: str) -> list[str]:
    return ["--draft", str(run / "draft.jsonl"), "--verify", str(run / "verify.jsonl"), *more]


def test_tables_and_json_say_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(run, "--json", str(run / "report.json"))) == 0
    text = capsys.readouterr().out
    found: dict[str, Any] = json.loads((run / "report.json").read_text())
    assert found["rounds"] == 3
    assert found["sum_s"] == pytest.approx(3 * 0.1303456789)
    assert found["path_s"] == pytest.approx(0.06 + 0.1303456789)
    assert found["overlapped_s"] == pytest.approx(found["sum_s"] - found["path_s"])
    assert found["identity"] == pytest.approx({"sessions": 1, "tokens_per_s": 2, "tokens_per_round": 2, "round_s": 1})
    assert "3 rounds: 0.391 s in sum, 0.190 s on the path, 0.201 s overlapped" in text
    assert "if there are any: draft 4 (67%), plain 2 (33%)" in text
    assert "acceptance by position, of the rounds that proposed it: 1: 0.75" in text


def test_a_figure_of_another_run_is_warned_about(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(run, "--tokens-per-s", "2.0")) == 0
    assert "another run" not in capsys.readouterr().out
    assert main(flags(run, "--tokens-per-s", "3.0")) == 0
    assert "taken from another run" in capsys.readouterr().out


def test_each_round_and_one_session_can_be_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = TraceWriter(run / "verify2.jsonl")
    other.write("verify", 1.0, session="other", began=0.5, num_rows=1, num_tokens=1)
    other.close()
    verify = run / "verify.jsonl"
    verify.write_bytes(verify.read_bytes() + (run / "verify2.jsonl").read_bytes())
    assert main(flags(run, "--rounds", "2")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("<b>  ") and "130.35" in line for line in lines) == 2
    assert any(line.startswith("other  ") for line in lines)
    assert any(line.startswith("target alone: tokens/s 2.00 = 1.000 tokens a pass / 500.00 ms") for line in lines)
    assert main(flags(run, "--session", "<")) == 0
    assert "other" not in capsys.readouterr().out
    assert main(flags(run, "--session", "nobody")) == 1
    assert "no session of these traces begins with nobody" in capsys.readouterr().err


def test_the_page_needs_nothing_else_and_escapes_what_came_from_the_traces(run: Path) -> None:
    assert main(flags(run, "--html", str(run / "report.html"))) == 0
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "&lt;b&gt; frame 0" in page
    assert "<b>" not in page
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not any(word in without_namespace for word in ("http", "<script", "<link", "src="))


def test_pictures_are_drawn(run: Path) -> None:
    pytest.importorskip("matplotlib")
    names = [str(run / name) for name in ("bars.png", "bars.svg", "waterfall.svg")]
    assert main(flags(run, "--plot", names[0], "--plot", names[1], "--waterfall", names[2])) == 0
    assert Path(names[0]).read_bytes().startswith(b"\x89PNG")
    for name in names[1:]:
        assert ET.parse(name).getroot().tag.endswith("svg")


def test_rotated_files_are_read_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "draft.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    (run / "draft.jsonl.2").write_bytes(lines[0])
    (run / "draft.jsonl.1").write_bytes(lines[1])
    path.write_bytes(lines[2])
    assert main(flags(run)) == 0
    assert "3 rounds: 0.391 s in sum, 0.190 s on the path" in capsys.readouterr().out


def test_the_last_line_of_a_killed_process_may_be_cut(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "draft.jsonl"
    path.write_bytes(path.read_bytes() + b'{"event":"rou')
    assert main(flags(run)) == 0
    assert "3 rounds" in capsys.readouterr().out


@pytest.mark.parametrize(("line", "named"), [(b"nonsense\n", "line 4"), (b'{"event":"round"}\n', "KeyError('timing')")])
def test_a_line_that_is_no_event_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], line: bytes, named: str
) -> None:
    path = run / "draft.jsonl"
    path.write_bytes(path.read_bytes() + line)
    assert main(flags(run)) == 1
    error = capsys.readouterr().err
    assert "--draft" in error
    assert named in error


def test_a_trace_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--draft", str(tmp_path / "none.jsonl")]) == 1
    assert "--draft: there is no trace" in capsys.readouterr().err


def test_a_run_without_rounds_has_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "draft.jsonl").write_bytes(b"")
    assert main(["--draft", str(tmp_path / "draft.jsonl"), "--html", str(tmp_path / "page.html")]) == 0
    assert "no round was answered" in capsys.readouterr().out


def test_the_worked_example_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--worked-example"]) == 0
    lines = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert float(lines["saved and not itemised"]) == pytest.approx(53, abs=0.5)


def test_wrong_flags_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, named in ((["--plot", "a.gif"], "--plot must end in .png or .svg, got a.gif"),
                         (["--rounds", "41"], "--rounds must be 0..40, got 41"),
                         (["--round-ms", "0"], "figures to check must be positive, got round_s 0")):  # fmt: skip
        with pytest.raises(SystemExit):
            main(flags(run, *wrong))
        assert named in capsys.readouterr().err
