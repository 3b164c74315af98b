"""How fast a credential's links and requests are taken: token buckets, with the time as an argument.

A link above its rate is read more slowly, so that TCP holds its sender back. An HTTP request cannot be held back like
that; it is refused and told when to come again.
"""

from __future__ import annotations

from dataclasses import dataclass

from relay.credentials import Credential

BURST_S = 1.0
"""A link that was quiet may catch up by so much at once."""


class TokenBucket:
    """Lets `rate` units a second through, and up to a burst at once.

    `take` never refuses: it says how long to wait before the next unit, so that the bucket is in debt by at most what
    was taken last.
    """

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self.level = rate * BURST_S
        self._at = now

    def take(self, amount: float, now: float) -> float:
        """Take `amount`; seconds until the level is back at zero, 0 for at once."""
        self.level = min(self.rate * BURST_S, self.level + max(0.0, now - self._at) * self.rate) - amount
        self._at = now
        return max(0.0, -self.level / self.rate)


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A limit that is exhausted: its name in the file of credentials, its value, and for how long it will be."""

    limit: str
    value: float
    wait_s: float


class Pace:
    """The limits of one credential, for all of its links and requests together."""

    def __init__(self, credential: Credential, now: float) -> None:
        self.num_delayed = 0
        self.num_refused = 0
        self._frames = TokenBucket(credential.frames_per_s, now) if credential.frames_per_s else None
        self._bytes = TokenBucket(credential.bytes_per_s, now) if credential.bytes_per_s else None

    def __call__(self, num_bytes: int, now: float) -> float:
        """A frame of `num_bytes` has been read; how long to wait before the next."""
        wait_s = 0.0
        if self._frames is not None:
            wait_s = self._frames.take(1, now)
        if self._bytes is not None:
            wait_s = max(wait_s, self._bytes.take(num_bytes, now))
        self.num_delayed += wait_s > 0
        return wait_s

    def refusal(self, now: float) -> Exceeded | None:
        """The limit for which a request must come later, the longer one of two; None if it may come now."""
        buckets = {"frames_per_s": self._frames, "bytes_per_s": self._bytes}
        exceeded = [
            Exceeded(name, bucket.rate, wait_s)
            for name, bucket in buckets.items()
            if bucket is not None and (wait_s := bucket.take(0, now)) > 0
        ]
        self.num_refused += bool(exceeded)
        return max(exceeded, key=lambda each: each.wait_s, default=None)

    def charge(self, num_frames: int, num_bytes: int, now: float) -> None:
        """A request was let in that counts as so many frames and bytes."""
        if self._frames is not None:
            self._frames.take(num_frames, now)
        if self._bytes is not None:
            self._bytes.take(num_bytes, now)
