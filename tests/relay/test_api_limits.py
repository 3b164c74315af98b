"""The limits of a credential hold for its HTTP requests too, and for nobody else's."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import pytest

from relay.api import Gateway
from relay.credentials import Credential, Credentials
from relay.limits import BURST_S, Exceeded, Pace
from wire.messages import MAX_FRAME_BYTES, Cancel, Done, OpenSession, Tokenize, Tokenized

BODY = {"messages": [{"role": "user", "content": "hello"}]}
LIMITED, OTHER, ADMIN = "a-secret-that-is-limited", "a-secret-of-the-others", "a-secret-of-an-admin"
SLOW = 0.01
"""A second one is let in after 100 s, so it is all the same how fast the test runs."""


@dataclass
class Site:
    """A gateway with a verify node's double that answers everything at once."""

    relay: Any
    gateway: Gateway
    opened: list[str] = field(default_factory=list)

    def limit(self, **limits: float) -> None:
        lines = "\n".join(f"{name} = {value}" for name, value in limits.items())
        self.relay.server.access.credentials = Credentials.from_toml(
            f'[[credential]]\nname = "limited"\nroles = ["client"]\nsecrets = ["{LIMITED}"]\n{lines}\n'
            f'[[credential]]\nname = "others"\nroles = ["client"]\nsecrets = ["{OTHER}"]\n'
            f'[[credential]]\nname = "admin"\nroles = ["admin"]\nsecrets = ["{ADMIN}"]\n'
        )

    async def answer(self, verify: Any) -> None:
        while True:
            _, message = await verify.inbox.get()
            if isinstance(message, OpenSession):
                verify.send(Done(session=message.session, finish_reason="stop", prompt_tokens=1, completion_tokens=0))
            elif isinstance(message, Tokenize):
                verify.send(Tokenized(session=message.session, tokens=(1,), text="a", context_length=9))
            self.opened.append(message.session)

    async def post(
        self, secret: str = LIMITED, path: str = "/v1/chat/completions", body: Any = BODY, **kwargs: Any
    ) -> tuple[int, Any, str]:
        """Status, body and Retry-After."""
        kwargs = kwargs or {"json": body}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"http://127.0.0.1:{self.gateway.port}{path}", **kwargs) as response,
        ):
            is_json = response.content_type == "application/json"
            said = await response.json() if is_json else await response.text()
            return response.status, said, response.headers.get("Retry-After", "")


@pytest.fixture
async def site(start_relay: Any) -> AsyncIterator[Site]:
    relay = await start_relay(takeover_wait_s=0.0)
    gateway = Gateway(relay.server)
    await gateway.start("127.0.0.1", 0)
    site = Site(relay, gateway)
    task = asyncio.create_task(site.answer(await relay.join("verify")))
    yield site
    task.cancel()
    await gateway.close()


async def test_above_the_rate_a_request_is_told_limit_value_and_when_and_reaches_no_node(site: Site) -> None:
    site.limit(frames_per_s=SLOW)
    assert (await site.post())[0] == 200
    asked = (
        ("/v1/chat/completions", BODY), ("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}), ("/v1/chat/completions", BODY | {"stream": True}),
    )  # fmt: skip
    for path, body in asked:
        status, said, retry_after = await site.post(path=path, body=body)
        error = said["error"]
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert "credential limited is above its limit, frames_per_s = 0.01; come again in 9" in error["message"]
        assert 90 < int(retry_after) <= 100
        assert (await site.post(OTHER, path, body))[0] == 200
    assert len(site.opened) == 1 + len(asked)
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as http,
        http.get(f"http://127.0.0.1:{site.gateway.port}/metrics") as response,
    ):
        assert 'foredraft_refused_requests_total{credential="limited"} 5' in await response.text()


