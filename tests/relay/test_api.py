"""The gateway in front of a relay on loopback, with a verify node's double behind it."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import trustme

from relay import api_sessions
from relay.api import Gateway
from relay.credentials import Credentials
from relay.server import RelayServer
from wire.aio.quiet import MAX_BURST, RateLimited
from wire.errors import ListenFailed
from wire.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    Done,
    Error,
    OpenSession,
    TextDelta,
    Tokenize,
    Tokenized,
    TokenLogprob,
)

ADMIN = "an-admin-secret-of-the-tests"
BODY = {"messages": [{"role": "user", "content": "hello"}]}
BOUND_S = 10.0


class Http:
    """The gateway under test and a client of it."""

    def __init__(self, gateway: Gateway, session: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.session = session
        self.url = f"http://127.0.0.1:{gateway.port}"

    async def post(self, body: Any = BODY, path: str = "/v1/chat/completions", **kwargs: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()


@pytest.fixture
async def relay(start_relay: Any) -> Any:
    return await start_relay(takeover_wait_s=0.0)


@pytest.fixture
async def http(relay: Any) -> AsyncIterator[Http]:
    relay.add_admin(ADMIN)
    gateway = Gateway(relay.server)
    await gateway.start("127.0.0.1", 0)
    headers = {"Authorization": f"Bearer {relay.secret}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        yield Http(gateway, session)
    await gateway.close()


@asynccontextmanager
async def asking(http: Http, body: Any = BODY) -> AsyncIterator[asyncio.Task[tuple[int, Any]]]:
    """A request under way; what it has been answered is the task's result."""
    task = asyncio.create_task(http.post(body))
    yield task
    await asyncio.wait_for(task, BOUND_S)


def done(session: str, num_tokens: int, reason: str = "stop") -> Done:
    return Done(session=session, finish_reason=reason, prompt_tokens=3, completion_tokens=num_tokens)


