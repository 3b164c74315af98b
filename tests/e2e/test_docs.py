"""What the pages under docs/ tell people to type is typed here, block by block, with tiny models on loopback.

A block's language says what to do with it: `sh` runs to its end, `sh background` is started and must become ready,
`sh secret` sets the secret, `sh install` is only checked against pyproject.toml, `python` runs in an interpreter of its
own. Names and addresses that stand for the reader's are replaced, nothing else is.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.processes import ROOT, Parts
from tests.e2e.conftest import SECRET

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
DOCS = ROOT / "docs"
OURS = ("quickstart", "api", "operations", "tuning", "limits", "protocol")
MODULES = {
    "foredraft-relay": ["-m", "relay"],
    "foredraft-verify": ["-m", "node_verify"],
    "foredraft-draft": ["-m", "node_draft"],
    "foredraft": ["-m", "relay.client_cli"],
    "python": [],
    "python3": [],
}
KNOWN = {"sh", "sh background", "sh secret", "sh install", "python", "json", "toml", "ini"}


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    for match in re.finditer(r"^```([a-z ]+)\n(.*?)^```$", (DOCS / f"{page}.md").read_text("utf-8"), re.M | re.S):
        yield match[1], match[2]


class Reader:
    """Somebody who types what a page says."""

    def __init__(self, folder: Path, models: dict[str, Path]) -> None:
        self.parts = Parts(folder, SECRET)
        self.folder = folder
        self.started: set[str] = set()
        self.replaced = {
            "Qwen/Qwen2.5-7B-Instruct": str(models["target"]),
            "Qwen/Qwen2.5-0.5B-Instruct": str(models["drafter"]),
            "ws://RELAY": "ws://127.0.0.1",
            "http://RELAY": "http://127.0.0.1",
            "0.0.0.0": "127.0.0.1",
            "--port 8765": "--port 0",
            "--http-port 8766": "--http-port 0",
            "credentials.toml": str(folder / "credentials.toml"),
        }
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "FOREDRAFT_SECRET": SECRET}
        commands = folder / "bin"
        commands.mkdir()
        for name, module in MODULES.items():
            (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *module])} "$@"\n')
            (commands / name).chmod(0o755)
        self.environment["PATH"] = f"{commands}:{self.environment['PATH']}"

    def typed(self, text: str) -> str:
        """The text with the reader's own names and addresses in it."""
        for said, meant in self.replaced.items():
            text = text.replace(said, meant)
        return text

    async def start(self, line: str) -> None:
        """Start a part, as its own process, and wait until it is ready."""
        name, *flags = shlex.split(self.typed(line))
        # A second relay of a page is only seen to start; what follows is asked of the first.
        is_first = name not in self.started
        self.started.add(name)
        part = await self.parts.start(name.removeprefix("foredraft-"), [*MODULES[name], *flags])
        if is_first and "http_port" in part.ready:
            self.replaced |= {"127.0.0.1:8766": f"127.0.0.1:{part.ready['http_port']}",
                              "127.0.0.1:8765": f"127.0.0.1:{part.port}"}  # fmt: skip

    async def run(self, *command: str) -> str:
        """Run a command; its output. It must end well."""
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=self.environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await process.communicate()
        assert process.returncode == 0, f"{command[-1]}\n{errors.decode()}"
        return out.decode()

    async def follow(self, language: str, text: str) -> str:
        """Do what a block says."""
        assert language in KNOWN, language
        match language:
            case "sh background":
                await self.start(text)
            case "toml" if text.startswith("[[credential]]"):
                (self.folder / "credentials.toml").write_text(text)
            case "sh":
                return await self.run("bash", "-euo", "pipefail", "-c", self.typed(text))
            case "sh secret":
                assert text.startswith("export FOREDRAFT_SECRET=")
            case "sh install":
                extras = re.findall(r"\[([a-z]+)\]", text)
                declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                assert set(extras) <= set(declared)
                assert "-c constraints.txt" in text
            case "python":
                preamble = f"SECRET = {SECRET!r}\n"
                return await self.run(sys.executable, "-W", "error", "-c", preamble + self.typed(text))
        return ""


@pytest.fixture
async def reader(tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    # The tiny models know fewer positions than the default; a reader's models do not.
    monkeypatch.setenv("FOREDRAFT_VERIFY_MAX_LENGTH", "256")
    monkeypatch.setenv("FOREDRAFT_DRAFT_MAX_LENGTH", "256")
    reader = Reader(tmp_path, checkpoints)
    try:
        yield reader
    finally:
        codes = await reader.parts.stop()
    assert set(codes.values()) <= {0}, codes


async def test_the_quickstart_and_the_other_pages_work_as_they_are_written(reader: Reader) -> None:
    outputs = []
    for page in OURS:
        for language, text in blocks(page):
            outputs.append((page, text, await reader.follow(language, text)))
    # Models with random weights say anything, but they say it.
    answers = [out for _, text, out in outputs if "chat" in text or "stream" in text or "ask(" in text]
    assert len(answers) >= 6
    assert all(out.strip() for out in answers)
    assert any("tokens/s" in out for out in answers)


@pytest.mark.parametrize("page", OURS)
def test_links_and_pictures_of_the_pages_exist(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", (DOCS / f"{page}.md").read_text("utf-8")):
        assert link.startswith("http") or (DOCS / link.partition("#")[0]).exists(), link
