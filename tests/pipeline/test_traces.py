"""Each kind of process bounds its trace and rotates it: their own `serve`, without models and links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
import pytest

import node_draft.__main__ as draft
import node_verify.__main__ as verify
import relay.__main__ as relay
from engine.checkpoint import CheckpointIdentity
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import hash_logits
from node_draft.config import DraftConfig
from node_verify.config import VerifyConfig
from relay.config import RelayConfig
from relay.server import RelayServer
from speculation.costs import PassCosts
from wire.aio import trace as traces
from wire.aio.trace import TraceWriter, trace_files

FILE_BYTES = 2000
NUM_EVENTS = 1000
IDENTITY = CheckpointIdentity(
    name="m", revision="r", tokenizer="t", vocab_size=16, context_length=64, stop_ids=(), weights="", drafts_for=""
)
SECRET = "a-secret-of-the-tests"
LOGITS = hash_logits(16)
LOADED: dict[ModuleType, Callable[[Any], Any]] = {
    draft: lambda config: (IDENTITY, ScriptedDrafter(LOGITS)),
    verify: lambda config: (
        SimpleNamespace(identity=lambda: IDENTITY, tokenizer=None),
        ScriptedTarget(LOGITS),
        PassCosts({1: 0.1}),
    ),
}


def fill(trace: TraceWriter) -> None:
    for number in range(NUM_EVENTS):
        trace.write("step", 1.0, n=number)


def settings(process: ModuleType, path: Path) -> Any:
    flags = ["--trace", str(path), "--log-level", "warning"]
    if process is relay:
        return RelayConfig.read([*flags, "--port", "0", "--grace-s", "0"])
    flags += ["--relay", "ws://127.0.0.1:1", "--model", "m"]
    return (DraftConfig if process is draft else VerifyConfig).read(flags)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a process's `serve` over a stand-in for its work."""
    monkeypatch.setenv("FOREDRAFT_SECRET", SECRET)

    def run(process: ModuleType, path: Path, work: Callable[[TraceWriter], None]) -> None:
        async def run_node(node: Any, stop: asyncio.Event, **settings: Any) -> None:
            work(node.trace)

        async def serve(server: RelayServer, stop: asyncio.Event) -> None:
            try:
                work(server.trace)
            finally:
                await server.drain()

        if process is relay:
            monkeypatch.setattr(RelayServer, "serve", serve)
        else:
            monkeypatch.setattr(process, "load", LOADED[process])
            monkeypatch.setattr(process, "run_node", run_node)
        asyncio.run(process.serve(settings(process, path)))

    return run


@pytest.mark.parametrize("process", [draft, relay, verify], ids=["draft", "relay", "verify"])
def test_the_trace_is_bounded_and_its_newest_events_are_kept(
    run: Callable[..., None], process: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The processes give no bound of their own, so it is the writer's, here a smaller one.
    defaults = TraceWriter.__init__.__kwdefaults__
    assert defaults == {"max_file_bytes": traces.MAX_FILE_BYTES, "num_files": traces.NUM_FILES}
    monkeypatch.setitem(defaults, "max_file_bytes", FILE_BYTES)
    path = tmp_path / "trace.jsonl"
    run(process, path, fill)
    files = trace_files(path)
    assert len(files) == traces.NUM_FILES
    # By one event at most above it.
    assert max(file.stat().st_size for file in files) < FILE_BYTES + 100
    kept = [orjson.loads(line)["n"] for file in files for line in file.read_bytes().splitlines()]
    assert kept == list(range(NUM_EVENTS - len(kept), NUM_EVENTS))


@pytest.mark.parametrize("process", [draft, relay, verify], ids=["draft", "relay", "verify"])
def test_the_trace_of_a_process_that_fails_is_written_to_its_end(
    run: Callable[..., None], process: ModuleType, tmp_path: Path
) -> None:
    def fail(trace: TraceWriter) -> None:
        fill(trace)
        raise RuntimeError("the work failed")

    path = tmp_path / "trace.jsonl"
    with pytest.raises(RuntimeError, match="the work failed"):
        run(process, path, fail)
    assert len(path.read_bytes().splitlines()) == NUM_EVENTS
