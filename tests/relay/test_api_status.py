"""What the status page is told, and that nobody else is told it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from relay import api_page
from relay.api import Gateway
from relay.api_status import StatusBoard
from wire.codec import encode
from wire.messages import Candidates, Done, OpenSession, Paired, TextDelta

ADMIN = "an-admin-secret-of-the-tests"
BOUND_S = 10.0


@pytest.fixture
async def gateway(relay: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    relay.add_admin(ADMIN)
    monkeypatch.setattr(api_page, "UPDATE_S", 0.01)
    gateway = Gateway(relay.server)
    await gateway.start("127.0.0.1", 0)
    yield gateway
    await gateway.close()


@asynccontextmanager
async def viewer(gateway: Gateway, session: str = "") -> AsyncIterator[Any]:
    """Somebody who looks; awaited, the next snapshot."""
    url = f"http://127.0.0.1:{gateway.port}/status/events"
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as http,
        http.get(url, params={"session": session}) as response,
    ):
        assert response.status == 200

        async def snapshot() -> Any:
            async for line in response.content:
                if line.startswith(b"data: "):
                    return json.loads(line[6:])
            raise AssertionError("the events ended")

        yield snapshot


async def until(condition: Any) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_only_the_admin_secret_opens_the_figures(gateway: Gateway, relay: Any) -> None:
    base = f"http://127.0.0.1:{gateway.port}"
    async with aiohttp.ClientSession() as http:
        for header, status in (("", 401), (f"Bearer {relay.secret}", 403), (f"Basic {ADMIN}", 401)):
            headers = {"Authorization": header}
            async with http.get(f"{base}/status/events?key={ADMIN}", headers=headers) as response:
                assert response.status == status
        async with http.get(base, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (302, "status/")
        for name in ("", "app.js", "style.css", "icon.svg"):
            async with http.get(f"{base}/status/{name}") as response:
                assert response.status == 200
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                text = await response.text()
                assert relay.secret not in text
                assert "http://" not in text.replace("http://www.w3.org/", ""), "nothing from elsewhere"
        for name in ("..%2fapi.py", "api.py", "%2e%2e/config.py", "nothing.js"):
            async with http.get(f"{base}/status/{name}") as response:
                assert response.status == 404
    assert relay.server.tap is None


async def test_a_secret_that_is_revoked_ends_the_events(gateway: Gateway, relay: Any) -> None:
    async with viewer(gateway) as snapshot:
        await snapshot()
        relay.add_admin("another-secret-of-an-admin")

        async def read_on() -> None:
            while True:
                await snapshot()

        with pytest.raises(AssertionError, match="the events ended"):
            await asyncio.wait_for(read_on(), BOUND_S)
    await until(lambda: relay.server.tap is None)


async def test_nobody_who_asks_for_the_head_alone_is_sent_events(gateway: Gateway) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as http:
        async with http.head(f"http://127.0.0.1:{gateway.port}/status/events") as response:
            assert response.status in (404, 405)
        async with http.head(f"http://127.0.0.1:{gateway.port}/status/") as response:
            assert response.status == 200


async def test_frames_are_read_only_while_somebody_looks(gateway: Gateway, relay: Any) -> None:
    async with viewer(gateway) as one:
        await one()
        async with viewer(gateway) as two:
            await two()
            assert relay.server.tap is not None
        await one()
        assert relay.server.tap is not None
    await until(lambda: relay.server.tap is None)


async def test_nodes_sessions_and_totals_are_what_they_are(gateway: Gateway, relay: Any) -> None:
    verify = await relay.join("verify", name="v")
    await relay.join("draft", name="d")
    client = await relay.join("client")
    async with viewer(gateway) as snapshot:
        client.send(OpenSession(session="s", prompt="x"))
        await verify.expect(OpenSession)
        await verify.expect(Paired)
        sources = ("draft", "draft", "plain")
        verify.send(TextDelta(session="s", start=0, tokens=(1, 2, 3), text="abc", sources=sources))
        verify.send(TextDelta(session="s", start=3, tokens=(4,), text="d", sources=("plain",)))
        await client.expect(TextDelta)
        await client.expect(TextDelta)
        seen = await snapshot()
        while seen["sessions"] == [] or seen["sessions"][0]["tokens"] < 4:
            seen = await snapshot()
        (session,) = seen["sessions"]
        assert (session["id"], session["verify"], session["draft"]) == ("s", "v", "d")
        assert session["sources"] == {"draft": 2, "local": 0, "plain": 2}
        assert session["tokens_per_pass"] == 2.0
        assert seen["tokens_per_s"] == pytest.approx(4 / 5)
        nodes = {node["name"]: node for node in seen["nodes"]}
        assert set(nodes) == {"v", "d"}
        assert (nodes["v"]["role"], nodes["v"]["sessions"], nodes["v"]["capacity"]) == ("verify", 1, 4)
        report = {"rounds": 4.0, "drafted": 8.0, "accepted": 6.0}
        verify.send(Done(session="s", finish_reason="stop", prompt_tokens=1, completion_tokens=4, report=report))
        await client.expect(Done)
        seen = await snapshot()
        while seen["answers"] == 0:
            seen = await snapshot()
        assert (seen["num_sessions"], seen["sessions"]) == (0, [])
        assert (seen["acceptance_rate"], seen["mean_acceptance_length"]) == (0.75, 2.5)


async def test_a_malformed_frame_costs_the_page_nothing(relay: Any) -> None:
    board = StatusBoard(relay.server)
    board.join()
    board.watch("s")
    for kind in ("text_delta", "done", "candidates", "acceptance"):
        board.on_frame(kind, "s", b'{"type":"%s","session":"s"}' % kind.encode(), 1.0)
    board.on_frame("candidates", None, b"{", 1.0)
    assert board.snapshot(2.0)["answers"] == 0
    board.leave()


async def test_two_viewers_of_one_session_share_its_watch(relay: Any) -> None:
    board = StatusBoard(relay.server)
    frame = Candidates(session="s", epoch=1, frame=0, first_node=0, parents=(-1,), tokens=(1,), scores=(0,))
    one, two = board.watch("s"), board.watch("s")
    assert one is two
    board.unwatch("s")
    board.on_frame("candidates", "s", encode(frame), 1.0)
    assert len(one._open) == 1
    board.unwatch("s")
    board.on_frame("candidates", "s", encode(frame), 1.0)
    assert board.watch("s") is not one
