"""Console commands: each exists, and one whose extra is missing says which."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import commands

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_every_command_leads_somewhere(name: str) -> None:
    module, _, function = PROJECT["scripts"][name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    ("program", "module", "lacking", "extra"),
    [
        ("draft", "node_draft.__main__", "torch", "node"),
        ("verify", "node_verify.__main__", "torch", "node"),
        ("profile", "scripts.profile_passes", "torch", "node"),
        ("infra", "infra.__main__", "boto3", "infra"),
    ],
)
def test_a_missing_extra_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, module: str, lacking: str,
    extra: str,
) -> None:  # fmt: skip
    assert extra in PROJECT["optional-dependencies"]
    ours = ("engine", "infra", "node_draft", "node_verify")
    for name in list(sys.modules):
        if name.partition(".")[0] in ours or name.startswith("scripts.profile"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lacking, None)
    assert getattr(commands, program)() == 1
    told = capsys.readouterr().err
    assert told == f"foredraft-{program}: {lacking} is not installed: pip install 'foredraft[{extra}]'\n"
