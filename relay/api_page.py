"""The status page over HTTP: its files, and the events that keep it up to date.

    GET /                       to /status/
    GET /status/, /status/FILE  the page; it holds nothing but itself, so it needs no credential
    GET /status/events          server-sent events; needs the admin credential
        ?session=ID             also the rounds of this session

The page asks for the credential and sends it in a header; it is in no address and no cookie.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from relay.api_auth import HttpAccess
from relay.api_rounds import PARTS
from relay.api_status import StatusBoard
from relay.api_stream import event, open_stream

UPDATE_S = 1.0
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Read once, when the module is imported: no disk is touched on the event loop.
FILES = {path.name: path.read_bytes() for path in (Path(__file__).parent / "page").iterdir() if path.suffix in TYPES}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class StatusPage:
    """Handlers of the page."""

    def __init__(self, board: StatusBoard, access: HttpAccess) -> None:
        self.board = board
        self.access = access

    def routes(self) -> list[web.RouteDef]:
        """For the application."""
        return [
            web.get("/", self._to_page),
            web.get("/status", self._to_page),
            web.get("/status/", self._file),
            web.get("/status/events", self._events, allow_head=False),
            web.get("/status/{file}", self._file),
        ]

    async def _to_page(self, request: web.Request) -> web.Response:
        # Relative, so that it is right behind a proxy that serves the relay under a path of its own.
        raise web.HTTPFound("status/")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("file", "index.html")
        if name not in FILES:
            raise web.HTTPNotFound
        content_type = TYPES[Path(name).suffix]
        return web.Response(body=FILES[name], content_type=content_type, charset="utf-8", headers=PAGE_HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """A snapshot each UPDATE_S until the viewer goes away, which cancels this handler, or its secret is revoked."""
        header = request.headers.get("Authorization")
        self.access.credential(header, "admin")
        session = request.query.get("session", "")
        loop = asyncio.get_running_loop()
        response = await open_stream(request)
        self.board.join()
        try:
            watch = self.board.watch(session) if session else None
            try:
                num_seen = 0
                while self.access.has(header, "admin"):
                    update: dict[str, Any] = self.board.snapshot(loop.time())
                    if watch is not None:
                        rounds = [seen.as_json() for seen in watch.since(num_seen)]
                        num_seen = watch.num_seen
                        update["rounds"] = {"session": session, "parts": PARTS, "new": rounds}
                    await response.write(event(update))
                    await asyncio.sleep(UPDATE_S)
                return response
            finally:
                if watch is not None:
                    self.board.unwatch(session)
        finally:
            self.board.leave()
