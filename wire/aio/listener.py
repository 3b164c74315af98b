"""The accepting end of links: listens, checks the secret at the upgrade, hands each WebSocket on.

Nothing is kept of a peer before its secret is found right. The secret travels in the Authorization header only: what
stands in a URL ends up in logs. Requests that are no upgrade may get a page: health, metrics.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from wire.aio.quiet import RateLimited
from wire.aio.sockets import CLOSE_TIMEOUT_S, link_options
from wire.errors import ListenFailed

log = logging.getLogger(__name__)
OnWebSocket = Callable[[ServerConnection, object], Awaitable[None]]
"""Called in a task of its own for each peer that is authenticated, with what `Authenticate` made of its secret; the
WebSocket is closed when it returns."""
Authenticate = Callable[[str], object | None]
"""Who comes with this secret; None for nobody. Must take as long for a wrong secret as for a right one."""
NO_SECRET = "-"


@dataclass(frozen=True, slots=True)
class Page:
    """An answer to a request over plain HTTP."""

    body: str
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Pages = Callable[[str, object | None], Page | None]
"""The page at a path, for whom the request's secret shows (None: nobody); None where there is no such page."""


class Listener:
    """Listens on one address.

    Args:
        open_timeout_s: how long a peer may take for its HTTP upgrade.
        pages: see `Pages`.
        ssl_context: for wss://.
    """

    def __init__(
        self,
        on_websocket: OnWebSocket,
        *,
        authenticate: Authenticate,
        open_timeout_s: float,
        pages: Pages = lambda path, identity: None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._on_websocket = on_websocket
        self._authenticate = authenticate
        self._open_timeout_s = open_timeout_s
        self._pages = pages
        self._ssl_context = ssl_context
        self._server: Server | None = None
        self._identities: weakref.WeakKeyDictionary[ServerConnection, object] = weakref.WeakKeyDictionary()
        self._refusals = RateLimited(log, logging.WARNING)
        self.refusing = False
        """Turn everybody away, with 503: we are about to end."""

    async def listen(self, host: str, port: int) -> int:
        """Start; the port that is listened on (port 0 takes a free one).

        Raises:
            ListenFailed: the address cannot be had.
        """
        try:
            self._server = await serve(
                lambda websocket: self._on_websocket(websocket, self._identities[websocket]),
                host,
                port,
                process_request=self._process_request,
                ssl=self._ssl_context,
                open_timeout=self._open_timeout_s,
                server_header=None,
                **link_options(),
            )
        except OSError as exc:
            # asyncio puts words of its own around the system's.
            reason = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror or str(exc)
            raise ListenFailed(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from exc
        return int(next(iter(self._server.sockets)).getsockname()[1])

    async def close(self, reason: str) -> None:
        """Stop listening and close all links with code 1001; takes at most two close timeouts."""
        self.refusing = True
        if self._server is None:
            return
        self._server.close(code=1001, reason=reason)
        try:
            async with asyncio.timeout(2 * CLOSE_TIMEOUT_S):
                await self._server.wait_closed()
        except TimeoutError:
            log.warning("some peers did not close in time; they are cut off")

    def _process_request(self, websocket: ServerConnection, request: Request) -> Response | None:
        values = request.headers.get_all("Authorization")
        scheme, _, given = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        identity = self._authenticate(given.strip() if scheme.lower() == "bearer" else NO_SECRET)
        if "Upgrade" not in request.headers:
            page = self._pages(request.path.partition("?")[0], identity)
            if page is not None:
                response = websocket.respond(HTTPStatus(page.status), page.body)
                del response.headers["Content-Type"]
                response.headers["Content-Type"] = page.content_type
                return response
        if self.refusing:
            return websocket.respond(HTTPStatus.SERVICE_UNAVAILABLE, "shutting down\n")
        if identity is not None:
            self._identities[websocket] = identity
            return None
        host = websocket.remote_address[0] if websocket.remote_address else "somewhere"
        self._refusals(str(host), "< peer at %s refused: no secret, or a wrong one", host)
        response = websocket.respond(HTTPStatus.UNAUTHORIZED, "Authorization: Bearer SECRET is required\n")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response
