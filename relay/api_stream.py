"""Server-sent events over aiohttp: one JSON object an event, comments while nothing happens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import web

SILENCE_S = 10.0
"""After so long without an event a comment is sent: idle limits of proxies are rarely below 30 s."""
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-store",
    "X-Accel-Buffering": "no",
}
STREAM_IS_OPEN = web.RequestKey("stream_is_open", bool)
END = b"data: [DONE]\n\n"


def comment(places: Iterable[int]) -> bytes:
    """What is said while nothing happens; `places` in line are of answers that wait for the target."""
    shown = ", ".join(map(str, sorted(places)))
    return f": place {shown} in line\n\n".encode() if shown else b": still here\n\n"


def event(data: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def open_stream(request: web.Request, **headers: str) -> web.StreamResponse:
    """Send the response's head."""
    response = web.StreamResponse(headers=HEADERS | headers)
    await response.prepare(request)
    request[STREAM_IS_OPEN] = True
    return response
