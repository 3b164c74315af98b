"""The demo from end to end, with tiny models: its figures, and that nothing is left behind when it is interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from scripts.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def demo(checkpoints: dict[str, Path], *flags: str) -> list[str]:
    """The command line of a demo with tiny models."""
    models = ["--model", str(checkpoints["target"]), "--draft-model", str(checkpoints["drafter"])]
    return [sys.executable, "scripts/demo.py", *models, "--max-length", "500", *flags]


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children, as the kernel has them."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_the_demo_compares_and_accounts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    results = tmp_path / "demo.json"
    process = await asyncio.create_subprocess_exec(
        *demo(checkpoints, "--rtt-ms", "4", "--max-tokens", "400", "--drafter", "model", "--results", str(results)),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    for text in ("the same tokens: True", "time to first token", "mean acceptance length", "unaccounted"):
        assert text in out.decode()
    written = await asyncio.to_thread(results.read_text)
    goals = json.loads(written)["goals"]
    assert [goal["met"] for goal in goals if "equal" in goal["name"]] == [True]
    assert {"name", "goal", "measured", "met"} == set(goals[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_an_interrupted_demo_leaves_no_process_behind(
    checkpoints: dict[str, Path], number: signal.Signals
) -> None:
    process = await asyncio.create_subprocess_exec(
        *demo(checkpoints, "--max-tokens", "450"), cwd=ROOT,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )  # fmt: skip
    assert process.stdout is not None
    # The question is shown when all five processes are up.
    async with asyncio.timeout(60):
        while not (line := await process.stdout.readline()).startswith(b"> "):
            assert line or not process.stdout.at_eof(), "the demo ended before it asked"
    started = children_of(process.pid)
    assert len(started) == 5
    process.send_signal(number)
    returned = await process.wait()
    assert returned == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    async with asyncio.timeout(30):
        while any(alive(pid) for pid in started):  # noqa: ASYNC110  # the kernel sets no asyncio event
            await asyncio.sleep(0.1)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
