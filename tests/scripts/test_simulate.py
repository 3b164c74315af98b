"""`scripts/simulate.py`: wrong input is one line that names the flag."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.simulate import main


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--verify-ms", "0"], "--verify-ms must be at least 0.001, got 0.0"),
        (["--rtt-ms", "-1"], "--rtt-ms must be at least 0, got -1.0"),
        (["--rtt-ms", "nan"], "--rtt-ms must be at least 0, got nan"),
        (["--tokens", "0"], "--tokens must be at least 2, got 0"),
        (["--acceptance", "1.2"], "--acceptance must lie within 0..1, got 1.2"),
        (["--growth", "bush:3"], "--growth: "),
        (["--local", "magic"], "--local: "),
        (["--recordings", "none.json.gz"], "none.json.gz holds no recordings"),
    ],
)
def test_wrong_input_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["simulate.py", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_the_shortest_answer_has_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--tokens", "2", "--rtt-ms", "0"])
    main()
    assert '"tokens": 2' in capsys.readouterr().out
