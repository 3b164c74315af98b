"""docs/aws.md: every command is run, in its order, against moto; what it shows of a plan is what a plan shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from infra import __main__ as command
from infra.__main__ import main
from infra.aws.client import Clients
from tests.infra.doubles import ALL_READY, VERIFY_REGION, FakeRelay

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "aws.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def run(line: str, state: Path) -> int:
    program, *words = shlex.split(line)
    assert program == "foredraft-infra"
    return main(["--state-dir", str(state), *[str(ROOT / word) if word.endswith(".toml") else word for word in words]])


def test_every_command_of_the_page_runs_in_its_order(
    clients: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "probe", FakeRelay(ALL_READY))
    clients("ssm", VERIFY_REGION).put_parameter(
        Name="/foredraft/three-regions/relay-certificate", Value="PEM", Type="String", Overwrite=True
    )
    done = [(line, run(line, tmp_path)) for line in COMMANDS]
    assert [line for line, code in done if code] == []
    assert {line.split()[1] for line, _ in done} == {"plan", "up", "status", "logs", "ssh", "cost", "down"}
    out = capsys.readouterr().out
    assert "nothing is left" in out
    shown = re.search(r"```text\n(relay region.*?)\ncost per hour", PAGE, re.DOTALL)
    assert shown is not None
    assert shown[1] in out


def test_the_figures_of_the_page_are_those_of_the_results() -> None:
    import json

    figures = json.loads((ROOT / "docs" / "results" / "infra.json").read_text())["figures"]
    calls, changes = figures["calls"], figures["calls that change something"]
    assert f"`up` is\n{calls['up']} API calls, {changes['up']} of which make something" in PAGE
    assert f"a second one {calls['second up']}, none of which does; `down` {calls['down']}" in PAGE
    assert changes["second up"] == 0
    assert f"each of {len(figures['resources left after each fault and a down'])} injected faults" in PAGE
