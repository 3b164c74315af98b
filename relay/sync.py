"""The streaming client for callers without an event loop.

    for event in stream("ws://127.0.0.1:8765", secret=secret, messages=[("user", "Why is the sky blue?")]):
        if isinstance(event, Delta):
            print(event.text, end="")

The loop runs in a thread of its own as long as the iterator does. Leaving it early (`close()`, `break`) cancels the
request.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import aclosing, suppress
from typing import Any

from relay.client import Delta, Event, StreamClient

END = None


def stream(url: str, *, secret: str, client: dict[str, Any] | None = None, **request: Any) -> Iterator[Event]:
    """As `StreamClient.stream`, over a link of its own.

    Args:
        client: further arguments of `StreamClient`.
        request: arguments of `StreamClient.stream`.

    Raises:
        WireError: as `StreamClient` does.
    """
    events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
    running: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = queue.SimpleQueue()

    async def pump() -> None:
        task = asyncio.current_task()
        assert task is not None
        running.put((asyncio.get_running_loop(), task))
        async with (
            StreamClient(url, secret=secret, **(client or {})) as streaming,
            aclosing(streaming.stream(**request)) as answer,  # type: ignore[type-var]
        ):
            async for event in answer:
                events.put(event)

    def work() -> None:
        try:
            asyncio.run(pump())
        except BaseException as exc:
            events.put(exc)
        else:
            events.put(END)

    thread = threading.Thread(target=work, name="foredraft client", daemon=True)
    thread.start()
    loop, task = running.get()
    try:
        while (event := events.get()) is not END:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        if thread.is_alive():
            with suppress(RuntimeError):  # the loop has ended by itself meanwhile
                loop.call_soon_threadsafe(task.cancel)
            thread.join()


def ask(url: str, *, secret: str, **request: Any) -> str:
    """The whole text of an answer; see `stream`."""
    return "".join(event.text for event in stream(url, secret=secret, **request) if isinstance(event, Delta))
