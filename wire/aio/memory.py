"""A link without sockets: latency, loss, duplication and reordering, seeded.

`LinkModel` is pure and says when copies of a frame arrive, so that tests drive it under a clock of their own.
`memory_link` is a pair of endpoints over it under asyncio.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class LinkModel:
    """One direction of a link.

    Args:
        delay_s, jitter_s: one way; jitter is uniform in 0..jitter_s.
        drop, duplicate: chance for each frame.
        reorder: chance that a frame may overtake others; otherwise frames arrive in the order they were sent.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _last_at: float = field(default=0.0, init=False)

    def arrivals(self, now: float) -> list[float]:
        """When the copies of a frame sent now arrive; none if it is lost."""
        if self.rng.random() < self.drop:
            return []
        times = []
        for _ in range(2 if self.rng.random() < self.duplicate else 1):
            at = now + self.delay_s + self.rng.uniform(0.0, self.jitter_s)
            if self.rng.random() >= self.reorder:
                at = max(at, self._last_at)
                self._last_at = at
            times.append(at)
        return times


class Endpoint:
    """One end of a memory link: `send` frames, `on_frame` is called with those that arrive."""

    def __init__(self, model: LinkModel) -> None:
        self.model = model
        self.on_frame: Callable[[bytes], None] = lambda frame: None
        self.peer: Endpoint | None = None

    def send(self, frame: bytes) -> None:
        """Send a frame to the other end, as the model has it."""
        loop = asyncio.get_running_loop()
        peer = self.peer
        assert peer is not None
        for at in self.model.arrivals(loop.time()):
            loop.call_at(at, lambda: peer.on_frame(frame))


def memory_link(there: LinkModel, back: LinkModel) -> tuple[Endpoint, Endpoint]:
    """Two connected endpoints."""
    near, far = Endpoint(there), Endpoint(back)
    near.peer, far.peer = far, near
    return near, far