async def test_no_request_gets_past_a_wrong_secret(
    http: Http, relay: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("relay.api.REFUSED", RateLimited(logging.getLogger("relay"), logging.WARNING))
    verify = await relay.join("verify")
    for header in ("", "Bearer", "Bearer wrong", f"Basic {relay.secret}", f"Bearer {relay.secret}x", "Bearer \udcff"):
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            headers = {"Authorization": header.encode("utf-8", "surrogateescape").decode("latin-1")}
            async with http.session.post(http.url + path, json=BODY, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
    async with http.session.get(f"{http.url}/v1/models?key={relay.secret}", headers={"Authorization": ""}) as response:
        assert response.status == 401
    assert verify.inbox.empty()
    # Whoever looks into the log sees that somebody tries, however often that is, and not what.
    assert caplog.text.count("a request from 127.0.0.1 refused: Authorization: Bearer SECRET with") <= MAX_BURST
    assert "refused" in caplog.text
    assert f"{relay.secret}x" not in caplog.text
    async with http.session.get(http.url + "/v1/models", headers={"Authorization": f"Bearer {ADMIN}"}) as response:
        assert response.status == 200


async def test_a_credential_is_held_to_its_role_and_its_limit_of_sessions(http: Http, relay: Any) -> None:
    verify = await relay.join("verify")
    relay.server.access.credentials = Credentials.from_toml(
        '[[credential]]\nname = "nodes"\nroles = ["node"]\nsecrets = ["a-secret-of-nodes"]\n'
        '[[credential]]\nname = "few"\nroles = ["client"]\nsecrets = ["a-secret-of-few"]\nmax_sessions = 1\n'
        '[[credential]]\nname = "others"\nroles = ["client"]\nsecrets = ["a-secret-of-others"]\n'
    )
    status, body = await http.post(headers={"Authorization": "Bearer a-secret-of-nodes"})
    assert (status, body["error"]["code"]) == (403, "not_allowed")
    assert "nodes is for node" in body["error"]["message"]
    few = {"Authorization": "Bearer a-secret-of-few"}
    first = asyncio.create_task(http.post(headers=few))
    session = (await verify.expect(OpenSession)).session
    status, body = await http.post(headers=few)
    assert (status, body["error"]["code"]) == (429, "overloaded")
    other = asyncio.create_task(http.post(headers={"Authorization": "Bearer a-secret-of-others"}))
    verify.send(done((await verify.expect(OpenSession)).session, 0))
    verify.send(done(session, 0))
    assert [(await task)[0] for task in (first, other)] == [200, 200]


async def test_a_relay_that_drains_says_so(http: Http, relay: Any) -> None:
    await relay.join("verify")
    relay.server.router.draining = True
    async with http.session.post(f"{http.url}/v1/chat/completions", json=BODY) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert (await response.json())["error"]["code"] == "draining"


async def test_the_secret_and_the_prompt_are_in_no_log_line(
    http: Http, relay: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    verify = await relay.join("verify")
    async with asking(http, BODY | {"messages": [{"role": "user", "content": "a-private-question"}]}) as task:
        request = await verify.expect(OpenSession)
        verify.send(done(request.session, 0))
        assert (await task)[0] == 200
    assert relay.secret not in caplog.text
    assert "a-private-question" not in caplog.text


async def test_errors_of_the_pipeline_have_a_fitting_status(http: Http, relay: Any) -> None:
    status, body = await http.post()
    assert (status, body["error"]["code"]) == (503, "no_verify_node")
    verify = await relay.join("verify")
    status, body = await http.post(BODY | {"model": "other"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    for code, expected, param in (
        ("overloaded", 429, None), ("target_failed", 500, None), ("strange", 500, None),
        ("prompt_too_long", 400, "messages"), ("verify_lost", 502, None),
    ):  # fmt: skip
        for stream in (False, True):
            async with asking(http, BODY | {"stream": stream}) as task:
                request = await verify.expect(OpenSession)
                verify.send(Error(session=request.session, code=code, message=f"because of {code}"))
                status, body = await task
                assert (status, body["error"]["message"], body["error"]["param"]) == (
                    expected,
                    f"because of {code}",
                    param,
                )
    async with asking(http) as task:
        request = await verify.expect(OpenSession)
        verify.send(Error(session=request.session, code="bad_request", message="logit_bias must be keyed by ids"))
        status, body = await task
        assert (status, body["error"]["param"]) == (400, "logit_bias")
    assert relay.server.router.sessions == {}


async def test_an_error_in_mid_stream_is_an_event_and_the_end(http: Http, relay: Any) -> None:
    verify = await relay.join("verify")
    async with asyncio.TaskGroup() as tasks:

        async def read() -> bytes:
            async with http.session.post(f"{http.url}/v1/chat/completions", json=BODY | {"stream": True}) as response:
                return await response.read()

        reading = tasks.create_task(read())
        request = await verify.expect(OpenSession)
        verify.send(TextDelta(session=request.session, start=0, tokens=(7,), text="a"))
        verify.send(Error(session=request.session, code="target_failed", message="NaN"))
    events = reading.result().split(b"\n\n")
    assert b'"content":"a"' in events[1]
    assert events[2].startswith(b'data: {"error":{"message":"NaN","type":"server_error"')
    assert events[3:] == [b""], "no end marker: the answer is not complete"


async def test_one_failed_answer_of_several_cancels_the_others(http: Http, relay: Any) -> None:
    verify = await relay.join("verify")
    async with asking(http, BODY | {"n": 3}) as task:
        sessions = [(await verify.expect(OpenSession)).session for _ in range(3)]
        verify.send(done(sessions[0], 0))
        verify.send(Error(session=sessions[1], code="target_failed", message="NaN"))
        assert (await task)[0] == 500
        assert (await verify.expect(Cancel)).session == sessions[2]
        verify.send(done(sessions[2], 0, "cancelled"))
    assert verify.inbox.empty()


async def test_c053_an_unstreamed_request_that_is_dropped_is_cancelled_once(http: Http, relay: Any) -> None:
    verify = await relay.join("verify")
    for stream in (False, True):
        task = asyncio.create_task(http.post(BODY | {"stream": stream}))
        request = await verify.expect(OpenSession)
        task.cancel()
        assert (await verify.expect(Cancel)).session == request.session
        verify.send(done(request.session, 0, "cancelled"))
    async with asking(http) as task:
        request = await verify.expect(OpenSession)
        verify.send(done(request.session, 0))
        assert (await task)[0] == 200
    assert verify.inbox.empty(), "no second Cancel"


async def test_c033_a_client_that_does_not_read_is_cut_and_its_session_ends(
    http: Http, relay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_sessions, "MAX_QUEUED_BYTES", 1 << 20)
    verify = await relay.join("verify")
    reader, writer = await asyncio.open_connection("127.0.0.1", http.gateway.port, limit=1 << 10)
    body = b'{"stream":true,"messages":[{"role":"user","content":"x"}]}'
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nAuthorization: Bearer %s\r\n\r\n%s"
        % (len(body), relay.secret.encode(), body)
    )
    request = await verify.expect(OpenSession)
    await reader.readline()
    writer.transport.pause_reading()
    sent = 0
    while verify.inbox.empty():
        verify.send(TextDelta(session=request.session, start=sent, tokens=(7,), text="x" * 100_000))
        await verify.link.flush()
        sent += 1
        assert sent < 1000
        await asyncio.sleep(0)
    assert (await verify.expect(Cancel)).session == request.session
    verify.send(done(request.session, sent, "cancelled"))
    writer.transport.resume_reading()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await reader.readexactly(1 << 30)
    writer.close()
    status, _ = await http.post(BODY | {"model": "other"})
    assert status == 404


async def test_silence_is_filled_with_comments(http: Http, relay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.api.SILENCE_S", 0.01)
    monkeypatch.setattr("relay.api.FIRST_EVENT_S", 0.0)
    verify = await relay.join("verify")
    async with http.session.post(f"{http.url}/v1/chat/completions", json=BODY | {"stream": True}) as response:
        request = await verify.expect(OpenSession)
        lines = [await response.content.readline() for _ in range(8)]
        assert lines.count(b": still here\n") == 3
        verify.send(TextDelta(session=request.session, start=0, tokens=(7,), text="a"))
        verify.send(done(request.session, 1))
        assert b'"content":"a"' in await response.read()


async def test_tokens_that_show_nothing_are_filled_with_comments_too(
    http: Http, relay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.api.SILENCE_S", 0.05)
    monkeypatch.setattr("relay.api.FIRST_EVENT_S", 0.0)
    verify = await relay.join("verify")

    async def hide(session: str) -> None:
        for start in itertools.count():
            verify.send(TextDelta(session=session, start=start, tokens=(7,), text=""))
            await verify.link.flush()
            await asyncio.sleep(0)

    async with http.session.post(f"{http.url}/v1/chat/completions", json=BODY | {"stream": True}) as response:
        session = (await verify.expect(OpenSession)).session
        hiding = asyncio.create_task(hide(session))
        while await asyncio.wait_for(response.content.readline(), BOUND_S) != b": still here\n":
            pass
        hiding.cancel()


async def test_a_gateway_that_closes_tells_the_answers_under_way(
    http: Http, relay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.api.FIRST_EVENT_S", 0.0)
    verify = await relay.join("verify")
    async with asking(http) as whole, http.session.post(
        f"{http.url}/v1/chat/completions", json=BODY | {"stream": True}
    ) as streamed:  # fmt: skip
        for _ in range(2):
            await verify.expect(OpenSession)
        await http.gateway.close()
        status, body = await whole
        assert (status, body["error"]["code"]) == (503, "draining")
        *_, last = (await streamed.read()).strip().split(b"\n\n")
        assert orjson.loads(last.removeprefix(b"data: "))["error"]["message"] == "the relay is shutting down"
        assert {(await verify.expect(Cancel)).type for _ in range(2)} == {"cancel"}


async def test_a_response_that_would_take_too_much_memory_is_refused_unless_streamed(
    http: Http, relay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.api.MAX_WHOLE_LOGPROBS", 30)
    verify = await relay.join("verify")
    asked = BODY | {"n": 2, "logprobs": True, "top_logprobs": 2}
    entry = TokenLogprob(logprob=-0.5, top_ids=(1, 2), top_logprobs=(-0.5, -1.0), token_hex="61", top_hex=("61", "62"))

    def say(session: str, num_tokens: int) -> None:
        for start in range(num_tokens):
            verify.send(TextDelta(session=session, start=start, tokens=(7,), text="a", logprobs=(entry,)))

    for num_tokens, stream, status in ((5, False, 200), (6, False, 400), (6, True, 200)):
        task = asyncio.create_task(
            http.session.post(f"{http.url}/v1/chat/completions", json=asked | {"stream": stream})
        )
        sessions = [(await verify.expect(OpenSession)).session for _ in range(2)]
        for session in sessions:
            say(session, num_tokens)
        if status == 400:
            assert {(await verify.expect(Cancel)).session for _ in range(2)} == set(sessions)
        for session in sessions:
            verify.send(done(session, num_tokens, "stop" if status == 200 else "cancelled"))
        async with await asyncio.wait_for(task, BOUND_S) as response:
            assert response.status == status
            body = await response.read()
        assert status == 200 or orjson.loads(body)["error"]["param"] == "logprobs"
        assert status == 400 or body.count(b'"logprob":-1.0') == 2 * num_tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_body_that_is_not_as_its_header_says_is_the_clients_fault(
    http: Http, relay: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with http.session.post(http.url + path, data=b'{"prompt":"x"}', headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_body")
    assert "gzip" in error["message"]
    assert "Traceback" not in caplog.text


async def test_c080_what_is_no_http_is_a_few_lines_without_what_was_sent(
    http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3 * MAX_BURST):
        reader, writer = await asyncio.open_connection("127.0.0.1", http.gateway.port)
        writer.write(b"GET / HTTP/1.1\r\nAuthorization Bearer a-secret\r\n\r\n")
        assert b"400" in await reader.readline()
        writer.close()
    assert "a-secret" not in caplog.text
    assert "Traceback" not in caplog.text
    assert caplog.text.count("a request from 127.0.0.1 could not be read") == MAX_BURST


async def test_what_is_not_there_or_too_large_is_told_in_the_openai_form(http: Http, relay: Any) -> None:
    await relay.join("verify")
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/x", 404)):
        async with http.session.request(method, http.url + path) as response:
            assert response.status == status
            assert path in (await response.json())["error"]["message"]
            assert response.headers["Server"] == "foredraft"
            assert response.headers.get("Allow", "") == ("POST" if status == 405 else "")
    for prompt, param in (("x" * MAX_FRAME_BYTES, None), ("é" * (MAX_FRAME_BYTES // 2 - 50), "prompt")):
        body = io.BytesIO(orjson.dumps({"prompt": prompt}))
        async with http.session.post(f"{http.url}/v1/completions", data=body) as response:
            assert response.status == 413
            error = (await response.json())["error"]
            assert error["param"] == param
            assert str(MAX_FRAME_BYTES) in error["message"]


async def test_tokenize_is_a_session_of_its_own(http: Http, relay: Any) -> None:
    verify = await relay.join("verify")
    task = asyncio.create_task(http.post({"prompt": "hello"}, "/tokenize"))
    request = await verify.expect(Tokenize)
    assert request.prompt == "hello"
    assert len(relay.server.router.sessions) == 1
    verify.send(Tokenized(session=request.session, tokens=(1, 2), text="hello", context_length=99))
    assert await task == (200, {"tokens": [1, 2], "count": 2, "max_model_len": 99})
    assert relay.server.router.sessions == {}
    task = asyncio.create_task(http.post({"tokens": [1, 2]}, "/detokenize"))
    request = await verify.expect(Tokenize)
    verify.link.abort()
    status, body = await task
    assert (status, body["error"]["code"]) == (502, "verify_lost")


async def test_models_are_those_of_the_connected_verify_nodes(http: Http, relay: Any) -> None:
    await relay.join("verify", name="v1")
    await relay.join("verify", name="v2")
    await relay.join("draft")
    async with http.session.get(f"{http.url}/v1/models") as response:
        body = await response.json()
    (model,) = body["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("target", "model", 4096)
    assert [node["name"] for node in model["foredraft"]["verify_nodes"]] == ["v1", "v2"]


async def test_a_port_in_use_is_told(http: Http, relay: Any) -> None:
    other = Gateway(relay.server)
    with pytest.raises(ListenFailed, match=rf"127\.0\.0\.1:{http.gateway.port}.*--http-port"):
        await other.start("127.0.0.1", http.gateway.port)
    await other.close()


async def test_a_bug_of_ours_is_told_without_its_details(
    http: Http, relay: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: RelayServer, *args: Any) -> None:
        raise ZeroDivisionError("in the works")

    monkeypatch.setattr(RelayServer, "from_local", broken)
    status, body = await http.post()
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "in the works" not in body["error"]["message"]
    assert "in the works" in caplog.text


async def test_health_needs_no_secret_and_metrics_that_of_an_admin(http: Http, relay: Any) -> None:
    async def get(path: str, secret: str = "") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {secret}"}
        async with http.session.get(http.url + path, headers=headers) as response:
            return response.status, await response.text()

    assert (await get("/healthz"))[0] == 200
    status, reason = await get("/readyz")
    assert (status, "no verify node is connected" in reason) == (503, True)
    await relay.join("verify")
    assert (await get("/readyz"))[0] == 200
    assert (await get("/metrics", relay.secret))[0] == 401
    status, metrics = await get("/metrics", ADMIN)
    assert status == 200
    assert 'foredraft_peers{role="verify"} 1' in metrics


async def test_c046_the_relays_certificate_serves_https_too(start_relay: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    served = tmp_path / "served.pem"

    def write() -> None:
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(served)

    await asyncio.to_thread(write)
    relay = await start_relay(tls_cert=served)
    gateway = Gateway(relay.server)
    await gateway.start("127.0.0.1", 0)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    url = f"https://127.0.0.1:{gateway.port}/v1/models"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {relay.secret}"}) as session:
        async with session.get(url, ssl=context) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(url)
    await gateway.close()
