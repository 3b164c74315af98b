"""What the nodes need of a model. Implementations: `engine/target.py`, `engine/drafter.py`, `engine/scripted.py`.

All calls are made from one thread, the executor's (`engine/executor.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from speculation.passes import DraftResult, DraftStep, Sampling, VerifyPass, VerifyResult


class TargetRunner(Protocol):
    """The target model with its sampler, over `num_slots` sessions of at most `max_length` tokens each."""

    @property
    def num_slots(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Most tokens of prompt + answer in one slot."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows of one pass, the pending token included."""
        ...

    def open(
        self, slot: int, *, sampling: Sampling, tokens: Sequence[int], num_prompt: int, stop_ids: Sequence[int]
    ) -> None:
        """Start a session on a free slot. `tokens` is prompt + answer so far (a resumed session has some).

        Nothing is computed. `stop_ids` end the walk and are what min_tokens bans; empty to go on after them.
        """
        ...

    def prefill(self, slot: int, start: int, end: int) -> None:
        """Compute the cache for positions start..end-1 of the tokens given to `open`; start is what is cached.

        All but the last token are prefilled, in chunks; the last one is row 0 of the first `verify`.
        """
        ...

    def verify(self, batch: Sequence[VerifyPass]) -> list[VerifyResult | Exception]:
        """One pass for several sessions, each once: score the rows, walk, keep the accepted ones in the cache, drop the
        rest. A session's tokens are those that it would get alone.

        A session that fails alone (NaN logits: `NumericalError`) gets its exception in its place. What is raised was
        raised before any session was changed, so whoever calls may try them one by one.
        """
        ...

    def close(self, slot: int) -> None:
        """Free the slot. Closing a free slot does nothing."""
        ...


class DraftRunner(Protocol):
    """A drafter over `num_slots` sessions of at most `max_length` tokens each."""

    @property
    def num_slots(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Most positions of one slot."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows of one step, and most tree rows a slot can hold."""
        ...

    @property
    def max_children(self) -> int: ...

    @property
    def max_ahead(self) -> int:
        """Most steps that one call takes ahead (see `DraftStep.num_ahead`); 0 if that would gain nothing."""
        ...

    def open(self, slot: int, *, sampling: Sampling, num_prompt: int) -> None:
        """Start a session on a free slot with an empty cache."""
        ...

    def step(self, batch: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        """One step for several sessions, each once: settle the caches, run the rows, propose children.

        Exceptions as with `TargetRunner.verify`.
        """
        ...

    def close(self, slot: int) -> None:
        """Free the slot. Closing a free slot does nothing."""
        ...
