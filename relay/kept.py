"""What the relay keeps of an answer, so that a client may be away and a verify node may die.

The newest frames stay as they came, for a client that resumes; older ones are folded to their token ids, four bytes
each, which is all that a replacement verify node needs. Nothing is parsed until it is folded or asked for.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from wire.codec import delta_tokens
from wire.errors import ProtocolError

MAX_RECENT_BYTES = 256 << 10
FRAME_OVERHEAD_BYTES = 64


class KeptAnswer:
    """The committed tokens of one session.

    Args:
        opening: the request as its client sent it.
        committed: tokens that the request brought along.
        max_recent_bytes: bound of the frames that are kept whole.
    """

    def __init__(
        self, opening: bytes, committed: Sequence[int] = (), *, max_recent_bytes: int = MAX_RECENT_BYTES
    ) -> None:
        self.opening = opening
        self.max_recent_bytes = max_recent_bytes
        self._ids = array("i", committed)
        self._recent: deque[bytes] = deque()
        self._recent_bytes = 0
        self.num_bytes = len(opening) + len(self._ids) * self._ids.itemsize
        """What it takes of the relay's memory, about."""

    def add(self, frame: bytes) -> None:
        """Keep a `TextDelta`.

        Raises:
            ProtocolError: an older frame cannot be read, or leaves a gap.
        """
        num_bytes = len(frame) + FRAME_OVERHEAD_BYTES
        self._recent.append(frame)
        self._recent_bytes += num_bytes
        self.num_bytes += num_bytes
        while self._recent_bytes > self.max_recent_bytes:
            oldest = self._recent.popleft()
            num_bytes = len(oldest) + FRAME_OVERHEAD_BYTES
            self._recent_bytes -= num_bytes
            self.num_bytes -= num_bytes
            num_before = len(self._ids)
            _append(self._ids, oldest)
            self.num_bytes += (len(self._ids) - num_before) * self._ids.itemsize

    def tokens(self) -> tuple[int, ...]:
        """All committed tokens of the answer.

        Raises:
            ProtocolError: see `add`.
        """
        ids = array("i", self._ids)
        for frame in self._recent:
            _append(ids, frame)
        return tuple(ids)

    def since(self, position: int) -> list[bytes] | None:
        """The frames with the tokens from `position` on; None where they are gone, or were never there.

        Raises:
            ProtocolError: see `add`.
        """
        ids = array("i", self._ids)
        if position < len(ids):
            return None
        frames = []
        for frame in self._recent:
            _append(ids, frame)
            if len(ids) > position:
                frames.append(frame)
        return frames if position <= len(ids) else None


def _append(ids: array[int], frame: bytes) -> None:
    start, tokens = delta_tokens(frame)
    if not 0 <= start <= len(ids):
        raise ProtocolError(f"tokens from {start} came when {len(ids)} was due")
    try:
        ids.extend(tokens[len(ids) - start :])
    except (TypeError, OverflowError) as exc:
        raise ProtocolError(f"tokens from {start} are no ids: {exc}") from None
