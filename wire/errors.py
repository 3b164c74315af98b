"""The error tree of the wire.

WireError
├── ProtocolError        the peer sent something malformed: `field`, `value` and the limit are named
│   ├── FrameTooLarge    a frame above the agreed size, refused before it is sent or after it is received
│   └── VersionMismatch  the peers speak different protocol versions
├── PeerMismatch         two nodes that cannot serve together: tokenizer, vocabulary or revision differ
├── QueueFull            the peer does not read as fast as we send; nothing was queued
├── Refused              the peer turned us away for good: wrong secret, mismatch, duplicate
├── ListenFailed         the address to listen on cannot be had
└── LinkLost             the link died: silence, reset, close by the peer; the message says which
"""

from __future__ import annotations

MAX_REASON_CHARS = 1000


class WireError(Exception):
    """Anything that went wrong between two peers."""


class ProtocolError(WireError):
    """The peer sent something that no correct peer sends."""


class FrameTooLarge(ProtocolError):
    """A frame above the size that all hops agreed on.

    Args:
        what: the message type, or "frame" where it is not known.
        size_bytes: its size.
        limit_bytes: the agreed limit.
    """

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{what} has {size_bytes} bytes, above the limit of {limit_bytes} bytes a frame")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class VersionMismatch(ProtocolError):
    """The peers speak different versions of the protocol."""


class PeerMismatch(WireError):
    """A draft and a verify node that cannot serve together; the message names both sides."""


class Refused(WireError):
    """The peer turned us away, and trying again as we are would not help."""


class ListenFailed(WireError):
    """The address to listen on cannot be had: in use, or not ours."""


class QueueFull(WireError):
    """The peer does not read as fast as we send."""


class LinkLost(WireError):
    """The link is gone; a reconnect may help."""


def in_words(exc: BaseException) -> str:
    """Kind and text of an error of any library's, as long as a peer may be told: a compiler's fill pages."""
    return f"{type(exc).__name__}: {exc}"[:MAX_REASON_CHARS]
