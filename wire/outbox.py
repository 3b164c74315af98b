"""What waits to go out over one link: bounded, small frames before the parts of big ones, each session in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from wire.codec import session_of
from wire.errors import FrameTooLarge, QueueFull
from wire.messages import MAX_FRAME_BYTES
from wire.parts import PART_BYTES, split

Entry = tuple[bytes, float]
"""A frame, or a part of one, and when it was queued."""


class Outbox:
    """The queue of one link.

    Args:
        max_frames, max_bytes: its bounds; frames of the link itself may go up to twice as many.

    Attributes:
        num_bytes: what waits, in bytes.
    """

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self.max_frames = max_frames
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._small: deque[Entry] = deque()
        self._big: deque[Entry] = deque()
        self._behind: set[str | None] = set()
        """Sessions whose frames belong behind those in `_big`."""

    def __len__(self) -> int:
        return len(self._small) + len(self._big)

    @property
    def has_big(self) -> bool:
        """Whether parts of a big frame wait."""
        return bool(self._big)

    def add(self, frame: bytes, now: float) -> None:
        """Queue a frame.

        Raises:
            QueueFull, FrameTooLarge: nothing was queued.
        """
        num_bytes = len(frame)
        if len(self._small) + len(self._big) >= self.max_frames or self.num_bytes + num_bytes > self.max_bytes:
            raise QueueFull(
                f"{len(self)} frames ({self.num_bytes} bytes) wait already; the limits are "
                f"{self.max_frames} frames and {self.max_bytes} bytes"
            )
        if num_bytes > PART_BYTES:
            if num_bytes > MAX_FRAME_BYTES:
                raise FrameTooLarge("frame", num_bytes, MAX_FRAME_BYTES)
            self._add_big(frame, split(frame), now)
        elif self._big and session_of(frame) in self._behind:
            self._add_big(frame, [frame], now)
        else:
            self._small.append((frame, now))
            self.num_bytes += num_bytes

    def add_first(self, frames: Sequence[bytes], now: float) -> None:
        """Queue frames of the link itself before all others: a Pong behind a megabyte of answers would be late.

        Raises:
            QueueFull: the peer asks for ever more and reads nothing.
        """
        if len(self) + len(frames) > 2 * self.max_frames:
            raise QueueFull(f"{len(self)} frames wait already, and the peer asks for more")
        for frame in reversed(frames):
            self._small.appendleft((frame, now))
            self.num_bytes += len(frame)

    def take_small(self, max_bytes: int) -> list[Entry]:
        """The next whole frames, until they reach `max_bytes`."""
        if self.num_bytes <= max_bytes and not self._big:
            entries = list(self._small)
            self._small.clear()
            self.num_bytes = 0
            return entries
        entries, num_bytes = [], 0
        while self._small and num_bytes < max_bytes:
            entry = self._small.popleft()
            entries.append(entry)
            num_bytes += len(entry[0])
        self.num_bytes -= num_bytes
        return entries

    def take_big(self) -> Entry | None:
        """The next part, or a whole frame that belongs behind parts; None if none waits."""
        if not self._big:
            return None
        entry = self._big.popleft()
        self.num_bytes -= len(entry[0])
        return entry

    def _add_big(self, frame: bytes, pieces: list[bytes], now: float) -> None:
        if not self._big:
            self._behind.clear()
        self._behind.add(session_of(frame))
        self._big.extend((piece, now) for piece in pieces)
        self.num_bytes += sum(map(len, pieces))
