"""The draft model: a cache of committed tokens and tree nodes, settled in place before each step.

Between steps a slot's cache holds one row for each committed token it was fed or that an accepted node became, and
behind them the rows of live nodes that were run. Nodes whose row was never computed are simply not there: a committed
token without a row comes in `DraftStep.commit`, so a fully accepted draft leaves no hole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from engine.errors import CacheError
from engine.model import CachedModel, NewRows
from engine.noise import noise_key
from engine.sampler import Sampler
from engine.slots import Slots, one_by_one, together
from speculation.passes import Child, DraftResult, DraftStep, Sampling

MAX_AHEAD = 15
"""Most steps taken ahead: with the first they make two captured chains, and another session does not wait longer."""


class _Session:
    """One open slot. `tokens` are the committed ones; `row` and `path` are of the nodes in the cache."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.num_tokens = 0
        self.row: dict[int, int] = {}
        self.path: dict[int, tuple[int, ...]] = {}  # tokens from the root's child to the node


class HFDrafter:
    """`DraftRunner` over a `CachedModel`.

    Args:
        vocab_size: number of token ids that may be proposed (the target's).
        max_children: most children per row.
    """

    def __init__(self, model: CachedModel, *, vocab_size: int, max_children: int = 16) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._max_children = max_children
        self._sessions: Slots[_Session] = Slots(model.num_slots)

    @property
    def num_slots(self) -> int:
        return self._model.num_slots

    @property
    def max_length(self) -> int:
        return self._model.max_length

    @property
    def max_rows(self) -> int:
        return self._model.max_tree_rows

    @property
    def max_children(self) -> int:
        return self._max_children

    @property
    def max_ahead(self) -> int:
        return MAX_AHEAD if self._model.has_chains else 0

    def open(self, slot: int, *, sampling: Sampling, num_prompt: int) -> None:
        """See `DraftRunner.open`.

        Raises:
            CacheError: the slot is in use.
        """
        sampler = Sampler(sampling, num_prompt=num_prompt, stop_ids=(), vocab_size=self._vocab_size)
        self._sessions.open(slot, _Session(sampler))

    def step(self, batch: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        """See `DraftRunner.step`. A captured chain is one session's own; all other steps share a pass.

        Raises:
            CacheError: a slot comes twice; nothing was changed.
        """
        if len({request.slot for request in batch}) != len(batch):
            raise CacheError(f"a slot is twice in one batch: {[request.slot for request in batch]}")
        started = time.perf_counter()
        run_before = self._model.run_s
        ready = one_by_one(batch, self._prepare)
        shared = [
            (index, request, new)
            for index, (request, new) in enumerate(zip(batch, ready, strict=True))
            if isinstance(new, NewRows)
        ]
        logits = self._forward_shared([new for _, _, new in shared])
        sampling_started = time.perf_counter()
        run_s = self._model.run_s - run_before
        children: list[dict[int, tuple[Child, ...]] | Exception] = [
            {} if isinstance(each, NewRows) else each for each in ready
        ]
        for (index, request, new), rows in zip(shared, logits, strict=True):
            if isinstance(rows, Exception):
                children[index] = rows
                continue
            (children[index],) = one_by_one(
                [request],
                lambda each, new=new, rows=rows: self._take(each, new, rows),  # type: ignore[misc]
            )
        ended = time.perf_counter()
        compute_s = run_s + ended - sampling_started
        overhead_s = max(0.0, ended - started - compute_s)
        return [
            found
            if isinstance(found, Exception)
            else DraftResult(children=found, compute_s=compute_s, overhead_s=overhead_s)
            for found in children
        ]

    def close(self, slot: int) -> None:
        self._sessions.close(slot)
        self._model.clear(slot)

    def _forward_shared(self, batch: Sequence[NewRows]) -> list[Tensor | Exception]:
        """Logits of each, in one pass where that is possible."""
        logits = together(batch, self._model.forward_batch)
        for index, (new, rows) in enumerate(zip(batch, logits, strict=True)):
            # Others' rows are part of the products, if behind a mask: what is no number may be theirs.
            if len(batch) > 1 and isinstance(rows, Tensor) and not bool(rows.amax(1).isfinite().all()):
                self._model.rewind(new.slot, len(new.tokens))
                (logits[index],) = together([new], self._model.forward_batch)
        return logits

    def _prepare(self, request: DraftStep) -> NewRows | dict[int, tuple[Child, ...]]:
        """Settle and check one session's step, run what it runs alone; what is left to run with others, or, of a chain
        and of a step without rows, its children."""
        session = self._sessions[request.slot]
        self._settle(session, request)
        self._check(session, request)
        if request.num_ahead and self._model.has_chains and session.sampler.is_plain:
            return self._run_chain(session, request)
        return self._last_rows(session, request) or {}

    def _settle(self, session: _Session, request: DraftStep) -> None:
        """Accepted nodes that the cache holds become committed rows, live ones move up, the rest is dropped."""
        accepted = []
        for node in request.accepted:
            if node not in session.row:
                break
            accepted.append(node)
        kept = sorted((node for node in request.keep if node in session.row), key=session.row.__getitem__)
        kept = [node for node in kept if node not in accepted]
        self._model.keep(request.slot, [session.row[node] for node in accepted], [session.row[node] for node in kept])
        if accepted:
            tokens = session.path[accepted[-1]]
            session.sampler.commit(tokens)
            session.num_tokens += len(tokens)
        first = self._model.rows[request.slot].length
        session.path = {node: session.path[node][len(accepted) :] for node in kept}
        session.row = {node: first + i for i, node in enumerate(kept)}

    def _check(self, session: _Session, request: DraftStep) -> None:
        """Hold the step to what the settled cache can take, before anything is run."""
        rows = self._model.rows[request.slot]
        if request.commit_start != rows.length or rows.length != session.num_tokens:
            raise CacheError(f"commit starts at {request.commit_start}, but the cache holds {rows.length} tokens")
        if request.commit and rows.tree:
            raise CacheError(f"{len(rows.tree)} live nodes are cached that do not follow the tokens to commit")
        if request.expand_root and not request.commit:
            raise CacheError("children of the root are wanted, but its token is not among the tokens to commit")
        if len(rows.tree) + len(request.nodes) > self.max_rows:
            raise CacheError(
                f"{len(request.nodes)} more nodes do not fit: {len(rows.tree)} of {self.max_rows} rows are in use"
            )
        if request.num_ahead and (len(request.nodes) + request.expand_root, request.num_children) != (1, 1):
            raise CacheError(f"a chain starts at one row with one child, not at {len(request.nodes)} nodes")
        if request.num_ahead and len(rows.tree) + len(request.nodes) + request.num_ahead > self.max_rows:
            raise CacheError(f"a chain of {request.num_ahead} more nodes does not fit: {len(rows.tree)} are cached")
        known = set(session.row)
        for node in request.nodes:
            if node.node in known or (node.parent >= 0 and node.parent not in known):
                raise CacheError(f"node {node.node} is cached already, or its parent {node.parent} is not")
            known.add(node.node)
        if not all(0 <= token < self._vocab_size for token in (*request.commit, *(n.token for n in request.nodes))):
            raise CacheError(f"token ids must be in 0..{self._vocab_size - 1}")

    def _last_rows(self, session: _Session, request: DraftStep) -> NewRows | None:
        """Feed commit tokens that are too many for one pass; the rest of them and the nodes are the pass to share."""
        slot, commit, nodes = request.slot, list(request.commit), request.nodes
        while len(commit) > 1 and len(commit) + len(nodes) > self._model.max_pass_rows:
            # The root's row stays for the last pass, whose logits are read.
            chunk = commit[: min(self._model.max_pass_rows, len(commit) - 1)]
            self._model.forward(slot, chunk, num_committed=len(chunk), num_logits=1)
            self._committed(session, chunk)
            del commit[: len(chunk)]
        if not commit and not nodes:
            return None
        rows = self._model.rows[slot]
        length = rows.length + len(commit)
        first = length + len(rows.tree)
        row = dict(session.row)
        parents = []
        for i, node in enumerate(nodes):
            parents.append(length - 1 if node.parent < 0 else row[node.parent])
            row[node.node] = first + i
        return NewRows(
            slot=slot,
            tokens=[*commit, *(node.token for node in nodes)],
            num_committed=len(commit),
            parents=parents,
            num_logits=max(1, len(nodes) + request.expand_root),
        )

    def _take(self, request: DraftStep, new: NewRows, logits: Tensor) -> dict[int, tuple[Child, ...]]:
        """The new rows are in the cache: note which is which, and propose children."""
        session, nodes = self._sessions[request.slot], request.nodes
        self._committed(session, new.tokens[: new.num_committed])
        first = self._model.rows[request.slot].used - len(nodes)
        for i, node in enumerate(nodes):
            session.row[node.node] = first + i
            session.path[node.node] = (*(() if node.parent < 0 else session.path[node.parent]), node.token)
        return self._propose(session, request, logits)

    def _run_chain(self, session: _Session, request: DraftStep) -> dict[int, tuple[Child, ...]]:
        """Run the one row of the step and, behind it, the best child each time; children by parent, in path order."""
        slot, commit = request.slot, list(request.commit)
        if request.expand_root:
            token, parent = commit.pop(), -1
            above: tuple[int, ...] = ()
            row = None
        else:
            (node,) = request.nodes
            token, parent = node.token, node.node
            above = (*(() if node.parent < 0 else session.path[node.parent]), token)
        for start in range(0, len(commit), self._model.max_pass_rows):
            chunk = commit[start : start + self._model.max_pass_rows]
            self._model.forward(slot, chunk, num_committed=len(chunk), num_logits=1)
            self._committed(session, chunk)
        rows = self._model.rows[slot]
        if not request.expand_root:
            up = request.nodes[0].parent
            row = rows.length - 1 if up < 0 else session.row[up]
        first, sampling = rows.used, session.sampler.sampling
        position = session.num_tokens + request.expand_root + len(above)
        chosen, logprobs = self._model.chain(
            slot,
            token,
            parent=row,
            keys=[noise_key(sampling.seed, position + i) for i in range(request.num_ahead + 1)],
            temperature=0.0 if sampling.greedy else sampling.temperature,
        )
        if request.expand_root:
            self._committed(session, [token])
        else:
            session.row[parent], session.path[parent] = first, above
        children: dict[int, tuple[Child, ...]] = {}
        for i, (child, logprob) in enumerate(zip(chosen, logprobs, strict=True)):
            children[parent] = (Child(token=child, logprob=min(0.0, logprob)),)
            if i < request.num_ahead:
                parent, above = request.first_node + i, (*above, child)
                session.row[parent], session.path[parent] = first + 1 + i, above
        return children

    def _committed(self, session: _Session, tokens: Sequence[int]) -> None:
        session.sampler.commit(tokens)
        session.num_tokens += len(tokens)

    def _propose(self, session: _Session, request: DraftStep, logits: Tensor) -> dict[int, tuple[Child, ...]]:
        """Children of each row that was run for them, ranked with the target's noise."""
        num = min(request.num_children, self._max_children)
        wanted: list[tuple[int, tuple[int, ...]]] = [(-1, ())] if request.expand_root else []
        wanted += [(node.node, session.path[node.node]) for node in request.nodes]
        if not wanted:
            return {}
        positions = [session.num_tokens + len(path) for _, path in wanted]
        proposed = session.sampler.propose_rows(logits, positions, [path for _, path in wanted], num)
        return {node: tuple(children) for (node, _), children in zip(wanted, proposed, strict=True)}
