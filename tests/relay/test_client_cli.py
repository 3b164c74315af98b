"""`foredraft chat` and `foredraft stream` as processes, in a terminal where that matters."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relay.client_config import ClientConfig
from wire.messages import Done, Error, OpenSession, TextDelta

ROOT = Path(__file__).parents[2]
BOUND_S = 20.0
REPORT = {
    "rounds": 2.0, "acceptance_rate": 0.5, "mean_acceptance_length": 2.0, "acceptance_at_1": 0.75,
    "acceptance_at_2": 0.25, "round_verify_s": 0.02, "round_draft_s": 0.01,
}  # fmt: skip


async def start(
    relay: Any,
    *argv: str,
    stdin: int = asyncio.subprocess.PIPE,
    stdout: int = asyncio.subprocess.PIPE,
    shell: str = "",
    **variables: str,
) -> asyncio.subprocess.Process:
    """Start the command, by a shell that runs it as "$@" where one is given."""
    command, *flags = argv
    environment = {**os.environ, "FOREDRAFT_SECRET": relay.secret, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    return await asyncio.create_subprocess_exec(
        *(["sh", "-c", shell, "sh"] if shell else []), sys.executable, "-m", "relay.client_cli", command,
        "--relay", relay.url, *flags, stdin=stdin, stdout=stdout, stderr=asyncio.subprocess.PIPE,
        env=environment | variables, cwd=ROOT,
    )  # fmt: skip


async def finish(process: asyncio.subprocess.Process, text: bytes | None = None) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(text), BOUND_S)
    return process.returncode, (out or b"").decode(), err.decode()


def answer(verify: Any, session: str, *pieces: str, reason: str = "stop") -> None:
    for start, piece in enumerate(pieces):
        verify.send(TextDelta(session=session, start=2 * start, tokens=(1, 2), text=piece, sources=("draft", "plain")))
    verify.send(
        Done(session=session, finish_reason=reason, prompt_tokens=1, completion_tokens=2 * len(pieces), report=REPORT)
    )


@asynccontextmanager
async def terminal(relay: Any, *argv: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """The command with a terminal for its input; the terminal's other end."""
    ours, theirs = pty.openpty()
    process = await start(relay, *argv, stdin=theirs)
    os.close(theirs)
    yield process, ours
    if process.returncode is None:
        process.kill()
        await process.communicate()
    os.close(ours)


async def test_chat_sends_turns_and_stream_the_text_as_it_is(relay: Any) -> None:
    verify = await relay.join("verify")
    process = await start(relay, "chat", "--system", "be brief", "--seed", "4", "--min-p", "0.1", "why?")
    request = await verify.expect(OpenSession)
    assert [(turn.role, turn.content) for turn in request.messages] == [("system", "be brief"), ("user", "why?")]
    assert (request.sampling.seed, request.sampling.min_p) == (4, 0.1)
    answer(verify, request.session, "be", "cause")
    code, out, err = await finish(process)
    assert (code, out) == (0, "because")
    assert "4 tokens (stop)" in err
    assert "mean acceptance length 2.00" in err
    process = await start(relay, "stream", "--json")
    assert process.stdin is not None
    process.stdin.write("Es war einmal – ".encode())
    process.stdin.close()
    request = await verify.expect(OpenSession)
    assert request.prompt == "Es war einmal – "
    answer(verify, request.session, "ein", "König")
    code, out, err = await finish(process)
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [event["event"] for event in events] == ["delta", "delta", "finished"]
    assert events[1]["text"] == "König"
    assert events[0]["sources"] == ["draft", "plain"]
    assert events[2]["report"] == REPORT


async def test_ctrl_c_keeps_what_has_come_and_cancels_once(relay: Any) -> None:
    verify = await relay.join("verify")
    process = await start(relay, "chat", "why?")
    request = await verify.expect(OpenSession)
    verify.send(TextDelta(session=request.session, start=0, tokens=(1,), text="bec"))
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(3), BOUND_S) == b"bec"
    process.send_signal(signal.SIGINT)
    cancel = await asyncio.wait_for(verify.inbox.get(), BOUND_S)
    assert cancel[1].type == "cancel"
    verify.send(Done(session=request.session, finish_reason="cancelled", prompt_tokens=1, completion_tokens=1))
    code, _, err = await finish(process)
    assert code == 130
    assert "1 tokens (cancelled)" in err
    assert "Traceback" not in err
    assert verify.inbox.empty()


