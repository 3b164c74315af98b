"""The sessions of a runner, one to a slot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from engine.errors import CacheError, EngineError, is_of_all

log = logging.getLogger(__name__)
S = TypeVar("S")
R = TypeVar("R")
T = TypeVar("T")


class Slots(Generic[S]):
    """`num_slots` places for what a runner knows of a session."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._sessions: dict[int, S] = {}

    @property
    def num_open(self) -> int:
        """Slots in use."""
        return len(self._sessions)

    def check_free(self, slot: int) -> None:
        """Raise `CacheError` if a session cannot be opened here."""
        if not 0 <= slot < self.num_slots:
            raise CacheError(f"slot {slot} does not exist, there are {self.num_slots}")
        if slot in self._sessions:
            raise CacheError(f"slot {slot} is taken: in use by another session")

    def open(self, slot: int, session: S) -> None:
        """Put a session on a free slot.

        Raises:
            CacheError: the slot is in use, or there is no such slot.
        """
        self.check_free(slot)
        self._sessions[slot] = session

    def __getitem__(self, slot: int) -> S:
        """The session on a slot.

        Raises:
            CacheError: there is none.
        """
        if slot not in self._sessions:
            raise CacheError(f"slot {slot} is not open")
        return self._sessions[slot]

    def close(self, slot: int) -> None:
        """Free the slot. Closing a free slot does nothing."""
        self._sessions.pop(slot, None)


def one_by_one(requests: Sequence[R], run: Callable[[R], T]) -> list[T | Exception]:
    """Run each request; one that fails gets its exception in its place, the others go on.

    Raises:
        Exception: one that concerns all sessions (`is_of_all`).
    """
    results: list[T | Exception] = []
    for request in requests:
        try:
            results.append(run(request))
        except Exception as exc:
            if is_of_all(exc):
                raise
            if not isinstance(exc, EngineError):
                log.exception("one session's work failed")
            results.append(exc)
    return results


def together(requests: Sequence[R], run: Callable[[Sequence[R]], Sequence[T | Exception]]) -> list[T | Exception]:
    """Run requests in one go; where that fails as a whole, each by itself, so that only those fail that must.

    Args:
        run: a runner's call for a batch: it raises only before it has changed anything.

    Raises:
        Exception: one that concerns all sessions.
    """
    if len(requests) > 1:
        try:
            return list(run(requests))
        except Exception as exc:
            if is_of_all(exc):
                raise
            log.warning("%d sessions could not be served together, each is by itself: %r", len(requests), exc)
    return one_by_one(requests, lambda request: _only(run([request])))


def _only(results: Sequence[T | Exception]) -> T:
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result
