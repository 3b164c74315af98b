"""What the shells of both nodes have in common: the link, sending on it, waking the model's feeder, draining."""

from __future__ import annotations

import asyncio
import logging

from wire.aio.link import Link
from wire.errors import QueueFull
from wire.messages import Draining, Message

log = logging.getLogger(__name__)


class NodeShell:
    """Base of `DraftNode` and `VerifyNode`.

    Attributes:
        link: to the relay, while it is up.
        wake: set whenever the feeder of the model should look for work again.
    """

    def __init__(self) -> None:
        self.link: Link | None = None
        self.wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_sessions = 0

    def on_link(self, link: Link) -> None:
        """A link to the relay is up."""
        self.link = link

    def send(self, message: Message) -> None:
        """Send to the relay, if it is there."""
        if self.link is None:
            return
        try:
            self.link.send(message)
        except QueueFull as exc:
            # The relay does not read: the link is as good as lost. Sessions are told when its end is noticed.
            log.warning("> %s", exc)
            self.link.abort()

    def settle(self, num_sessions: int) -> None:
        """Something has happened, and so many sessions are open now."""
        self._num_sessions = num_sessions
        if num_sessions:
            self._idle.clear()
        else:
            self._idle.set()
        self.wake.set()

    async def drain(self, grace_s: float, reason: str) -> None:
        """Take no new session and wait for the running ones, at most `grace_s`."""
        self.send(Draining(grace_s=grace_s, reason=reason))
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("%d sessions did not end within %g s", self._num_sessions, grace_s)

    @staticmethod
    def now() -> float:
        """The loop's monotonic clock."""
        return asyncio.get_running_loop().time()
