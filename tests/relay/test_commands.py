"""`python -m relay` and the client command as processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from relay.client import StreamClient
from relay.client_config import ClientConfig
from relay.config import RelayConfig
from wire.aio.link import dial
from wire.errors import LinkLost
from wire.messages import PROTOCOL_VERSION, Done, Hello, ModelIdentity, OpenSession, TextDelta

SECRET = "a-secret-of-the-tests"
ROOT = Path(__file__).parents[2]
BOUND_S = 20.0


async def start(*argv: str, secret: str = SECRET, stdin: bytes | None = None) -> asyncio.subprocess.Process:
    environment = {**os.environ, "FOREDRAFT_SECRET": secret, "PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert process.stdin is not None
    if stdin is not None:
        process.stdin.write(stdin)
    process.stdin.close()
    return process


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), BOUND_S)
    return process.returncode, out.decode(), err.decode()


class Relay:
    """A relay process that listens."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"ws://127.0.0.1:{port}"

    async def join(self, role: str, model: ModelIdentity | None = None) -> Any:
        hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=role, model=model)
        return await dial(self.url, secret=SECRET, hello=hello)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    process = await start("relay", "--port", "0", "--grace-s", "0.5", "--trace", str(tmp_path / "trace.jsonl"))
    assert process.stdout is not None
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), BOUND_S))
    assert ready["ready"] is True
    yield Relay(process, ready["port"])
    if process.returncode is None:
        process.kill()
        await process.communicate()


def text_frame(payload: bytes) -> bytes:
    """A WebSocket text frame of a client, up to 125 bytes, masked with zeros."""
    return bytes([0x81, 0x80 | len(payload), 0, 0, 0, 0]) + payload


async def never_close(port: int) -> None:
    """A client that answers no Close and sends until its socket is cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode()
    )
    assert b"101" in await reader.readline()
    writer.write(text_frame(b'{"type":"hello","protocol":1,"role":"client","name":"stubborn"}'))
    with suppress(ConnectionError):
        while not reader.at_eof():
            writer.write(text_frame(b'{"type":"pong","number":0}'))
            await writer.drain()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await reader.read(4096)
    writer.close()


async def answering(relay: Relay, target: ModelIdentity) -> asyncio.Task[None]:
    """A verify node's double that answers every request with two tokens."""
    link = await relay.join("verify", target)

    def on_frame(kind: str, session: str | None, frame: bytes, now: float) -> None:
        if kind == OpenSession.type and session is not None:
            link.send(TextDelta(session=session, start=0, tokens=(1,), text="Hello"))
            link.send(TextDelta(session=session, start=1, tokens=(2,), text=" world"))
            link.send(Done(session=session, finish_reason="stop", prompt_tokens=1, completion_tokens=2))

    return asyncio.create_task(link.run(on_frame))


async def test_c042_sigterm_ends_within_the_grace_time_with_code_0(relay: Relay, target: ModelIdentity) -> None:
    """One peer is in the middle of its upgrade, one never answers a Close and goes on sending, one has a session that
    never ends."""
    verify = await relay.join("verify", target)
    opened = asyncio.Event()
    running = asyncio.create_task(verify.run(lambda kind, *rest: opened.set()))
    _, half = await asyncio.open_connection("127.0.0.1", relay.port)
    half.write(b"GET / HTTP/1.1\r\n")
    stubborn = asyncio.create_task(never_close(relay.port))
    async with StreamClient(relay.url, secret=SECRET, recover_s=0.0) as client:
        stream = aiter(client.stream(prompt="x"))
        opening = asyncio.ensure_future(anext(stream))
        await asyncio.wait_for(opened.wait(), BOUND_S)
        began = asyncio.get_running_loop().time()
        relay.process.send_signal(signal.SIGTERM)
        with pytest.raises(LinkLost, match="1001"):
            await asyncio.wait_for(opening, BOUND_S)
        with pytest.raises(LinkLost, match="1001"):
            await asyncio.wait_for(running, BOUND_S)
        code, _, err = await finish(relay.process)
    assert code == 0, err
    assert "Traceback" not in err
    # Half a second of grace, two close timeouts of a second, and room for a busy machine.
    assert asyncio.get_running_loop().time() - began < 6.0
    half.close()
    await asyncio.wait_for(stubborn, BOUND_S)


async def test_the_relay_at_rest_takes_less_than_80_mb(relay: Relay) -> None:
    status = await asyncio.to_thread(Path(f"/proc/{relay.process.pid}/status").read_text)
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    assert int(line.split()[1]) * 1024 < 80e6


async def test_a_port_in_use_is_told_in_one_line(relay: Relay) -> None:
    code, out, err = await finish(await start("relay", "--port", str(relay.port), "--log-level", "warning"))
    assert (code, out) == (1, "")
    assert err == (
        f"foredraft-relay: cannot listen on 127.0.0.1:{relay.port}: Address already in use; "
        "choose another --host or --port\n"
    )


