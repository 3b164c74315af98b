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
QUIET = logging.getLogger("websockets.foredraft")
"""The library's log. It tells of failed handshakes with tracebacks, and of headers, the secret's among them, at its
debug level; what matters of both is told by our own loggers."""
QUIET.setLevel(logging.CRITICAL)


def link_options() -> dict[str, Any]:
    """Settings that all hops share: one size limit, no compression (frames are tiny), our own keepalive."""
    return {
        "compression": None,
        "max_size": MAX_FRAME_BYTES,
        "max_queue": 16,
        "ping_interval": None,
        "close_timeout": CLOSE_TIMEOUT_S,
    }


def set_nodelay(websocket: WebSocket) -> None:
    """Frames are small and urgent; waiting to fill a segment costs a delayed acknowledgement, about 40 ms."""
    sock: socket.socket | None = websocket.transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def text_header(num_bytes: int) -> bytes:
    """What stands before an unmasked text frame of so many bytes (RFC 6455, section 5.2)."""
    if num_bytes < 126:
        return bytes((0x81, num_bytes))
    if num_bytes < 1 << 16:
        return b"\x81\x7e" + num_bytes.to_bytes(2, "big")
    return b"\x81\x7f" + num_bytes.to_bytes(8, "big")
