"""The accepting end of links: listens, checks the shared secret at the upgrade, hands each WebSocket on.

Nothing is kept of a peer before its secret is found right. The secret travels in the Authorization header only: what
stands in a URL ends up in logs.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from wire.aio.link import CLOSE_TIMEOUT_S, link_options
from wire.errors import ListenFailed

log = logging.getLogger(__name__)
# The library tells of failed handshakes with tracebacks, and of headers at its debug level; both are told here instead.
_quiet = logging.getLogger("websockets.foredraft")
_quiet.setLevel(logging.CRITICAL)

OnWebSocket = Callable[[ServerConnection], Awaitable[None]]
"""Called in a task of its own for each peer that is authenticated; the WebSocket is closed when it returns."""


class Listener:
    """Listens on one address.

    Args:
        open_timeout_s: how long a peer may take for its HTTP upgrade.
    """

    def __init__(self, on_websocket: OnWebSocket, *, secret: str, open_timeout_s: float) -> None:
        self._on_websocket = on_websocket
        self._secret = secret.encode()
        self._open_timeout_s = open_timeout_s
        self._server: Server | None = None
        self.refusing = False
        """Turn everybody away, with 503: we are about to end."""

    async def listen(self, host: str, port: int) -> int:
        """Start; the port that is listened on (port 0 takes a free one).

        Raises:
            ListenFailed: the address cannot be had.
        """
        try:
            self._server = await serve(
                self._on_websocket,
                host,
                port,
                process_request=self._authenticate,
                open_timeout=self._open_timeout_s,
                server_header=None,
                logger=_quiet,
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

    def _authenticate(self, websocket: ServerConnection, request: Request) -> Response | None:
        if self.refusing:
            return websocket.respond(HTTPStatus.SERVICE_UNAVAILABLE, "shutting down\n")
        values = request.headers.get_all("Authorization")
        scheme, _, given = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        known = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._secret)
        if scheme.lower() == "bearer" and known:
            return None
        log.warning("< peer at %s refused: no secret, or a wrong one", websocket.remote_address)
        response = websocket.respond(HTTPStatus.UNAUTHORIZED, "Authorization: Bearer SECRET is required\n")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response