async def test_a_relay_without_descriptors_is_quiet_and_lets_people_in_again(tmp_path: Path) -> None:
    """Its limit cannot be raised, and strangers hold all of it."""
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48)); "
        "from relay.__main__ import main; sys.exit(main(['--port', '0', '--grace-s', '0.1']))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", limited, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "FOREDRAFT_SECRET": SECRET, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), BOUND_S))
    strangers = [await asyncio.open_connection("127.0.0.1", ready["port"]) for _ in range(60)]
    told: list[str] = []
    while not any("open files" in line for line in told):
        told.append((await asyncio.wait_for(process.stderr.readline(), BOUND_S)).decode())
    for _, writer in strangers:
        writer.close()
    link = await dial(
        f"ws://127.0.0.1:{ready['port']}", secret=SECRET,
        hello=Hello(protocol=PROTOCOL_VERSION, role="client", name="late"),
    )  # fmt: skip
    await link.close()
    process.send_signal(signal.SIGTERM)
    code, _, err = await finish(process)
    assert code == 0
    assert len([*told, *err.splitlines()]) < 20, err


@pytest.mark.parametrize("secret", ["", "short"])
async def test_without_a_secret_the_relay_does_not_start(secret: str) -> None:
    code, _, err = await finish(await start("relay", "--port", "0", secret=secret))
    assert code == 2
    assert "FOREDRAFT_SECRET" in err


async def test_the_client_command_prints_the_answer_and_its_figures(relay: Relay, target: ModelIdentity) -> None:
    verify = await answering(relay, target)
    ask = ("relay.client_cli", "chat", "--relay", relay.url)
    code, out, err = await finish(await start(*ask, stdin=b"a question"))
    assert (code, out) == (0, "Hello world")
    assert "2 tokens (stop)" in err
    code, out, _ = await finish(await start(*ask, "--json", "--target-only", "a question"))
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [event["event"] for event in events] == ["delta", "delta", "finished"]
    assert events[-1]["completion_tokens"] == 2
    verify.cancel()


async def test_the_client_command_says_what_is_wrong_in_one_line(relay: Relay) -> None:
    code, out, err = await finish(await start("relay.client_cli", "chat", "--relay", relay.url, "a question"))
    assert (code, out) == (1, "")
    assert err == "foredraft-client: no verify node serves any model; connected models: none (no_verify_node)\n"
    code, _, err = await finish(
        await start("relay.client_cli", "chat", "--relay", relay.url, "x", secret="another-secret")
    )
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "another-secret" not in err


@pytest.mark.usefixtures("at_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_client_that_is_told_to_end_cancels_its_request(
    relay: Relay, target: ModelIdentity, number: signal.Signals
) -> None:
    """As by `timeout 10 foredraft chat`: one that is just gone would leave its answer running."""
    verify = await relay.join("verify", target)
    opened, cancelled = asyncio.Event(), asyncio.Event()
    events = {"open_session": opened, "cancel": cancelled}
    running = asyncio.create_task(verify.run(lambda kind, *rest: events[kind].set()))
    process = await start("relay.client_cli", "chat", "--relay", relay.url, "a question")
    await asyncio.wait_for(opened.wait(), BOUND_S)
    process.send_signal(number)
    await asyncio.wait_for(cancelled.wait(), BOUND_S)
    code, _, err = await finish(process)
    assert code == 130
    assert "Traceback" not in err
    running.cancel()


async def test_the_trace_tells_who_came_and_went(relay: Relay, target: ModelIdentity, tmp_path: Path) -> None:
    verify = await answering(relay, target)
    await finish(await start("relay.client_cli", "chat", "--relay", relay.url, "a question"))
    verify.cancel()
    relay.process.send_signal(signal.SIGTERM)
    code, _, _ = await finish(relay.process)
    assert code == 0
    text = await asyncio.to_thread((tmp_path / "trace.jsonl").read_text)
    events = [json.loads(line) for line in text.splitlines()]
    assert [e["role"] for e in events if e["event"] == "peer_joined"] == ["verify", "client"]
    assert [e["reason"] for e in events if e["event"] == "session_ended"] == ["done"]


def test_settings_come_from_flags_then_environment_then_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[relay]\nport = 1111\nhost = "0.0.0.0"\ngrace-s = 7\n')
    monkeypatch.setenv("FOREDRAFT_SECRET", SECRET)
    monkeypatch.setenv("FOREDRAFT_RELAY_PORT", "2222")
    assert RelayConfig.read([]).host == "127.0.0.1"
    config = RelayConfig.read(["--config", str(path)])
    assert (config.host, config.port, config.grace_s) == ("0.0.0.0", 2222, 7.0)
    assert RelayConfig.read(["--config", str(path), "--port", "3333"]).port == 3333


@pytest.mark.parametrize(
    "argv", [["--port", "70000"], ["--grace-s", "-1"], ["--ping-interval-s", "nan"], ["--no-such-flag"]]
)
def test_bad_settings_of_the_relay_exit_with_2(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREDRAFT_SECRET", SECRET)
    with pytest.raises(SystemExit) as exited:
        RelayConfig.read(argv)
    assert exited.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_bad_sampling_of_the_client_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FOREDRAFT_SECRET", SECRET)
    with pytest.raises(SystemExit) as exited:
        ClientConfig.read("chat", ["x", "--temperature", "-1"])
    assert exited.value.code == 2
    assert "temperature" in capsys.readouterr().err


def test_c034_the_keepalive_interval_is_at_most_half_the_shortest_idle_limit() -> None:
    assert RelayConfig(secret=SECRET).ping_interval_s <= 60 / 2
