"""Asks the gateway as a plain HTTP client does."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from tests.e2e.conftest import SECRET

CHAT: dict[str, Any] = {"model": "scripted-verify", "messages": [{"role": "user", "content": "What is baked?"}]}
PROMPT: dict[str, Any] = {"model": "scripted-verify", "prompt": "Q: "}


async def post(pipeline: Any, path: str, body: Any, secret: str = SECRET) -> tuple[int, Any]:
    """Status and JSON of a plain POST."""
    async with aiohttp.ClientSession() as session, session.post(
        pipeline.url + path, data=body if isinstance(body, bytes) else json.dumps(body),
        headers={"Authorization": f"Bearer {secret}"},
    ) as response:  # fmt: skip
        return response.status, await response.json(content_type=None)


async def chunks(pipeline: Any, path: str, **body: Any) -> list[Any]:
    """The events of a stream, as JSON; the end marker as the string it is."""
    async with aiohttp.ClientSession() as session, session.post(
        pipeline.url + path, json={"stream": True, **body}, headers={"Authorization": f"Bearer {SECRET}"}
    ) as response:  # fmt: skip
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        lines = [line.strip().decode() async for line in response.content]
    assert not any(lines[1::2]), "every event is one line and an empty one"
    events = [line.removeprefix("data: ") for line in lines[::2]]
    return [event if event == "[DONE]" else json.loads(event) for event in events]
