"""A bare WebSocket echo on the library that the relay uses: what the relay is measured against."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from wire.aio.sockets import link_options, set_nodelay


async def echo(websocket: ServerConnection) -> None:
    """Send back what comes."""
    set_nodelay(websocket)
    with contextlib.suppress(ConnectionClosed):
        while True:
            await websocket.send(await websocket.recv(decode=False), text=True)


async def main() -> None:
    """Listen on a free port, say which, and serve until SIGTERM."""
    server = await serve(echo, "127.0.0.1", 0, **link_options())
    port = next(iter(server.sockets)).getsockname()[1]
    print(json.dumps({"ready": True, "port": port}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    if "--uvloop" in sys.argv:
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())
