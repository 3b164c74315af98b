"""The streaming client against a relay on loopback, with a verify node's double behind it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from relay.client import Delta, Finished, StreamClient
from relay.errors import RequestFailed
from wire.errors import FrameTooLarge, LinkLost, ProtocolError, QueueFull, Refused
from wire.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    ChatMessage,
    Done,
    Error,
    OpenSession,
    TextDelta,
    TokenLogprob,
    Waiting,
)
from wire.sampling import Sampling

BOUND_S = 10.0


def done(session: str, num_tokens: int, reason: str = "stop", **report: float) -> Done:
    return Done(session=session, finish_reason=reason, prompt_tokens=3, completion_tokens=num_tokens, report=report)


def delta(session: str, start: int, text: str, **fields: Any) -> TextDelta:
    return TextDelta(session=session, start=start, tokens=tuple(range(start, start + len(text))), text=text, **fields)


async def collect(client: StreamClient, **request: Any) -> list[Any]:
    return [event async for event in client.stream(**request)]


@pytest.fixture
async def verify(relay: Any) -> Any:
    return await relay.join("verify")


@pytest.fixture
async def client(relay: Any, verify: Any) -> Any:
    """A client that gives up at the first break; tests/relay/test_recovery.py has the others."""
    async with StreamClient(relay.url, secret=relay.secret, recover_s=0.0) as client:
        yield client


async def test_a_stream_is_deltas_and_a_closing_record(client: StreamClient, verify: Any) -> None:
    streaming = asyncio.create_task(
        collect(
            client,
            messages=[("system", "be brief"), ChatMessage(role="user", content="hi")],
            sampling=Sampling(temperature=0.5, seed=3),
            stop=["END"],
            max_tokens=9,
            logprobs=1,
            speculate=False,
        )
    )
    request = await verify.expect(OpenSession)
    assert [turn.content for turn in request.messages] == ["be brief", "hi"]
    assert (request.sampling.seed, request.stop, request.max_tokens) == (3, ("END",), 9)
    assert (request.logprobs, request.speculate) == (1, False)
    logprobs = (TokenLogprob(logprob=-0.5), TokenLogprob(logprob=-1.0))
    verify.send(TextDelta(session=request.session, start=0, tokens=(9,), text=""))
    verify.send(delta(request.session, 1, "ab", sources=("draft", "plain"), logprobs=logprobs))
    verify.send(done(request.session, 3, rounds=2.0))
    first, second, finished = await asyncio.wait_for(streaming, BOUND_S)
    assert first == Delta("", (9,), 0)
    assert second == Delta("ab", (1, 2), 1, ("draft", "plain"), logprobs)
    assert isinstance(finished, Finished)
    assert (finished.finish_reason, finished.prompt_tokens, finished.completion_tokens) == ("stop", 3, 3)
    assert finished.report == {"rounds": 2.0}
    assert finished.num_chunks == 2
    assert 0 < finished.time_per_output_token_s < finished.time_to_first_token_s < BOUND_S
    assert finished.tokens_per_s > 0


async def test_streams_of_one_client_run_side_by_side(client: StreamClient, verify: Any) -> None:
    streams = [asyncio.create_task(collect(client, prompt=f"p{i}", session=f"s{i}")) for i in range(5)]
    sessions = [(await verify.expect(OpenSession)).session for _ in streams]
    for start in range(3):
        for session in reversed(sessions):
            verify.send(delta(session, start, session[1]))
    for session in sessions:
        verify.send(done(session, 3))
    for i, stream in enumerate(streams):
        events = await asyncio.wait_for(stream, BOUND_S)
        assert "".join(event.text for event in events[:-1]) == str(i) * 3


async def test_a_duplicate_is_skipped(client: StreamClient, verify: Any) -> None:
    streaming = asyncio.create_task(collect(client, prompt_ids=[1, 2], session="s"))
    assert (await verify.expect(OpenSession)).prompt_ids == (1, 2)
    for start, text in ((0, "ab"), (0, "ab"), (2, "c"), (1, "b")):
        verify.send(delta("s", start, text))
    verify.send(done("s", 3))
    assert [event.text for event in (await asyncio.wait_for(streaming, BOUND_S))[:-1]] == ["ab", "c"]


@pytest.mark.parametrize(("start", "text"), [(3, "d"), (1, "bcd")], ids=["gap", "overlap"])
async def test_a_gap_is_an_error_and_cancels(client: StreamClient, verify: Any, start: int, text: str) -> None:
    streaming = asyncio.create_task(collect(client, prompt="x", session="s"))
    await verify.expect(OpenSession)
    verify.send(delta("s", 0, "ab"))
    verify.send(delta("s", start, text))
    with pytest.raises(RequestFailed, match=rf"from {start} .* 2 was due") as failed:
        await asyncio.wait_for(streaming, BOUND_S)
    assert failed.value.code == "gap"
    await verify.expect(Cancel)


async def test_closing_a_stream_cancels_exactly_once(client: StreamClient, verify: Any) -> None:
    async with aclosing(client.stream(prompt="x", session="s")) as stream:  # type: ignore[type-var]
        opening = asyncio.ensure_future(anext(stream))
        await verify.expect(OpenSession)
        verify.send(delta("s", 0, "a"))
        await opening
        client.cancel("s")
    client.cancel("s")
    assert (await verify.expect(Cancel)).session == "s"
    verify.send(done("s", 1, "cancelled"))
    follow_up = asyncio.create_task(collect(client, prompt="y", session="t"))
    assert (await verify.expect(OpenSession)).session == "t", "no second Cancel came before it"
    verify.send(done("t", 0))
    await asyncio.wait_for(follow_up, BOUND_S)


async def test_a_cancelled_stream_ends_with_its_record(client: StreamClient, verify: Any) -> None:
    streaming = asyncio.create_task(collect(client, prompt="x", session="s"))
    await verify.expect(OpenSession)
    client.cancel("s")
    await verify.expect(Cancel)
    verify.send(done("s", 0, "cancelled"))
    assert (await asyncio.wait_for(streaming, BOUND_S))[-1].finish_reason == "cancelled"


async def test_a_cancelled_task_cancels_its_request(client: StreamClient, verify: Any) -> None:
    streaming = asyncio.create_task(collect(client, prompt="x", session="s"))
    await verify.expect(OpenSession)
    streaming.cancel()
    assert (await verify.expect(Cancel)).session == "s"


async def test_errors_of_a_request_are_typed_and_leave_the_others_alone(client: StreamClient, verify: Any) -> None:
    other = asyncio.create_task(collect(client, prompt="x", session="other"))
    await verify.expect(OpenSession)
    with pytest.raises(RequestFailed) as failed:
        await collect(client, prompt="x", model="unheard-of")
    assert failed.value.code == "no_verify_node"
    assert "unheard-of" in failed.value.message
    assert "target" in failed.value.message
    streaming = asyncio.create_task(collect(client, prompt="x", session="s"))
    await verify.expect(OpenSession)
    verify.send(Error(session="s", code="bad_request", message="too long"))
    with pytest.raises(RequestFailed, match="too long"):
        await asyncio.wait_for(streaming, BOUND_S)
    verify.send(done("other", 0))
    await asyncio.wait_for(other, BOUND_S)


async def test_a_lost_verify_node_fails_its_requests(client: StreamClient, relay: Any, verify: Any) -> None:
    relay.server.router.takeover_wait_s = 0.05
    streaming = asyncio.create_task(collect(client, prompt="x"))
    await verify.expect(OpenSession)
    verify.link.abort()
    with pytest.raises(RequestFailed) as failed:
        await asyncio.wait_for(streaming, BOUND_S)
    assert failed.value.code == "verify_lost"


async def test_a_lost_relay_fails_all_streams_and_later_ones(client: StreamClient, relay: Any, verify: Any) -> None:
    streams = [asyncio.create_task(collect(client, prompt="x")) for _ in range(2)]
    for _ in streams:
        await verify.expect(OpenSession)
    await relay.server.drain()
    for stream in streams:
        with pytest.raises(LinkLost, match="1001"):
            await asyncio.wait_for(stream, BOUND_S)
    with pytest.raises(LinkLost):
        await collect(client, prompt="x")


async def test_c032_a_request_above_the_frame_limit_is_refused_on_submit(client: StreamClient, verify: Any) -> None:
    with pytest.raises(FrameTooLarge) as refused:
        await collect(client, prompt_ids=[123_456] * 400_000)
    assert refused.value.limit_bytes == MAX_FRAME_BYTES
    assert str(refused.value.size_bytes) in str(refused.value)
    assert str(MAX_FRAME_BYTES) in str(refused.value)
    streaming = asyncio.create_task(collect(client, prompt="x"))
    request = await verify.expect(OpenSession)
    verify.send(done(request.session, 0))
    await asyncio.wait_for(streaming, BOUND_S)


async def test_a_request_that_breaks_a_limit_is_refused_on_submit(client: StreamClient) -> None:
    with pytest.raises(ProtocolError, match="exactly one of prompt, messages, prompt_ids"):
        await collect(client)
    with pytest.raises(ProtocolError, match="max_tokens"):
        await collect(client, prompt="x", max_tokens=-1)


async def test_turns_come_in_the_openai_form_too_and_one_stop_string_is_one(client: StreamClient, verify: Any) -> None:
    turns = [{"role": "system", "content": "be brief"}, ("user", "hi")]
    streaming = asyncio.create_task(collect(client, messages=turns, stop="END"))
    request = await verify.expect(OpenSession)
    assert request.messages == (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hi"))
    assert request.stop == ("END",)
    verify.send(done(request.session, 0))
    await asyncio.wait_for(streaming, BOUND_S)
    with pytest.raises(ProtocolError, match="messages: a turn has a role and a content, got 'role', 'text'"):
        await collect(client, messages=[{"role": "user", "text": "hi"}])


async def test_a_wrong_secret_is_refused_and_the_secret_is_not_told(relay: Any) -> None:
    with pytest.raises(Refused) as refused:
        async with StreamClient(relay.url, secret="not-the-secret"):
            pass
    assert "not-the-secret" not in str(refused.value)


async def test_nobody_at_the_address_is_a_lost_link() -> None:
    with pytest.raises(LinkLost, match=r"no relay answers at ws://127\.0\.0\.1:1"):
        async with StreamClient("ws://127.0.0.1:1", secret="some-secret"):
            pass


async def test_a_callers_error_in_on_waiting_leaves_no_stream_waiting(client: StreamClient, verify: Any) -> None:
    def told(place: int) -> None:
        raise BrokenPipeError("nobody reads")

    streaming = asyncio.create_task(collect(client, prompt="x", on_waiting=told))
    request = await verify.expect(OpenSession)
    verify.send(Waiting(session=request.session, place=1))
    with pytest.raises(LinkLost, match="BrokenPipeError: nobody reads"):
        await asyncio.wait_for(streaming, BOUND_S)


async def test_a_crowd_of_streams_that_is_opened_anew_waits_for_room(
    client: StreamClient, verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the relay: the requests together are more than the link's queue holds."""
    streaming = asyncio.create_task(collect(client, prompt="x"))
    first = await verify.expect(OpenSession)
    assert client._link is not None
    send, num_full = client._link.send, 0

    def full_at_first(message: Any, *, now: float | None = None) -> None:
        nonlocal num_full
        if isinstance(message, OpenSession) and num_full < 2:
            num_full += 1
            raise QueueFull("4096 frames wait already")
        send(message, now=now)

    monkeypatch.setattr(client._link, "send", full_at_first)
    client._reopen(client._streams[first.session])
    request = await verify.expect(OpenSession)
    assert request.session != first.session
    verify.send(done(request.session, 0))
    assert isinstance((await asyncio.wait_for(streaming, BOUND_S))[-1], Finished)
    assert num_full == 2
