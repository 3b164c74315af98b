"""Which sessions a model serves next, where it serves many: whose turn it is, and how one piece of work is shared.

Two promises, for S sessions that are open:

- **Nobody starves.** Whoever is ready is served within ceil(S / max_rows) passes where pending tokens come first,
  within S passes where sessions take turns with all their candidates, and whoever has a prompt to be read within S
  pieces of prefill. Whoever was served longest ago comes first, and the first in line is never passed over.
- **A prompt holds nobody up for long.** Prefill and passes alternate while there is both, and a piece of prefill reads
  at most `prefill_chunk` tokens in all, whosever they are. So between two passes lies one piece of it at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from speculation.costs import PassCosts
from speculation.selection import Pick, share_rows


class Rota:
    """Sessions in the order of their turns: the one that was served longest ago comes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def join(self, session: str) -> None:
        """A session comes, behind all others; one that is there already stays where it is."""
        self._order.setdefault(session, None)

    def leave(self, session: str) -> None:
        """A session goes, if it was there."""
        self._order.pop(session, None)

    def served(self, sessions: Iterable[str]) -> None:
        """These have had their turn."""
        for session in sessions:
            self._order.move_to_end(session)

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


@dataclass(slots=True)
class Turns:
    """Whose turn it is at a target that reads prompts and runs passes.

    Attributes:
        prefill_chunk: most prompt tokens of one piece of prefill.
        reading: sessions with prompt tokens left.
        running: sessions that have passes.
    """

    prefill_chunk: int
    reading: Rota = field(default_factory=Rota)
    running: Rota = field(default_factory=Rota)
    _prefill_was_last: bool = False

    def leave(self, session: str) -> None:
        """A session goes."""
        self.reading.leave(session)
        self.running.leave(session)

    @property
    def pass_is_next(self) -> bool:
        """Whether a pass is due before a piece of prefill, if any session is ready for one."""
        return self._prefill_was_last or not len(self.reading)

    def on_prefill(self, sessions: Iterable[str]) -> None:
        """A piece of prefill was given out, of these sessions' prompts."""
        self.reading.served(sessions)
        self._prefill_was_last = True

    def on_pass(self, sessions: Iterable[str]) -> None:
        """A pass was given out, for these sessions."""
        self.running.served(sessions)
        self._prefill_was_last = False

    def prefill(self, tokens_left: Mapping[str, int]) -> list[tuple[str, int]]:
        """(session, number of tokens) of the next piece of prefill: in turn, as much of each as there is room for.

        Args:
            tokens_left: of each session in `reading`, at least 1.
        """
        chunks: list[tuple[str, int]] = []
        room = self.prefill_chunk
        for session in self.reading:
            if room < 1:
                break
            chunks.append((session, min(room, tokens_left[session])))
            room -= chunks[-1][1]
        return chunks


def fill_pass(
    offers: Sequence[Iterator[Pick]], *, max_rows: int, costs: PassCosts | None, whole: bool
) -> list[list[Pick]]:
    """Who of the sessions that are ready gets into the next pass, and with which candidates.

    Args:
        offers: of each session, in turn, what it could have scored, the best first.
        max_rows: of the whole pass.
        costs: of a pass; None where rows are free up to the limit.
        whole: sessions take turns with all that they would have scored by themselves, as those do that have waited for
            it; otherwise each gets the row of its pending token before anybody's candidates.

    Returns:
        The candidates to score for each of the first sessions; the others are not in this pass.
    """
    if not whole:
        return share_rows(offers[:max_rows], max_rows=max_rows, costs=costs)
    shares: list[list[Pick]] = []
    room = max_rows
    for offer in offers:
        (picks,) = share_rows([offer], max_rows=max_rows, costs=costs)
        # Who does not fit waits, and nobody overtakes: the first in line always fits.
        if 1 + len(picks) > room:
            break
        shares.append(picks)
        room -= 1 + len(picks)
    return shares