async def test_a_second_ctrl_c_does_not_wait_for_the_nodes(relay: Any) -> None:
    verify = await relay.join("verify")
    process = await start(relay, "chat", "why?")
    await verify.expect(OpenSession)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(verify.inbox.get(), BOUND_S)
    process.send_signal(signal.SIGINT)
    code, out, err = await finish(process)
    assert (code, out, err) == (130, "", "")


async def test_a_conversation_remembers_and_ends_with_the_input(relay: Any) -> None:
    verify = await relay.join("verify")
    async with terminal(relay, "chat") as (process, keyboard):
        os.write(keyboard, b"first?\n\n")
        request = await verify.expect(OpenSession)
        answer(verify, request.session, "one")
        os.write(keyboard, b"second?\n")
        request = await verify.expect(OpenSession)
        assert [(turn.role, turn.content) for turn in request.messages] == [
            ("user", "first?"), ("assistant", "one"), ("user", "second?"),
        ]  # fmt: skip
        answer(verify, request.session, "two")
        os.write(keyboard, b"\x04")
        code, out, _ = await finish(process)
    assert code == 0
    assert out.count("> ") == 4


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
async def test_a_reader_that_goes_away_ends_the_request_quietly(relay: Any, flags: tuple[str, ...]) -> None:
    verify = await relay.join("verify")
    ours, theirs = os.pipe()
    process = await start(relay, "chat", *flags, "why?", stdout=theirs)
    os.close(theirs)
    session = (await verify.expect(OpenSession)).session
    os.close(ours)
    verify.send(TextDelta(session=session, start=0, tokens=(1,), text="be"))
    cancel = await asyncio.wait_for(verify.inbox.get(), BOUND_S)
    assert cancel[1].type == "cancel"
    verify.send(Done(session=session, finish_reason="cancelled", prompt_tokens=1, completion_tokens=1))
    code, _, err = await finish(process)
    assert (code, err) == (141, "")


async def test_streams_that_the_caller_has_closed_are_no_error(relay: Any) -> None:
    code, _, err = await finish(await start(relay, "chat", shell='exec "$@" <&-'))
    assert (code, err) == (2, "foredraft chat: there is nothing to ask: give a text, or one on standard input\n")
    verify = await relay.join("verify")
    process = await start(relay, "chat", "why?", shell='exec "$@" >&-')
    answer(verify, (await verify.expect(OpenSession)).session, "because")
    code, out, err = await finish(process)
    assert (code, out) == (0, "")
    assert "2 tokens (stop)" in err


async def test_no_locale_breaks_an_answer(relay: Any) -> None:
    verify = await relay.join("verify")
    process = await start(relay, "chat", "why?", PYTHONIOENCODING="ascii")
    answer(verify, (await verify.expect(OpenSession)).session, "naïve 🙂")
    code, out, _ = await finish(process)
    assert (code, out) == (0, "na?ve ?")
    process = await start(relay, "chat", "--json", "why?", PYTHONIOENCODING="ascii")
    answer(verify, (await verify.expect(OpenSession)).session, "naïve 🙂")
    code, out, _ = await finish(process)
    assert (code, json.loads(out.splitlines()[0])["text"]) == (0, "naïve 🙂")


async def test_in_a_terminal_control_characters_are_shown_and_not_obeyed(relay: Any) -> None:
    text = "a\tb\r\n\x1b]0;title\x07\x9b2J"
    verify = await relay.join("verify")
    process = await start(relay, "chat", "why?")
    answer(verify, (await verify.expect(OpenSession)).session, text)
    assert (await finish(process))[1].encode() == text.encode(), "to a program they are the text that they are"
    ours, theirs = pty.openpty()
    process = await start(relay, "chat", "why?", stdout=theirs)
    session = (await verify.expect(OpenSession)).session
    verify.send(TextDelta(session=session, start=0, tokens=(1,), text=text))
    verify.send(Error(session=session, code="target_failed", message="no\x1b[2J more"))
    code, _, err = await finish(process)
    assert (code, err) == (1, "foredraft-client: no\\x1b[2J more (target_failed)\n")
    os.close(theirs)
    assert os.read(ours, 1000).decode() == "a\tb\r\n\\x1b]0;title\\x07\\x9b2J\r\n", "and a line that was begun is ended"
    os.close(ours)


