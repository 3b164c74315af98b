"""How fast a credential's links are read: token buckets, with the time as an argument."""

from __future__ import annotations

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


class Pace:
    """The limits of one credential, for all of its links together."""

    def __init__(self, credential: Credential, now: float) -> None:
        self.num_delayed = 0
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
