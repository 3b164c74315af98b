"""A relay double: the accepting end of a link in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from websockets.asyncio.server import ServerConnection

from wire.aio.link import Link
from wire.aio.listener import Listener
from wire.connection import Connection, PeerHello
from wire.errors import WireError
from wire.messages import MAX_FRAME_BYTES, PROTOCOL_VERSION, Hello, Welcome

SECRET = "correct-horse-battery"


@dataclass
class RelayDouble:
    """Accepts every peer under the given terms, or refuses with a code."""

    ping_interval_s: float = 5.0
    ping_timeout_s: float = 5.0
    refuse_code: str = ""
    num_refused: int = 0
    max_queued_bytes: int = 8 << 20
    on_write: Callable[[bytes, float, float], bytes] | None = None
    port: int = 0
    links: list[Link] = field(default_factory=list)
    frames: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    ended: asyncio.Queue[WireError] = field(default_factory=asyncio.Queue)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def serve(self, websocket: ServerConnection, identity: object) -> None:
        loop = asyncio.get_running_loop()
        connection = Connection.accepting(now=loop.time(), handshake_timeout_s=1.0, serving="no model")
        link = Link(websocket, connection, on_write=self.on_write, max_queued_bytes=self.max_queued_bytes)
        try:
            event = await link.handshake()
            assert isinstance(event, PeerHello)
            if self.refuse_code:
                self.num_refused += 1
                await link.refuse(self.refuse_code, "not today")
                return
            await link.accept(
                Welcome(
                    protocol=PROTOCOL_VERSION,
                    peer="relay",
                    max_frame_bytes=MAX_FRAME_BYTES,
                    ping_interval_s=self.ping_interval_s,
                    ping_timeout_s=self.ping_timeout_s,
                )
            )
            self.links.append(link)
            await link.run(lambda kind, session, frame, now: self.frames.put_nowait(frame))
        except WireError as exc:
            self.ended.put_nowait(exc)
            await link.close(1011, str(exc))


@pytest.fixture
def secret() -> str:
    return SECRET


@pytest.fixture
def hello() -> Hello:
    return Hello(protocol=PROTOCOL_VERSION, role="client", name="c1")


@pytest.fixture
async def relay() -> AsyncIterator[RelayDouble]:
    double = RelayDouble()
    listener = Listener(
        double.serve, authenticate=lambda secret: "somebody" if secret == SECRET else None, open_timeout_s=1.0
    )
    double.port = await listener.listen("127.0.0.1", 0)
    yield double
    await listener.close("the test is over")
    left = [task for task in asyncio.all_tasks() if task.get_name().startswith("link ")]
    assert not left, f"left over: {left}"
