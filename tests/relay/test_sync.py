"""The client without an event loop, from a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from relay.client import Delta, Finished
from relay.errors import RequestFailed
from relay.sync import ask, stream
from wire.errors import LinkLost
from wire.messages import Cancel, Done, OpenSession, TextDelta

BOUND_S = 20.0


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "foredraft client"]


async def test_events_come_one_by_one_and_in_order(relay: Any) -> None:
    verify = await relay.join("verify")
    reading = asyncio.create_task(asyncio.to_thread(lambda: list(stream(relay.url, secret=relay.secret, prompt="x"))))
    session = (await verify.expect(OpenSession)).session
    for start, text in enumerate("abc"):
        verify.send(TextDelta(session=session, start=start, tokens=(start,), text=text))
    verify.send(Done(session=session, finish_reason="stop", prompt_tokens=1, completion_tokens=3))
    *deltas, last = await asyncio.wait_for(reading, BOUND_S)
    assert [delta.text for delta in deltas if isinstance(delta, Delta)] == ["a", "b", "c"]
    assert isinstance(last, Finished)
    assert client_threads() == []


async def test_leaving_early_cancels(relay: Any) -> None:
    verify = await relay.join("verify")

    def read_one() -> str:
        for event in stream(relay.url, secret=relay.secret, prompt="x"):
            assert isinstance(event, Delta)
            return event.text
        raise AssertionError("no event came")

    reading = asyncio.create_task(asyncio.to_thread(read_one))
    session = (await verify.expect(OpenSession)).session
    verify.send(TextDelta(session=session, start=0, tokens=(1,), text="a"))
    assert await asyncio.wait_for(reading, BOUND_S) == "a"
    assert (await verify.expect(Cancel)).session == session


async def test_errors_are_raised_where_the_events_are_read(relay: Any) -> None:
    with pytest.raises(RequestFailed, match="no verify node"):
        await asyncio.to_thread(ask, relay.url, secret=relay.secret, prompt="x")
    with pytest.raises(LinkLost, match="no relay answers"):
        await asyncio.to_thread(ask, "ws://127.0.0.1:1", secret=relay.secret, prompt="x")
    assert client_threads() == []
