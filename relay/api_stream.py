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
LINE_ENDS = {char.encode(): f"\\u{ord(char):04x}".encode() for char in "\x85\u2028\u2029"}
"""Those that JSON lets stand in a string, as they are and escaped."""
END = b"data: [DONE]\n\n"


def comment(places: Iterable[int]) -> bytes:
    """What is said while nothing happens; `places` in line are of answers that wait for the target."""
    shown = ", ".join(map(str, sorted(places)))
    return f": place {shown} in line\n\n".encode() if shown else b": still here\n\n"


def event(data: Any) -> bytes:
    """One event, on what is one line for every reader: many clients' libraries split lines as Unicode does."""
    line = orjson.dumps(data)
    for raw, escaped in LINE_ENDS.items():
        line = line.replace(raw, escaped)
    return b"data: " + line + b"\n\n"


async def open_stream(request: web.Request, **headers: str) -> web.StreamResponse:
    """Send the response's head."""
    response = web.StreamResponse(headers=HEADERS | headers)
    await response.prepare(request)
    request[STREAM_IS_OPEN] = True
    return response
