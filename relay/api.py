"""The OpenAI-compatible API of the relay, on aiohttp.

    POST /v1/chat/completions, /v1/completions    whole, or as server-sent events
    GET  /v1/models                               the models of the connected verify nodes
    POST /tokenize, /detokenize                   answered by a verify node
    GET  /healthz, /readyz, /metrics              as on the relay's other port; metrics for an admin's secret
    GET  /status/                                 the status page, see `api_page`

Requests become sessions of the relay, as a streaming client's do (`api_sessions`). When an HTTP client goes away its
handler is cancelled, and with it its sessions, on both nodes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel

from relay.api_answers import ChatForm, Collected, CompletionForm, Form
from relay.api_auth import HttpAccess
from relay.api_errors import ApiError, from_wire
from relay.api_log import HTTP_LOG, REFUSED
from relay.api_models import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
    parse,
)
from relay.api_page import StatusPage
from relay.api_sessions import Answer, Exchange, LocalClient
from relay.api_status import StatusBoard
from relay.api_stream import END, SILENCE_S, STREAM_IS_OPEN, comment, event, open_stream
from relay.credentials import Credential
from relay.errors import RequestFailed
from relay.server import RelayServer
from relay.status import page
from wire.errors import ListenFailed, WireError
from wire.messages import MAX_FRAME_BYTES, Done, OpenSession, TextDelta, Tokenize, Tokenized

log = logging.getLogger(__name__)

FIRST_EVENT_S = 2.0
"""How long the head of a stream waits for its first event: a request that is refused at once gets a proper status."""
SHUTDOWN_S = 2.0
MAX_WHOLE_LOGPROBS = 1 << 17
"""Most log-probabilities of a response that is not streamed: so many take 80 MB while it is made."""
CREDENTIAL = web.RequestKey("credential", Credential)
M = TypeVar("M", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """The HTTP side of one relay.

    Args:
        server: must be listening before `start`.
    """

    def __init__(self, server: RelayServer) -> None:
        self.server = server
        self.access = HttpAccess(server.access)
        self.client = LocalClient(server)
        self.port = 0
        self.app = web.Application(client_max_size=MAX_FRAME_BYTES, middlewares=[_errors, self._authorize])
        self.app.on_response_prepare.append(_headers)
        self.app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                *(web.get(path, self._health) for path in ("/healthz", "/readyz", "/metrics")),
            ]
        )
        self.app.add_routes(StatusPage(StatusBoard(server), self.access).routes())
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen, with the relay's own certificate if it has one.

        Raises:
            ListenFailed: the address cannot be had.
        """
        # An abandoned request must not go on: its handler is cancelled when its client is gone.
        self._runner = web.AppRunner(
            self.app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S, handle_signals=False,
            logger=HTTP_LOG,
        )  # fmt: skip
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=self.server.access.ssl_context)
        try:
            await site.start()
        except OSError as exc:
            text = f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --http-host or --http-port"
            raise ListenFailed(text) from exc
        self.port = int(self._runner.addresses[0][1])
        log.info("serving HTTP on %s:%d", host, self.port)

    async def close(self) -> None:
        """Have answers under way told that it is over, for which there are SHUTDOWN_S, then stop."""
        self.client.end("the relay is shutting down")
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith(("/v1/", "/tokenize", "/detokenize")):
            credential = self.access.credential(request.headers.get("Authorization"), "client", "admin")
            # Before the body is read: who is above a limit sends it for nothing. And only what is read counts: a header
            # alone could use up the credential's bytes for years.
            num_bytes = request.content_length or 0
            self.access.admit(credential, min(num_bytes, MAX_FRAME_BYTES), asyncio.get_running_loop().time())
            if num_bytes > MAX_FRAME_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_FRAME_BYTES, num_bytes)
            request[CREDENTIAL] = credential
        return await handler(request)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, ChatRequest)
        return await self._generate(request, asked, asked.requests, ChatForm, "messages")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await self._read(request, CompletionRequest)
        return await self._generate(request, asked, asked.requests, CompletionForm, "prompt")

    async def _read(self, request: web.Request, kind: type[M]) -> M:
        try:
            body = await request.read()
        except web.RequestPayloadError as exc:
            text = f"the body cannot be read: {' '.join(str(exc).split())}"
            raise ApiError(400, text, code="invalid_body") from None
        # In chunks or compressed, its size was not known when it was let in.
        unknown = max(0, len(body) - (request.content_length or 0))
        self.access.charge(request[CREDENTIAL], 0, unknown, asyncio.get_running_loop().time())
        return parse(kind, body)

    async def _generate(
        self,
        request: web.Request,
        asked: Generation,
        requests: Callable[[], list[OpenSession]],
        form_of: type[Form],
        prompt_field: str,
    ) -> web.StreamResponse:
        asked.check()
        try:
            sessions = requests()
            self.access.charge(request[CREDENTIAL], len(sessions) - 1, 0, asyncio.get_running_loop().time())
            with self.client.exchange(sessions, request[CREDENTIAL]) as exchange:
                exchange.on_overflow = lambda: _cut(request)
                log.info("%s: %d sessions for %s", request.path, len(sessions), asked.user or "a client")
                form = form_of(
                    answer_id=uuid.uuid4().hex,
                    model=asked.model or exchange.model,
                    fingerprint=exchange.fingerprint,
                    created=int(time.time()),
                    include_usage=asked.include_usage,
                    num_per_prompt=asked.num_answers,
                )
                answers = [Collected(session, exchange.opened_at, kept=not asked.stream) for session in sessions]
                if asked.stream:
                    return await self._stream(request, exchange, form, answers, with_sources=asked.return_sources)
                num = 0
                while not exchange.over:
                    if (item := await exchange.next()) is not None:
                        _take(answers[item[0]], item[1])
                    num = sum(len(answer.logprobs) for answer in answers) * (1 + (asked.num_logprobs or 0))
                    if num > MAX_WHOLE_LOGPROBS:
                        text = f"logprobs of these answers are above {MAX_WHOLE_LOGPROBS}"
                        raise ApiError(
                            400, f"{text}: stream them, or ask for less", param="logprobs", code="response_too_large"
                        )
                respond = partial(form.response, answers, _figures(exchange, answers))
                # Log-probabilities can be half a second's work, which frames need not wait for.
                return _json(await asyncio.to_thread(respond) if num else respond())
        except WireError as exc:
            raise from_wire(exc, prompt_field=prompt_field) from exc

    async def _stream(
        self, request: web.Request, exchange: Exchange, form: Form, answers: list[Collected], *, with_sources: bool
    ) -> web.StreamResponse:
        """Stream the answers; an error after the head is an event of its own, and the end."""
        # A refusal comes at once and gets its status; a long prefill must not keep the head back.
        item = await exchange.next(FIRST_EVENT_S)
        response = await open_stream(request)
        for index in range(len(answers)):
            if (opening := form.opening(index)) is not None:
                await response.write(event(opening))
        loop = asyncio.get_running_loop()
        said_at = loop.time()
        try:
            while True:
                said = b""
                if item is not None and (chunk := _chunk(form, answers, item, exchange, with_sources=with_sources)):
                    said = event(chunk)
                elif loop.time() >= said_at + SILENCE_S:
                    # Also while tokens come that show nothing: hidden ones, or the beginning of a stop string.
                    said = comment(exchange.places.values())
                if said:
                    await response.write(said)
                    said_at = loop.time()
                if exchange.over:
                    break
                item = await exchange.next(max(0.0, said_at + SILENCE_S - loop.time()))
        except WireError as exc:
            await response.write(event(from_wire(exc, prompt_field="prompt").body()))
        else:
            if form.include_usage:
                await response.write(event(form.usage_chunk(answers)))
            await response.write(END)
        await response.write_eof()
        return response

    async def _health(self, request: web.Request) -> web.Response:
        """The relay's own pages, the same as on its other port."""
        is_admin = self.access.has(request.headers.get("Authorization"), "admin")
        shown = page(self.server, request.path, may_see_metrics=is_admin)
        assert shown is not None, "these paths have pages"
        return web.Response(text=shown.body, status=shown.status, headers={"Content-Type": shown.content_type})

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": self._served()})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for model in self._served():
            if model["id"] == name:
                return _json(model)
        raise ApiError(404, f"no verify node serves {name}", param="model", code="model_not_found")

    def _served(self) -> list[dict[str, Any]]:
        """The models, each once, with the nodes that serve it."""
        models: dict[str, dict[str, Any]] = {}
        for peer in self.server.router.peers.values():
            if peer.hello.role != "verify":
                continue
            model = models.setdefault(
                peer.model.name,
                {"id": peer.model.name, "object": "model", "created": 0, "owned_by": "foredraft",
                 "max_model_len": peer.model.context_length, "foredraft": {"verify_nodes": []}},
            )  # fmt: skip
            model["foredraft"]["verify_nodes"].append({"name": peer.hello.name, "region": peer.hello.region})
        return list(models.values())

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = await self._read(request, TokenizeRequest)
        answer = await self._ask(request, asked.requests(), "prompt" if asked.prompt is not None else "messages")
        tokens = answer.tokens
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": answer.context_length})

    async def _detokenize(self, request: web.Request) -> web.Response:
        asked = await self._read(request, DetokenizeRequest)
        return _json({"prompt": (await self._ask(request, asked.requests(), "tokens")).text})

    async def _ask(self, request: web.Request, requests: list[Tokenize], prompt_field: str) -> Tokenized:
        try:
            with self.client.exchange(requests, request[CREDENTIAL]) as exchange:
                item = await exchange.next()
                assert item is not None, "it was waited for"
                assert isinstance(item[1], Tokenized), "what a Tokenize is answered with"
                return item[1]
        except WireError as exc:
            raise from_wire(exc, prompt_field=prompt_field) from exc


