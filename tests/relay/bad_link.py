"""A WebSocket proxy that doubles frames and lets later ones overtake."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import orjson
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

HANDSHAKE = {"hello", "welcome"}


class BadLink:
    """Stands before a relay, as an async context manager; `url` is its own address.

    Args:
        url, secret: of the relay.
        double, overtake: chances of a frame to come twice, and to come behind the next.
        kinds: of frames that this happens to; empty for all but those of the handshake and parts of big frames.
    """

    def __init__(
        self, url: str, secret: str, *, double: float, overtake: float = 0.0, kinds: tuple[str, ...] = (), seed: int = 0
    ) -> None:
        self.num_doubled = self.num_overtaken = 0
        self._relay = url
        self._headers = {"Authorization": f"Bearer {secret}"}
        self._double, self._overtake, self._kinds = double, overtake, kinds
        self._rng = random.Random(seed)

    async def __aenter__(self) -> BadLink:
        self._server = await serve(self._carry, "127.0.0.1", 0, compression=None, ping_interval=None)
        self.url = f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _carry(self, near: Any) -> None:
        async with connect(
            self._relay, additional_headers=self._headers, compression=None, ping_interval=None, proxy=None
        ) as far:
            await asyncio.gather(self._pump(near, far), self._pump(far, near))

    async def _pump(self, source: Any, sink: Any) -> None:
        held: list[str] = []
        try:
            async for frame in source:
                bad = self._is_bad(frame)
                if bad and not held and self._rng.random() < self._overtake:
                    held.append(frame)
                    continue
                doubled = bad and self._rng.random() < self._double
                self.num_doubled += doubled
                self.num_overtaken += len(held)
                for each in [frame] * (1 + doubled) + held:
                    await sink.send(each)
                held.clear()
        except ConnectionClosed:
            pass
        finally:
            await sink.close()

    def _is_bad(self, frame: str | bytes) -> bool:
        if isinstance(frame, bytes):
            return False
        kind = orjson.loads(frame)["type"]
        return kind in self._kinds if self._kinds else kind not in HANDSHAKE
