"""docs/measuring.md: every command is run, in its order, over traces and a link of the test's own."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.tiny import tiny_checkpoint
from relay.config import RelayConfig
from relay.server import RelayServer
from scripts import hop, plan, profile_passes, report
from scripts.bench_trace import sample_round
from scripts.hop_exchange import listening
from scripts.hop_relay import RelayAddress, answering
from wire.aio.trace import TraceWriter

PAGE = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    "foredraft-report": report.main, "foredraft-hop": hop.main, "foredraft-plan": plan.main,
    "foredraft-profile": profile_passes.main,
}  # fmt: skip
SNAPSHOT = {
    "nodes": [
        {"id": role, "name": role, "role": role, "region": "", "rtt_ms": rtt_ms}
        for role, rtt_ms in (("draft", 30.0), ("verify", 50.0))
    ]
}


SECRET = "a-secret-of-the-tests"


@pytest.fixture
def other() -> Iterator[tuple[int, int]]:
    """Ports of a hop bench that listens, and of a relay at which another one does, in a thread of their own."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    ready, ports = threading.Event(), (0, 0)

    async def serve() -> None:
        nonlocal ports
        relay = RelayServer(RelayConfig(secret=SECRET, port=0, grace_s=0))
        await relay.start()
        at = RelayAddress(url=f"ws://127.0.0.1:{relay.port}", secret=SECRET)
        serving = asyncio.create_task(relay.serve(stop))
        async with answering(at), listening(("127.0.0.1", 0), "tcp") as port:
            ports = port, relay.port
            ready.set()
            await stop.wait()
        await serving

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield ports
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's files lie: the traces of three rounds, and a model's configuration."""
    monkeypatch.chdir(tmp_path)
    traces = {name: TraceWriter(tmp_path / f"{name}.jsonl") for name in ("draft", "relay", "verify")}
    for number in range(3):
        traces["draft"].write("round", 1.0, session="s", **sample_round(number))
        traces["verify"].write(
            "verify", number + 1.0, session="s", began=number * 1.0, num_rows=1, pass_rows=1, num_tokens=1,
            compute_s=0.07, overhead_s=0.001,
        )  # fmt: skip
    traces["relay"].write("session_ended", 3.0, session="s", reason="done", duration_s=3.0)
    for trace in traces.values():
        trace.close()
    tiny_checkpoint(tmp_path / "MODEL", seed=7)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 6144, "num_hidden_layers": 78}))
    return tmp_path


def test_every_command_of_the_page_runs(
    folder: Path, other: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(hop, "read_snapshots", lambda url, secret, num: [SNAPSHOT] * num)
    monkeypatch.setattr(hop, "MIN_SAMPLES", 3)
    served: list[str] = []

    async def listen(address: tuple[str, int], over: str) -> None:
        served.append(over)

    async def listen_at_relay(at: RelayAddress) -> None:
        served.append(at.url)

    monkeypatch.setattr(hop, "listen", listen)
    monkeypatch.setattr(hop, "listen_at_relay", listen_at_relay)
    monkeypatch.setenv("FOREDRAFT_SECRET", SECRET)
    said = {}
    for line in COMMANDS:
        here = line.replace("OTHER:9000", f"127.0.0.1:{other[0]}").replace(
            "wss://RELAY:8765", f"ws://127.0.0.1:{other[1]}"
        )
        command, _, target = here.partition(" > ")
        program, *words = shlex.split(command)
        if "--connect" in words:
            # The page's waits are a person's; a size's samples are counted, not timed.
            words += ["--seconds", "0", "--idle-s", "0"]
        if program == "foredraft-profile":
            words += ["--turns", "1", "--cycles", "1"]
        assert MAINS[program](words) == 0, line
        said[line] = capsys.readouterr().out
        if target:
            Path(target).write_text(said[line])
    assert {line.split()[0] for line in COMMANDS} == set(MAINS)
    assert served == ["tcp", f"ws://127.0.0.1:{other[1]}"]
    assert {path.name for path in folder.iterdir()} >= {
        "report.json", "report.html", "rounds.svg", "bars.png", "bars.svg", "plan.svg", "link.json"
    }  # fmt: skip
    first_plan = next(text for line, text in said.items() if line.startswith("foredraft-plan"))
    assert "+18.8%" in first_plan
    assert "another run" in said["foredraft-report --verify verify.jsonl --tokens-per-s 28.10 --tokens-per-round 4.07"]
    assert "80.00" in said["foredraft-hop --matrix http://RELAY:8766"]