async def test_a_question_that_is_no_text_is_told_and_the_conversation_goes_on(relay: Any) -> None:
    verify = await relay.join("verify")
    async with terminal(relay, "chat") as (process, keyboard):
        os.write(keyboard, b"caf\xe9\nfirst?\n")
        request = await verify.expect(OpenSession)
        assert [(turn.role, turn.content) for turn in request.messages] == [("user", "first?")]
        answer(verify, request.session, "one")
        os.write(keyboard, b"\x04")
        code, _, err = await finish(process)
    assert code == 0
    assert "the text is not valid UTF-8, see character 4" in err


async def test_an_answer_that_fails_does_not_end_the_conversation(relay: Any) -> None:
    verify = await relay.join("verify")
    async with terminal(relay, "chat") as (process, keyboard):
        os.write(keyboard, b"first?\n")
        answer(verify, (await verify.expect(OpenSession)).session, "one")
        os.write(keyboard, b"second?\n")
        session = (await verify.expect(OpenSession)).session
        verify.send(Error(session=session, code="overloaded", message="all places are taken"))
        os.write(keyboard, b"again?\n")
        request = await verify.expect(OpenSession)
        assert [turn.content for turn in request.messages] == ["first?", "one", "again?"]
        answer(verify, request.session, "two")
        os.write(keyboard, b"\x04")
        code, _, err = await finish(process)
    assert code == 0
    assert "foredraft-client: all places are taken (overloaded)" in err


async def test_the_panel_shows_sources_acceptance_and_the_round(relay: Any) -> None:
    verify = await relay.join("verify")
    process = await start(relay, "chat", "--panel", "why?")
    request = await verify.expect(OpenSession)
    answer(verify, request.session, "be", "cause")
    code, out, _ = await finish(process)
    assert code == 0
    for text in ("because", "far drafter 2", "target alone 2", "place 1", "0.75", "verify compute", "20.0 ms", "stop"):
        assert text in out


async def test_what_is_wrong_is_one_line_and_an_exit_code(relay: Any) -> None:
    code, _, err = await finish(await start(relay, "chat", "--panel", "why?"))
    assert code == 1
    assert "no verify node serves any model" in err
    assert len(err.splitlines()) == 1
    code, _, err = await finish(await start(relay, "stream"), b"  \n")
    assert (code, err) == (2, "foredraft stream: there is nothing to ask: give a text, or one on standard input\n")
    code, _, err = await finish(await start(relay, "stream"), b"caf\xe9")
    assert (code, err) == (2, "foredraft stream: the text is not valid UTF-8, see character 4\n")
    code, _, err = await finish(await start(relay, "sing", "x"))
    assert code == 2
    assert "must be chat or stream, got 'sing'" in err
    code, _, err = await finish(await start(relay, "chat", "--json", "--panel", "x"))
    assert code == 2
    assert "not allowed with" in err


def test_both_commands_share_their_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREDRAFT_SECRET", "a-secret-of-the-tests")
    monkeypatch.setenv("FOREDRAFT_CLIENT_MODEL", "m")
    path = tmp_path / "settings.toml"
    path.write_text("[client]\ntemperature = 0.5\n")
    for command in ("chat", "stream"):
        config = ClientConfig.read(command, ["--config", str(path), "x"])
        assert (config.model, config.sampling.temperature, config.chat) == ("m", 0.5, command == "chat")
    assert not ClientConfig.read("chat", ["--raw", "x"]).chat


async def test_an_answer_goes_on_after_its_link_was_cut_every_character_once(relay: Any) -> None:
    verify = await relay.join("verify")
    process = await start(relay, "chat", "why?")
    session = (await verify.expect(OpenSession)).session
    verify.send(TextDelta(session=session, start=0, tokens=(1, 2), text="be"))
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(2), BOUND_S) == b"be"
    (client,) = relay.server.router.nodes("client")
    relay.server.links[client.id].abort()
    verify.send(TextDelta(session=session, start=2, tokens=(3,), text="ca"))
    async with asyncio.timeout(BOUND_S):
        while relay.server.router.num_resumed == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    verify.send(TextDelta(session=session, start=3, tokens=(4,), text="use"))
    verify.send(Done(session=session, finish_reason="stop", prompt_tokens=1, completion_tokens=4))
    code, rest, err = await finish(process)
    assert (code, rest) == (0, "cause")
    assert "4 tokens (stop)" in err
