"""Big frames in parts, so that small ones need not wait behind them; each hop takes apart and puts together anew.

    1 byte    0, which no JSON begins with
    1 byte    1 if this is the last part, else 0
    payload   the next bytes of the frame

A link has one frame in parts under way at a time, and whole frames between its parts.
"""

from __future__ import annotations

from wire.errors import FrameTooLarge, ProtocolError
from wire.messages import MAX_FRAME_BYTES

PART_BYTES = 32 << 10
"""A frame above it goes in parts of this size: at 1 Mbit/s a part takes a quarter of a second."""
MARK = 0
HEADER_BYTES = 2


def split(frame: bytes) -> list[bytes]:
    """The parts of a frame, in order."""
    starts = range(0, max(len(frame), 1), PART_BYTES)
    last = starts[-1]
    return [bytes((MARK, start == last)) + frame[start : start + PART_BYTES] for start in starts]


def is_part(frame: bytes) -> bool:
    """Whether this is a part, rather than a whole frame."""
    return frame[:1] == b"\0"


class Assembler:
    """Puts one link's parts together; holds at most MAX_FRAME_BYTES."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, part: bytes) -> bytes | None:
        """Add a part; the frame, if it was its last.

        Raises:
            ProtocolError: it is none; FrameTooLarge: the frame is above the limit. What was there of it is forgotten.
        """
        if len(part) <= HEADER_BYTES or part[0] != MARK or part[1] > 1:
            self._buffer.clear()
            raise ProtocolError(f"a part of {len(part)} bytes begins with {part[:HEADER_BYTES].hex()}")
        size_bytes = len(self._buffer) + len(part) - HEADER_BYTES
        if size_bytes > MAX_FRAME_BYTES:
            self._buffer.clear()
            raise FrameTooLarge("frame in parts", size_bytes, MAX_FRAME_BYTES)
        self._buffer += memoryview(part)[HEADER_BYTES:]
        if not part[1]:
            return None
        frame = bytes(self._buffer)
        self._buffer.clear()
        return frame
