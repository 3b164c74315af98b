"""What people get wrong is told in one line that says what to do, with exit code 2 for usage and 1 for failure."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import tiny_checkpoint
from relay.client import StreamClient
from relay.errors import RequestFailed
from scripts.processes import ROOT
from wire.errors import FrameTooLarge, Refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
SECRET = "a-secret-for-these-tests"


async def run(*command: str, secret: str = SECRET) -> tuple[int, list[str]]:
    """Exit code and lines on standard error of `python COMMAND`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=ROOT,
        env=os.environ | {"FOREDRAFT_SECRET": secret, "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode().splitlines()


async def fails(*command: str, code: int, saying: tuple[str, ...], secret: str = SECRET) -> None:
    """The command must end with `code`, its last line must say all of `saying`, and there must be no traceback."""
    returned, lines = await run(*command, secret=secret)
    assert returned == code, lines
    assert not any("Traceback" in line for line in lines), lines
    for text in saying:
        assert text in lines[-1], lines


@pytest.mark.parametrize("role", ["verify", "draft"])
async def test_a_model_that_is_not_there(role: str, tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    relay = ("--relay", "ws://127.0.0.1:9")
    for path, text in ((missing, "does not exist"), (empty, "config.json")):
        await fails("-m", f"node_{role}", *relay, "--model", str(path), code=1, saying=(str(path), text))


async def test_usage_errors_exit_with_2() -> None:
    verify = ("-m", "node_verify", "--relay", "ws://127.0.0.1:9", "--model", "x")
    await fails(*verify, "--max-rows", "0", code=2, saying=("--max-rows", "1..256", "'0'"))
    await fails(*verify, code=2, saying=("FOREDRAFT_SECRET",), secret="")
    draft = ("-m", "node_draft", "--relay", "ws://127.0.0.1:9", "--model", "x")
    await fails(*draft, "--growth", "bush", code=2, saying=("--growth", "chain:K", "'bush'"))
    await fails(*draft, "--drafter", "layers:0", code=2, saying=("--drafter", "layers:N"))
    await fails("-m", "node_draft", "--model", "x", code=2, saying=("--relay",))


async def test_no_relay_at_the_address(checkpoints: dict[str, Path]) -> None:
    command = ("-m", "node_verify", "--relay", "ws://127.0.0.1:9", "--model", str(checkpoints["target"]))
    await fails(*command, "--max-length", "128", code=1, saying=("no relay answers at ws://127.0.0.1:9",))


async def test_wrong_secret_mismatched_tokenizer_port_in_use_and_requests_that_cannot_be_served(
    start_pipeline: Any, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    async with start_pipeline(target=checkpoints["target"], drafter=None) as pipeline:
        port = str(pipeline.by_name["relay"].port)
        node = ("-m", "node_draft", "--relay", pipeline.url, "--max-length", "128", "--model")
        await fails(*node, str(checkpoints["drafter"]), code=1, saying=("refused our secret", "401"), secret="x" * 20)

        foreign = tiny_checkpoint(tmp_path / "foreign", seed=9, arch="llama", vocab=300)
        good = pipeline.parts.secret
        await fails(*node, str(foreign), code=1, saying=("tokenizer", "foreign", "target"), secret=good)
        await fails("-m", "relay", "--port", port, code=1, saying=(port, "in use"))

        with pytest.raises(Refused):
            async with StreamClient(pipeline.url, secret="y" * 20):
                pass
        async with pipeline.client() as client:
            with pytest.raises(FrameTooLarge, match=r"limit of 1048576"):
                await pipeline.ask(client, prompt="é" * 600_000)
            with pytest.raises(RequestFailed, match=r"300 tokens, the limit is 255"):
                await pipeline.ask(client, prompt_ids=[5] * 300)
            with pytest.raises(RequestFailed, match=r"prompt has 0 tokens"):
                await pipeline.ask(client, prompt="")
            with pytest.raises(RequestFailed, match="no verify node serves another-model"):
                await pipeline.ask(client, prompt="hello", model="another-model")
            # After all that the next request is served by the same processes.
            tokens, _, finished = await pipeline.ask(client, prompt="hello", max_tokens=5, ignore_eos=True)
            assert len(tokens) == finished.completion_tokens == 5
