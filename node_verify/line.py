"""The slots of a verify node, and the line of sessions that wait for one. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class WaitingLine:
    """`num_slots` slots, given out first come first served, and a line of at most `max_waiting` sessions for them.

    A session comes in two steps: it is *expected* while its prompt is tokenized, then it joins the line. Both count
    towards the limit as far as no slot is free for them, so that a burst of requests cannot outgrow it.
    """

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._free = list(range(num_slots))[::-1]
        self._expected: set[str] = set()
        self._line: deque[str] = deque()
        self._told: dict[str, int] = {}

    def __len__(self) -> int:
        """Sessions in the line."""
        return len(self._line)

    def refusal(self) -> str:
        """Why one more session could not come, or ""."""
        num_ahead = len(self._expected) + len(self._line) - len(self._free)
        if num_ahead < self.max_waiting:
            return ""
        return f"{num_ahead} sessions wait for a slot already, the limit is {self.max_waiting}"

    def expect(self, session: str) -> None:
        """A session is on its way."""
        self._expected.add(session)

    def join(self, session: str) -> None:
        """A session is ready for a slot."""
        self._expected.discard(session)
        self._line.append(session)

    def leave(self, session: str) -> None:
        """A session does not want a slot any more, if it ever did."""
        self._expected.discard(session)
        self._told.pop(session, None)
        if session in self._line:
            self._line.remove(session)

    def free(self, slot: int) -> None:
        """A slot is free again."""
        self._free.append(slot)

    def admit(self) -> Iterator[tuple[str, int]]:
        """Sessions that get a slot now, each with the slot."""
        while self._line and self._free:
            session = self._line.popleft()
            self._told.pop(session, None)
            yield session, self._free.pop()

    def news(self) -> list[tuple[str, int]]:
        """Sessions whose place in the line is not what they were told last, with the place; 1 is the next to go."""
        moved = [(session, place) for place, session in enumerate(self._line, 1) if self._told.get(session) != place]
        self._told.update(moved)
        return moved
