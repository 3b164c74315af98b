"""A drafter without a model: proposes what followed the same words before, in prompt, answer or the path drafted.

Estimates blend the orders by "prediction by partial matching", escape method C (Moffat 1990, IEEE Trans. Comm. 38(11)):
in the context of the last n tokens, seen `total` times with `distinct` different continuations, a continuation seen
`count` times has probability count / (total + distinct), and the remaining distinct / (total + distinct) goes to the
next shorter context.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from engine.errors import CacheError
from engine.slots import Slots, one_by_one
from speculation.passes import Child, DraftResult, DraftStep, Sampling


class _Session:
    """Committed tokens with an index of what followed each n-gram, and the nodes that were run."""

    def __init__(self, min_order: int, max_order: int) -> None:
        self.orders = range(min_order, max_order + 1)
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], Counter[int]] = {}
        self.path: dict[int, tuple[int, ...]] = {}  # node -> tokens from the root's child to it

    def commit(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            for order in self.orders:
                if order <= len(self.tokens):
                    gram = tuple(self.tokens[-order:])
                    self.followers.setdefault(gram, Counter())[token] += 1
            self.tokens.append(token)

    def propose(self, path: tuple[int, ...], num: int) -> tuple[Child, ...]:
        """The `num` likeliest continuations after the committed tokens and `path`, best first."""
        context = (*self.tokens[-self.orders[-1] :], *path)
        path_start = len(context) - len(path)
        probabilities: dict[int, float] = {}
        escape = 1.0
        for order in reversed(self.orders):
            if order > len(context):
                continue
            gram = context[-order:]
            seen = Counter(self.followers.get(gram, ()))
            # The path is not in the index; a repetition may begin inside it.
            for i in range(max(order, path_start), len(context)):
                if context[i - order : i] == gram:
                    seen[context[i]] += 1
            fresh = {token: count for token, count in seen.items() if token not in probabilities}
            if fresh:
                mass = sum(fresh.values()) + len(fresh)
                for token, count in fresh.items():
                    probabilities[token] = escape * count / mass
                escape *= len(fresh) / mass
        # The token id breaks ties, so that both runs of one session propose alike.
        best = sorted(probabilities.items(), key=lambda item: (-item[1], item[0]))[:num]
        return tuple(Child(token=token, logprob=math.log(probability)) for token, probability in best)


class NgramDrafter:
    """`DraftRunner` by n-gram lookup, orders `min_order` to `max_order`."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_length: int,
        max_rows: int = 64,
        max_children: int = 16,
        min_order: int = 1,
        max_order: int = 4,
    ) -> None:
        if not 1 <= min_order <= max_order:
            raise ValueError(f"orders must ascend from 1, got {min_order}..{max_order}")
        self._max_length = max_length
        self._max_rows = max_rows
        self._max_children = max_children
        self._orders = (min_order, max_order)
        self._sessions: Slots[_Session] = Slots(num_slots)

    @property
    def num_slots(self) -> int:
        return self._sessions.num_slots

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def max_children(self) -> int:
        return self._max_children

    @property
    def max_ahead(self) -> int:
        return 0

    def open(self, slot: int, *, sampling: Sampling, num_prompt: int) -> None:
        """See `DraftRunner.open`; the sampling parameters do not matter here.

        Raises:
            CacheError: the slot is in use.
        """
        self._sessions.open(slot, _Session(*self._orders))

    def step(self, batch: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        return one_by_one(batch, self._step)

    def close(self, slot: int) -> None:
        self._sessions.close(slot)

    def _step(self, request: DraftStep) -> DraftResult:
        started = time.perf_counter()
        session = self._sessions[request.slot]
        self._settle(session, request)
        if request.commit_start != len(session.tokens):
            raise CacheError(f"commit starts at {request.commit_start}, but {len(session.tokens)} tokens are known")
        if len(session.tokens) + len(request.commit) > self._max_length:
            raise CacheError(f"{len(request.commit)} more tokens exceed the limit of {self._max_length}")
        if len(session.path) + len(request.nodes) > self._max_rows:
            raise CacheError(f"{len(request.nodes)} more nodes exceed the limit of {self._max_rows}")
        session.commit(request.commit)
        num = min(request.num_children, self._max_children)
        children: dict[int, tuple[Child, ...]] = {}
        if request.expand_root:
            children[-1] = session.propose((), num)
        for node in request.nodes:
            if node.parent >= 0 and node.parent not in session.path:
                raise CacheError(f"node {node.node} follows node {node.parent}, which is not known")
            above = () if node.parent < 0 else session.path[node.parent]
            session.path[node.node] = (*above, node.token)
            children[node.node] = session.propose(session.path[node.node], num)
        return DraftResult(children=children, overhead_s=time.perf_counter() - started)

    @staticmethod
    def _settle(session: _Session, request: DraftStep) -> None:
        num_accepted = 0
        for node in request.accepted:
            if node not in session.path:
                break
            session.commit(session.path[node][num_accepted:])
            num_accepted += 1
        session.path = {
            node: path[num_accepted:]
            for node, path in session.path.items()
            if node in request.keep and len(path) > num_accepted
        }
