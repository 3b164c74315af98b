"""What is told of a link: why it ended and whose fault that was, and the address without what is secret in it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from websockets.exceptions import ConnectionClosed

from wire.errors import WireError


def closed_by(exc: ConnectionClosed) -> str:
    """Who closed a WebSocket, with what words: whose close frame came first decides."""
    if exc.rcvd is not None and exc.rcvd_then_sent is not False:
        return f"closed by the peer with code {exc.rcvd.code} ({exc.rcvd.reason or 'no reason given'})"
    if exc.sent is not None:
        return f"closed by us with code {exc.sent.code} ({exc.sent.reason or 'no reason given'})"
    return f"the connection was cut ({exc.__cause__ or 'end of stream'})"


def first(group: BaseExceptionGroup[Any]) -> BaseException:
    """The first leaf of an exception group, one of ours before those of the library."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        exc = waiting.pop(0)
        if isinstance(exc, BaseExceptionGroup):
            waiting = [*exc.exceptions, *waiting]
        else:
            leaves.append(exc)
    return next((leaf for leaf in leaves if isinstance(leaf, WireError)), leaves[0])


def without_secrets(url: str) -> str | None:
    """The address as it may stand in logs, without its query; None if it holds credentials, or is no URL at all."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    return None if "@" in parts.netloc else urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
