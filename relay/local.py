"""A peer inside the relay's own process: what the server holds in place of a socket's link."""

from __future__ import annotations

from collections.abc import Callable

from relay.limits import Pace
from wire.messages import Message

FrameTap = Callable[[str, str | None, bytes, float], None]
"""Called with type, session, frame and time of arrival. It must be quick and must not send."""


class LocalLink:
    """Hands what the relay sends to `deliver`, at once and without a copy.

    Args:
        deliver: called with a message of the relay's own or with a forwarded frame. It must not send: the router is in
            the middle of a decision.
        on_closed: called with the reason when the relay turns this peer out.
    """

    rtt_s: float | None = 0.0
    num_queued = queued_bytes = 0

    def __init__(self, deliver: Callable[[Message | bytes], None], on_closed: Callable[[str], None]) -> None:
        self.pace: Pace | None = None
        self.num_read = self.num_written = self.bytes_read = self.bytes_written = 0
        self._deliver = deliver
        self._on_closed = on_closed

    def send(self, message: Message | bytes, *, now: float | None = None) -> None:
        """As `Link.send`; nothing waits here, so it is never full."""
        self.num_written += 1
        self.bytes_written += len(message) if isinstance(message, bytes) else 0
        self._deliver(message)

    async def flush(self) -> None:
        """As `Link.flush`: everything has been delivered."""

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """As `Link.close`."""
        self._on_closed(reason)

    def abort(self) -> None:
        """As `Link.abort`."""
        self._on_closed("cut off")
