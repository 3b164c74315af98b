"""What the shells of both nodes have in common: link, frames, slots, waking the model's feeder, draining."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from wire.aio.link import Link
from wire.aio.quiet import RateLimited
from wire.codec import decode
from wire.errors import ProtocolError, QueueFull
from wire.messages import Draining, Error, Message
from wire.metrics import Family, gauge

log = logging.getLogger(__name__)
SlotCall = tuple[int, Callable[[], None]]
"""A slot, and what opens or frees it."""


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
        self._slot_calls: list[SlotCall] = []
        self._failed: dict[int, Exception] = {}
        self.draining = False
        self._leaving = (0.0, "")
        self._malformed = RateLimited(log, logging.WARNING)

    def on_link(self, link: Link) -> None:
        """A link to the relay is up."""
        self.link = link
        if self.draining:
            # The relay knows nothing of what was said over an earlier link.
            leaves_at, reason = self._leaving
            self.send(Draining(grace_s=max(0.0, leaves_at - self.now()), reason=reason))

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

    def read(self, frame: bytes) -> Message | None:
        """The message of a frame; a malformed one costs its sender an answer, nobody else anything."""
        try:
            return decode(frame)
        except ProtocolError as exc:
            self._malformed("", "< malformed frame: %s", exc)
            self.send(Error(code="malformed", message=str(exc)))
            return None

    def call_before_next_work(self, slot: int, call: Callable[[], None]) -> None:
        """Have the model's thread open or free a slot, in order, before it does anything else."""
        self._slot_calls.append((slot, call))

    def take_slot_calls(self) -> list[SlotCall]:
        """The calls that are due, once."""
        calls, self._slot_calls = self._slot_calls, []
        return calls

    def call_all(self, calls: list[SlotCall]) -> None:
        """Make the calls; in the model's thread. One that fails costs its session alone: see `failure`."""
        for slot, call in calls:
            self._failed.pop(slot, None)
            try:
                call()
            except Exception as exc:
                log.exception("slot %d could not be opened or freed", slot)
                self._failed[slot] = exc

    def failure(self, slot: int) -> Exception | None:
        """Why the slot could not be opened, to be given as the result of its first work; in the model's thread."""
        return self._failed.get(slot)

    def settle(self, num_sessions: int) -> None:
        """Something has happened, and so many sessions are open now."""
        self._num_sessions = num_sessions
        if num_sessions:
            self._idle.clear()
        else:
            self._idle.set()
        self.wake.set()

    def unready(self) -> list[str]:
        """Why no session would be served now."""
        reasons = [] if self.link is not None else ["no link to the relay"]
        return [*reasons, "the node is draining"] if self.draining else reasons

    def families(self) -> list[Family]:
        """The metrics that both nodes have; each adds its own."""
        link = self.link
        return [
            gauge("foredraft_sessions", "Open sessions.", self._num_sessions),
            gauge("foredraft_linked", "1 while there is a link to the relay.", link is not None),
            gauge("foredraft_rtt_seconds", "Round trip to the relay.", (link.rtt_s or 0.0) if link else 0.0),
            gauge("foredraft_queued_frames", "Frames that wait to be written.", link.num_queued if link else 0),
        ]

    async def drain(self, grace_s: float, reason: str) -> None:
        """Take no new session and wait for the running ones, at most `grace_s`."""
        self.draining = True
        self._leaving = (self.now() + grace_s, reason)
        self.send(Draining(grace_s=grace_s, reason=reason))
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
                if self.link is not None:
                    # What is queued belongs to the answers too: a Close would overtake it.
                    await self.link.flush()
        except TimeoutError:
            log.warning("%d sessions did not end within %g s", self._num_sessions, grace_s)

    @staticmethod
    def now() -> float:
        """The loop's monotonic clock."""
        return asyncio.get_running_loop().time()
