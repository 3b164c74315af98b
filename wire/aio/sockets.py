"""WebSocket settings that all hops share, and what of the protocol our links write themselves."""

from __future__ import annotations

import logging
import socket
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.server import ServerConnection

from wire.messages import MAX_FRAME_BYTES

WebSocket = ClientConnection | ServerConnection
CLOSE_TIMEOUT_S = 1.0
TEXT, BINARY = 0x81, 0x82
"""First bytes of whole frames: final, and of this kind."""
UNSENT_LOW_BYTES = 64 << 10
_SHORT = tuple(bytes((TEXT, num_bytes)) for num_bytes in range(126))
QUIET = logging.getLogger("websockets.foredraft")
"""The library's log. It tells of failed handshakes with tracebacks, and of headers, the secret's among them, at its
debug level; what matters of both is told by our own loggers."""
QUIET.setLevel(logging.CRITICAL)


def link_options() -> dict[str, Any]:
    """Settings that all hops share: one size limit, no compression (frames are tiny), our own keepalive and log."""
    return {
        "compression": None,
        "max_size": MAX_FRAME_BYTES,
        "max_queue": 16,
        "ping_interval": None,
        "close_timeout": CLOSE_TIMEOUT_S,
        "logger": QUIET,
    }


def set_nodelay(websocket: WebSocket) -> None:
    """Frames are small and urgent; waiting to fill a segment costs a delayed acknowledgement, about 40 ms.

    Nor may megabytes of a big frame wait in the kernel, where nothing can overtake them.
    """
    sock: socket.socket | None = websocket.transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_LOW_BYTES)


def server_header(num_bytes: int, opcode: int = TEXT) -> bytes:
    """What stands before an unmasked frame of so many bytes (RFC 6455, section 5.2)."""
    if num_bytes < 126:
        return _SHORT[num_bytes] if opcode == TEXT else bytes((opcode, num_bytes))
    if num_bytes < 1 << 16:
        return bytes((opcode, 126)) + num_bytes.to_bytes(2, "big")
    return bytes((opcode, 127)) + num_bytes.to_bytes(8, "big")
