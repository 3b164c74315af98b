"""What the shells of both nodes have in common."""

from __future__ import annotations

import asyncio
from typing import Any

from wire.aio.shell import NodeShell
from wire.messages import Draining, Message


class SlowLink:
    """Keeps what is sent, and has written it when it is told so."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.written = asyncio.Event()

    def send(self, message: Message) -> None:
        self.sent.append(message)

    async def flush(self) -> None:
        await self.written.wait()


def linked(node: NodeShell) -> SlowLink:
    link: Any = SlowLink()
    node.on_link(link)
    return link


async def test_a_node_that_drains_tells_each_relay_that_it_is_linked_to() -> None:
    """A link may break in the middle of it, and the relay that is dialled then would send new sessions."""
    node = NodeShell()
    first = linked(node)
    node.settle(1)
    draining = asyncio.create_task(node.drain(60.0, "told to"))
    await asyncio.sleep(0)
    assert first.sent == [Draining(grace_s=60.0, reason="told to")]
    second = linked(node)
    (told,) = second.sent
    assert isinstance(told, Draining)
    assert told.reason == "told to"
    assert 0 < told.grace_s <= 60.0
    second.written.set()
    node.settle(0)
    await draining


async def test_a_drained_node_has_sent_what_was_queued() -> None:
    """The end of an answer is in the queue when the last session ends."""
    node = NodeShell()
    link = linked(node)
    draining = asyncio.create_task(node.drain(60.0, "told to"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not draining.done()
    link.written.set()
    await asyncio.wait_for(draining, 10.0)
