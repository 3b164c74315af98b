"""How bytes travel over an emulated link: a pure core, used by `link_emulator.py`, with time as an argument."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum

MIN_BUFFER_BYTES = 256 * 1024
MAX_READ_BYTES = 64 * 1024
MIN_READ_BYTES = 1448  # the payload of one Ethernet frame
UNSHAPED_BUFFER_BYTES = 8 * 1024 * 1024
# On a shaped link one read is at most this much serialisation time, so that a large message trickles as on a wire.
READ_SPAN_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """How one link behaves; the same in both directions. Counts and times are those of one connection.

    Attributes:
        delay_s: one-way propagation delay.
        jitter_s: uniform spread of the delay, `delay_s ± jitter_s`, never below 0; order is kept.
        rate_bytes_per_s: bandwidth; None for unlimited.
        stall_every_s, stall_s: every `stall_every_s` nothing arrives for `stall_s`, then all at once, as after a
            TCP retransmission. Both or neither.
        cut_after_s: reset both sides this long after the connection was made.
        cut_after_bytes: reset both sides when one direction has delivered this many bytes.
        swallow_after_bytes: once one direction has taken this many bytes, what enters either direction vanishes
            and nothing is closed: a half-open link.
        buffer_bytes: bytes under way in one direction above which reading pauses; None for twice the
            bandwidth-delay product, at least 256 KiB.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate_bytes_per_s: float | None = None
    stall_every_s: float | None = None
    stall_s: float = 0.0
    cut_after_s: float | None = None
    cut_after_bytes: int | None = None
    swallow_after_bytes: int | None = None
    buffer_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}: it must be a finite number from 0")
        for name in ("rate_bytes_per_s", "stall_every_s", "buffer_bytes"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0: leave it out or make it positive")
        if (self.stall_every_s is not None) != (self.stall_s > 0):
            raise ValueError("stall_every_s and stall_s belong together")
        if self.stall_every_s is not None and self.stall_s >= self.stall_every_s:
            raise ValueError(f"stall_s ({self.stall_s}) must be below stall_every_s ({self.stall_every_s})")

    @property
    def buffer_limit_bytes(self) -> int:
        """Bytes under way in one direction above which reading pauses."""
        if self.buffer_bytes is not None:
            return self.buffer_bytes
        if self.rate_bytes_per_s is None:
            return UNSHAPED_BUFFER_BYTES
        return max(MIN_BUFFER_BYTES, int(2 * self.rate_bytes_per_s * (self.delay_s + self.jitter_s)))

    @property
    def read_bytes(self) -> int:
        """The largest chunk to read at once."""
        if self.rate_bytes_per_s is None:
            return MAX_READ_BYTES
        return min(MAX_READ_BYTES, max(MIN_READ_BYTES, int(self.rate_bytes_per_s * READ_SPAN_S)))


class Ending(Enum):
    """How a direction ends, delivered in order after the bytes before it."""

    FIN = "fin"  # the sender closed its half
    CUT = "cut"  # a reset


class Shaper:
    """One direction of one connection: what entered, and when it comes out. Pure; `now` never runs backwards."""

    def __init__(self, shape: LinkShape, *, rng: random.Random, now: float) -> None:
        self._shape = shape
        self._rng = rng
        self._started_at = now
        self._line_free_at = now
        self._last_due = now
        self._stalled_until = now
        self._under_way: deque[tuple[float, bytes | Ending]] = deque()
        self._ended = False
        self._is_cut = False
        self.swallowing = False
        self.num_entered_bytes = 0
        self.num_delivered_bytes = 0
        self.num_swallowed_bytes = 0
        self.num_buffered_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the sender must not be read from for now."""
        return self.num_buffered_bytes >= self._shape.buffer_limit_bytes

    @property
    def is_finished(self) -> bool:
        """Whether nothing is under way and nothing will enter any more."""
        return self._ended and not self._under_way

    def push(self, data: bytes, now: float) -> None:
        """Bytes enter the link. Bytes past a limit of the shape vanish; the cut comes right after the last one."""
        if self._ended:
            return
        kept = data if not self.swallowing else b""
        if not self.swallowing and (limit := self._shape.swallow_after_bytes) is not None:
            kept = kept[: max(0, limit - self.num_entered_bytes)]
            self.swallowing = self.num_entered_bytes + len(data) >= limit
        cut_now = False
        if kept and (limit := self._shape.cut_after_bytes) is not None:
            kept = kept[: max(0, limit - self.num_entered_bytes)]
            cut_now = self.num_entered_bytes + len(kept) >= limit
        self.num_entered_bytes += len(kept)
        self.num_swallowed_bytes += len(data) - len(kept)
        if kept:
            self.num_buffered_bytes += len(kept)
            self._under_way.append((self._due(len(kept), now), kept))
        if cut_now:
            self._end(Ending.CUT, now)

    def end(self, ending: Ending, now: float) -> None:
        """The sender closed or reset its side: this arrives too, after the bytes before it, unless it is swallowed.

        A reset may follow a close; nothing follows a reset.
        """
        if self._is_cut or (self._ended and ending is Ending.FIN):
            return
        if self.swallowing:
            self._ended = True
        else:
            self._end(ending, now)

    def set_delay(self, delay_s: float) -> None:
        """What enters from now on takes this long; order is kept."""
        self._shape = replace(self._shape, delay_s=delay_s)

    def stall(self, until: float) -> None:
        """Nothing comes out before `until`."""
        self._stalled_until = max(self._stalled_until, until)

    def next_due(self) -> float | None:
        """When `pop` has something; None while nothing is under way."""
        return max(self._under_way[0][0], self._stalled_until) if self._under_way else None

    def pop(self, now: float) -> bytes | Ending | None:
        """The next chunk that has arrived by `now`, or how the direction ended, or None."""
        due = self.next_due()
        if due is None or due > now:
            return None
        _, item = self._under_way.popleft()
        if isinstance(item, bytes):
            self.num_buffered_bytes -= len(item)
            self.num_delivered_bytes += len(item)
        return item

    def _end(self, ending: Ending, now: float) -> None:
        self._ended = True
        self._is_cut = ending is Ending.CUT
        self._under_way.append((self._due(0, now), ending))

    def _due(self, num_bytes: int, now: float) -> float:
        shape = self._shape
        self._line_free_at = max(now, self._line_free_at)
        if shape.rate_bytes_per_s is not None:
            self._line_free_at += num_bytes / shape.rate_bytes_per_s
        delay_s = shape.delay_s
        if shape.jitter_s:
            delay_s = max(0.0, delay_s + self._rng.uniform(-shape.jitter_s, shape.jitter_s))
        self._last_due = max(self._last_due, self._past_periodic_stall(self._line_free_at + delay_s))
        return self._last_due

    def _past_periodic_stall(self, due: float) -> float:
        every_s = self._shape.stall_every_s
        if every_s is None:
            return due
        stalled_at = self._started_at + (due - self._started_at) // every_s * every_s
        if stalled_at > self._started_at and due < stalled_at + self._shape.stall_s:
            return stalled_at + self._shape.stall_s
        return due
