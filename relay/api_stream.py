"""Server-sent events over aiohttp: one JSON object an event, comments while nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import orjson
from aiohttp import web

T = TypeVar("T")
SILENCE_S = 10.0
"""Half of the shortest idle limit that is common among proxies is more than this."""
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-store",
    "X-Accel-Buffering": "no",
}
STREAM_IS_OPEN = web.RequestKey("stream_is_open", bool)
COMMENT = b": still here\n\n"
END = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def open_stream(request: web.Request, **headers: str) -> web.StreamResponse:
    """Send the response's head."""
    response = web.StreamResponse(headers=HEADERS | headers)
    await response.prepare(request)
    request[STREAM_IS_OPEN] = True
    return response


async def with_comments(response: web.StreamResponse, events: AsyncIterator[T]) -> AsyncIterator[T]:
    """`events`, with a comment sent to the reader whenever none has come for SILENCE_S."""
    iterator = aiter(events)
    while True:
        waiting = asyncio.ensure_future(anext(iterator))
        try:
            while not (await asyncio.wait([waiting], timeout=SILENCE_S))[0]:
                await response.write(COMMENT)
            item = waiting.result()
        except StopAsyncIteration:
            return
        finally:
            waiting.cancel()
        yield item