def _take(answer: Collected, message: Answer) -> None:
    match message:
        case TextDelta():
            answer.add(message, asyncio.get_running_loop().time())
        case Done():
            if message.finish_reason == "cancelled":
                raise RequestFailed("draining", "the verify node gave the answer up")
            answer.done = message


def _chunk(
    form: Form, answers: list[Collected], item: tuple[int, Answer], exchange: Exchange, *, with_sources: bool
) -> dict[str, Any] | None:
    """What the stream says about a message, if anything."""
    index, message = item
    _take(answers[index], message)
    match message:
        case TextDelta():
            return form.piece(index, message, answers[index], with_sources=with_sources)
        case Done():
            return form.closing(index, message, answers[index].figures(exchange.pairings[index]))
    return None


def _figures(exchange: Exchange, answers: list[Collected]) -> list[dict[str, Any]]:
    return [answer.figures(pairing) for answer, pairing in zip(answers, exchange.pairings, strict=True)]


def _json(data: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(data), status=status, content_type="application/json", headers=headers)


def _cut(request: web.Request) -> None:
    """End the connection of a client that does not read."""
    if request.transport is not None:
        request.transport.abort()


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's form; a bug of ours is told as one, without its details."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ApiError as exc:
        error = exc
    except web.HTTPException as exc:
        if exc.status < 400:
            raise
        limit = f"the body is above the limit of {MAX_FRAME_BYTES} bytes" if exc.status == 413 else exc.reason
        error = ApiError(exc.status, f"{request.method} {request.path}: {limit}")
        headers |= {name: value for name, value in exc.headers.items() if name == "Allow"}
    except ConnectionResetError:
        # The client is gone; aiohttp knows what to do.
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        if STREAM_IS_OPEN in request:
            # An error response would end up inside the stream. A cut tells the client that something is missing.
            _cut(request)
        error = ApiError(500, "internal error of the relay; its log has the details", code="internal_error")
    if error.status in (401, 403):
        REFUSED(str(request.remote), "< a request from %s refused: %s", request.remote, error.message)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return _json(error.body(), status=error.status, headers=headers)


async def _headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "foredraft"
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.setdefault("Cache-Control", "no-store")