async def test_a_clients_library_sees_a_rate_limit(site: Site) -> None:
    site.limit(frames_per_s=SLOW)
    url = f"http://127.0.0.1:{site.gateway.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=LIMITED, max_retries=0) as client:
        await client.models.list()
        with pytest.raises(openai.RateLimitError, match=r"frames_per_s = 0\.01") as told:
            await client.chat.completions.create(model="target", messages=[{"role": "user", "content": "x"}])
    assert told.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize("sent", ["whole", "chunked", "compressed"])
async def test_the_bytes_of_a_body_count_however_it_is_sent(site: Site, sent: str) -> None:
    site.limit(bytes_per_s=10)
    body = b'{"messages":[{"role":"user","content":"%s"}]}' % (b"x" * 10_000)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 4096):
            yield body[start : start + 4096]

    if sent == "compressed":
        headers = {"Content-Encoding": "gzip", "Authorization": f"Bearer {LIMITED}"}
        assert (await site.post(data=gzip.compress(body), headers=headers))[0] == 200
    else:
        assert (await site.post(data=chunks() if sent == "chunked" else body))[0] == 200
    status, said, retry_after = await site.post()
    assert status == 429
    assert "bytes_per_s = 10; come again in" in said["error"]["message"]
    assert 900 < int(retry_after) <= 1004
    assert (await site.post(OTHER, data=body))[0] == 200


async def test_a_length_that_is_only_claimed_does_not_use_the_limit_up(site: Site) -> None:
    site.limit(bytes_per_s=2 * MAX_FRAME_BYTES)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {LIMITED}\r\nContent-Length: {10**15}\r\n"
    )
    writer.write(head.encode() + b"\r\n")
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 10), "told before the body is sent"
    writer.close()
    assert (await site.post())[0] == 200


async def test_each_session_of_a_request_counts(site: Site) -> None:
    site.limit(frames_per_s=0.1)
    assert (await site.post(body=BODY | {"n": 8}))[0] == 200
    status, _, retry_after = await site.post()
    assert (status, 70 < int(retry_after) <= 79) == (429, True)


async def test_links_and_requests_share_the_limits(site: Site) -> None:
    site.limit(bytes_per_s=1000)
    client = await site.relay.join("client", secret=LIMITED)
    client.send(Cancel(session="nothing", reason="x" * 100_000))
    async with asyncio.timeout(10):
        while site.relay.server.paces["limited"].num_delayed == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (await site.post())[0] == 429
    assert (await site.post(OTHER))[0] == 200


async def test_above_the_limit_of_sessions_it_is_429_with_both_numbers(site: Site) -> None:
    site.limit(max_sessions=2)
    status, said, retry_after = await site.post(body=BODY | {"n": 3})
    assert (status, said["error"]["type"], retry_after) == (429, "rate_limit_error", "1")
    assert said["error"]["message"] == "2 sessions are open already, the limit is 2"
    assert (await site.post(OTHER, body=BODY | {"n": 3}))[0] == 200
    assert (await site.post(body=BODY | {"n": 2}))[0] == 200, "what was begun for the refused one was cancelled"


def test_a_request_is_refused_while_a_limit_is_exhausted_and_by_the_one_that_is_for_longer() -> None:
    pace = Pace(Credential(name="app", roles=("client",), digests=(), frames_per_s=2, bytes_per_s=1000), 0.0)
    assert pace.refusal(0.0) is None
    pace.charge(3, 100, 0.0)
    assert pace.refusal(0.0) == Exceeded("frames_per_s", 2, pytest.approx(0.5))
    pace.charge(0, 2900, 0.0)
    assert pace.refusal(0.0) == Exceeded("bytes_per_s", 1000, pytest.approx(2.0))
    assert pace.refusal(1.999) is not None
    assert pace.refusal(2.001) is None
    assert pace.num_refused == 3
    assert pace.refusal(1000.0) is None
    pace.charge(int(2 * BURST_S), 0, 1000.0)
    assert pace.refusal(1000.0) is None, "the burst may be used up"
