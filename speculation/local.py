"""A drafter beside the verifier that costs almost nothing: two lookups, no model.

*Token recycling* (Luo et al. 2024, "Turning Trash into Treasure"): the target's own most probable tokens after
each token it has passed, kept by the last two tokens and, coarser, by the last one. *Suffix matching*: what followed
the longest earlier occurrence of the last tokens, in prompt and answer. Neither has a probability to offer; each
proposal has a key under which `speculation.rates` learns how often its kind is right.

Each session has its own: shared tables would know more, but how fast an answer comes would then tell one client what
another's is about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from speculation.rates import HitRates

NUM_TOPS = 8
"""Successors kept of each token."""
SUFFIX_ORDERS = (4, 3, 2)
MAX_SUFFIX = 8
SUFFIX_WINDOW = 4096
"""Last tokens of a prompt that are indexed: taking in a prompt must not hold up other sessions."""
PAIR_KEY, SINGLE_KEY, SUFFIX_KEY = 0, 16, 32
# Share of positions at which the proposal of this rank was the target's token; SmolLM2-135M on held-out prompts
# (docs/log.md). Where both lookups have the same token, the pair's rate counts.
PAIR_PRIOR = (0.50, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)
SINGLE_PRIOR = (0.22, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015, 0.01)
SUFFIX_PRIOR = (0.0, 0.0, 0.35, 0.45, 0.55, 0.62, 0.68, 0.72, 0.78)


def prior_rate(key: int) -> float:
    """Expected hit rate of a proposal's key."""
    if key >= SUFFIX_KEY:
        return SUFFIX_PRIOR[key - SUFFIX_KEY]
    return SINGLE_PRIOR[key - SINGLE_KEY] if key >= SINGLE_KEY else PAIR_PRIOR[key]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the text a lookup stands: the last two tokens, and the match that is being followed.

    `cursor` is the position that the match continues with, `matched` how many tokens before it agree; 0 for none.
    """

    before: int
    last: int
    cursor: int = -1
    matched: int = 0


@dataclass(slots=True)
class Recycled:
    """The target's tops after pairs and single tokens; the oldest go when there are too many."""

    max_entries: int = 50_000
    _tops: OrderedDict[tuple[int, int], tuple[int, ...]] = field(default_factory=OrderedDict)

    def put(self, before: int, last: int, tops: tuple[int, ...]) -> None:
        """The target's most probable tokens after `before`, `last`, best first."""
        for key in ((before, last), (-1, last)):
            self._tops.pop(key, None)
            self._tops[key] = tops
        while len(self._tops) > self.max_entries:
            self._tops.popitem(last=False)

    def get(self, before: int, last: int) -> tuple[int, ...]:
        """Empty if unknown; `before` = -1 for whatever token."""
        return self._tops.get((before, last), ())

    def __len__(self) -> int:
        return len(self._tops)


class LocalDrafter:
    """Proposals of one session.

    Args:
        tokens: prompt + answer so far, at least one; the last SUFFIX_WINDOW of them are copied.
        recycled: the adjacency to read and feed; None to do without.
        suffix: whether to match suffixes.
    """

    def __init__(self, tokens: Sequence[int], *, recycled: Recycled | None, suffix: bool) -> None:
        self.rates = HitRates(prior_rate)
        self._recycled = recycled
        self._suffix = suffix
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        tokens = tokens[-SUFFIX_WINDOW:]
        self._root = Place(-1, tokens[0])
        for token in tokens:
            self._append(token)

    @property
    def root(self) -> Place:
        """After the last committed token."""
        return self._root

    def commit(self, tokens: Sequence[int], tops: Sequence[tuple[int, ...]] = ()) -> None:
        """Tokens were committed, after having been proposed or not: every proposal that stood there is judged.

        Args:
            tops: the target's most probable tokens at the position of each token, where the runner reports them.
        """
        for i, token in enumerate(tokens):
            for proposed, key in self.proposals(self._root):
                self.rates.observe(key, proposed == token)
            if self._recycled is not None and i < len(tops):
                self._recycled.put(self._root.before, self._root.last, tops[i])
            self._append(token)

    def follow(self, place: Place, token: int) -> Place:
        """The place one token further on."""
        if place.cursor >= 0 and place.cursor + 1 < len(self._tokens) and self._tokens[place.cursor] == token:
            return Place(place.last, token, place.cursor + 1, min(place.matched + 1, MAX_SUFFIX))
        if self._suffix:
            end = self._ends.get((place.last, token), -1)
            if 0 <= end < len(self._tokens):
                return Place(place.last, token, end, 2)
        return Place(place.last, token)

    def proposals(self, place: Place) -> list[tuple[int, int]]:
        """Tokens that may follow, with the key of each; no token twice."""
        found: dict[int, int] = {}
        if place.cursor >= 0:
            found[self._tokens[place.cursor]] = SUFFIX_KEY + place.matched
        if self._recycled is not None:
            for rank, token in enumerate(self._recycled.get(place.before, place.last)):
                found.setdefault(token, PAIR_KEY + rank)
            for rank, token in enumerate(self._recycled.get(-1, place.last)):
                found.setdefault(token, SINGLE_KEY + rank)
        return list(found.items())

    def _append(self, token: int) -> None:
        before = self._root.last if self._tokens else -1
        tokens = self._tokens
        tokens.append(token)
        cursor, matched = -1, 0
        if self._suffix:
            place = self._root
            if place.cursor >= 0 and tokens[place.cursor] == token and place.cursor + 1 < len(tokens):
                cursor, matched = place.cursor + 1, min(place.matched + 1, MAX_SUFFIX)
            for order in SUFFIX_ORDERS:
                if len(tokens) < order:
                    continue
                gram = tuple(tokens[-order:])
                end = self._ends.get(gram, -1)
                if end >= 0 and order > matched:
                    cursor, matched = end, order
                # The position after the gram: what stands there is known by the time it is looked up again.
                self._ends[gram] = len(tokens)
        self._root = Place(before, token, cursor, matched)


def parse_local(text: str) -> tuple[bool, bool]:
    """`none`, `recycle`, `suffix` or `recycle+suffix`: whether to recycle, whether to match suffixes.

    Raises:
        ValueError: naming the value and the choices.
    """
    parts = text.split("+")
    if text != "none" and (len(set(parts)) != len(parts) or not set(parts) <= {"recycle", "suffix"}):
        raise ValueError(f"local must be none, recycle, suffix or recycle+suffix; got {text!r}")
    return "recycle" in parts, "suffix" in parts
