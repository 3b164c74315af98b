"""Runners without weights, for tests, simulation and trying things out: logits come from a function of the prefix.

They keep the books of real ones (cached lengths, tree rows, bounds) and refuse whatever a real cache could not do,
so that a scheduler which passes with them asks for nothing impossible. The sampler and the walk are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.errors import CacheError, NumericalError
from engine.sampler import Sampler
from engine.scripted_logits import LogitsFn, NextTokensFn, Prefix, as_row
from engine.slots import Slots
from speculation.passes import Child, DraftResult, DraftStep, Sampling, TokenLogprob, VerifyPass, VerifyResult
from speculation.walk import walk

DelayFn = Callable[[int], float]
"""Seconds that a pass over so many rows takes; they are slept, in the thread that calls."""


@dataclass(slots=True)
class TargetSlot:
    """Books of one session: all its tokens, and how many of them the cache holds."""

    sampler: Sampler
    tokens: list[int]
    stop_ids: tuple[int, ...]
    num_cached: int = 0


class ScriptedTarget:
    """A `TargetRunner` whose logits come from `logits_fn`, asked only for rows that the walk reaches.

    Args:
        vocab_size: number of real ids; None for the whole width of the rows.
        delay_s: how long a pass or a prefill takes.

    `passes` has every pass served, in order. Calls that a real cache could not serve raise `CacheError` and change
    nothing. As rows of one tree may share a position, it is positions that are held to `max_length`.
    """

    def __init__(
        self,
        logits_fn: LogitsFn,
        *,
        num_slots: int = 1,
        max_length: int = 4096,
        max_rows: int = 64,
        vocab_size: int | None = None,
        delay_s: DelayFn | None = None,
    ) -> None:
        self.logits_fn = logits_fn
        self.num_slots = num_slots
        self.max_length = max_length
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.delay_s = delay_s
        self.passes: list[VerifyPass] = []
        self._slots: Slots[TargetSlot] = Slots(num_slots)

    def open(
        self, slot: int, *, sampling: Sampling, tokens: Sequence[int], num_prompt: int, stop_ids: Sequence[int]
    ) -> None:
        """See `TargetRunner.open`."""
        self._slots.check_free(slot)
        if not 1 <= num_prompt <= len(tokens) < self.max_length:
            raise CacheError(
                f"slot {slot}: {len(tokens)} tokens with a prompt of {num_prompt} do not fit in {self.max_length}"
            )
        sampler = Sampler(sampling, num_prompt=num_prompt, stop_ids=stop_ids, vocab_size=self.vocab_size)
        sampler.commit(tokens)
        self._slots.open(slot, TargetSlot(sampler, list(tokens), tuple(stop_ids)))

    def prefill(self, slot: int, start: int, end: int) -> None:
        """See `TargetRunner.prefill`."""
        session = self._slots[slot]
        if start != session.num_cached or not start <= end <= len(session.tokens) - 1:
            raise CacheError(
                f"slot {slot}: prefill of {start}..{end} with {session.num_cached} cached of {len(session.tokens)}"
            )
        _sleep(self.delay_s, end - start)
        session.num_cached = end

    def verify(self, batch: Sequence[VerifyPass]) -> list[VerifyResult | Exception]:
        """See `TargetRunner.verify`."""
        if len({request.slot for request in batch}) != len(batch):
            raise CacheError("a slot is twice in one batch")
        for request in batch:
            self._check(request)
        began_at = time.perf_counter()
        _sleep(self.delay_s, sum(len(request.tokens) for request in batch))
        compute_s = time.perf_counter() - began_at if self.delay_s is not None else 0.0
        self.passes += batch
        return [self._verify(request, compute_s) for request in batch]

    def close(self, slot: int) -> None:
        """Free the slot. Closing a free slot does nothing."""
        self._slots.close(slot)

    def _check(self, request: VerifyPass) -> None:
        session = self._slots[request.slot]
        where = f"slot {request.slot}"
        if request.start != len(session.tokens) or session.num_cached != request.start - 1:
            raise CacheError(
                f"{where}: a pass from {request.start} with {session.num_cached} cached of {len(session.tokens)}"
            )
        if not 1 <= len(request.tokens) <= self.max_rows or len(request.parents) != len(request.tokens):
            raise CacheError(
                f"{where}: {len(request.tokens)} rows with {len(request.parents)} parents, at most {self.max_rows}"
            )
        if request.tokens[0] != session.tokens[-1]:
            raise CacheError(f"{where}: row 0 is token {request.tokens[0]}, pending is {session.tokens[-1]}")
        depths = [0]
        for row, parent in enumerate(request.parents[1:], 1):
            if not 0 <= parent < row:
                raise CacheError(f"{where}: parent of row {row} is {parent}")
            depths.append(depths[parent] + 1)
        end = request.start + max(*depths, request.max_tokens)
        if request.parents[0] != -1 or request.max_tokens < 1 or end > self.max_length:
            raise CacheError(
                f"{where}: parent of row 0 is {request.parents[0]}, max_tokens {request.max_tokens}, "
                f"positions up to {end} of {self.max_length}"
            )

    def _verify(self, request: VerifyPass, compute_s: float) -> VerifyResult | Exception:
        session = self._slots[request.slot]
        sampler = session.sampler
        committed = tuple(session.tokens)
        logprobs: list[TokenLogprob] = []
        tops: list[tuple[int, ...]] = []

        def choose(row: int, path: Prefix) -> int:
            logits = as_row(self.logits_fn(committed + path))
            token = sampler.choose(logits, request.start + len(path), path)
            if request.num_logprobs is not None:
                logprobs.append(sampler.logprobs(logits, path, token, request.num_logprobs))
            if request.num_tops:
                tops.append(tuple(logits.topk(min(request.num_tops, logits.numel())).indices.tolist()))
            return token

        try:
            walked = walk(
                request.parents, request.tokens, choose, max_tokens=request.max_tokens, stop_ids=session.stop_ids
            )
        except NumericalError as exc:
            return exc
        session.tokens += walked.tokens
        sampler.commit(walked.tokens)
        # All but the last token: it is row 0 of the next pass, also when it was a candidate.
        session.num_cached = len(session.tokens) - 1
        return VerifyResult(
            tokens=walked.tokens,
            rows=walked.rows,
            logprobs=tuple(logprobs) if request.num_logprobs is not None else None,
            tops=tuple(tops),
            compute_s=compute_s,
        )


@dataclass(slots=True)
class DraftSlot:
    """Books of one session: committed rows of the cache, and behind them tree rows, by node id."""

    sampler: Sampler
    tokens: list[int] = field(default_factory=list)
    rows: dict[int, Prefix] = field(default_factory=dict)  # node -> all tokens up to and with its own


class ScriptedDrafter:
    """A `DraftRunner` that proposes from `logits_fn` through the sampler, or just what `next_tokens` says.

    `steps` has every step served, in order. A step that does not fit what the cache holds raises `CacheError` and
    changes nothing.
    """

    def __init__(
        self,
        logits_fn: LogitsFn | None = None,
        *,
        next_tokens: NextTokensFn | None = None,
        num_slots: int = 1,
        max_length: int = 4096,
        max_rows: int = 256,
        max_children: int = 16,
        vocab_size: int | None = None,
        delay_s: DelayFn | None = None,
    ) -> None:
        if (logits_fn is None) == (next_tokens is None):
            raise ValueError("give exactly one of logits_fn and next_tokens")
        self.logits_fn = logits_fn
        self.next_tokens = next_tokens
        self.num_slots = num_slots
        self.max_length = max_length
        self.max_rows = max_rows
        self.max_children = max_children
        self.max_ahead = 0
        self.vocab_size = vocab_size
        self.delay_s = delay_s
        self.steps: list[DraftStep] = []
        self._slots: Slots[DraftSlot] = Slots(num_slots)

    def open(self, slot: int, *, sampling: Sampling, num_prompt: int) -> None:
        """See `DraftRunner.open`."""
        self._slots.open(slot, DraftSlot(Sampler(sampling, num_prompt=num_prompt, vocab_size=self.vocab_size)))

    def step(self, batch: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        """See `DraftRunner.step`."""
        if len({step.slot for step in batch}) != len(batch):
            raise CacheError("a slot is twice in one batch")
        settled = [self._settle(step) for step in batch]
        began_at = time.perf_counter()
        _sleep(self.delay_s, sum(len(step.commit) + len(step.nodes) for step in batch))
        compute_s = time.perf_counter() - began_at if self.delay_s is not None else 0.0
        self.steps += batch
        return [self._run(step, tokens, rows, compute_s) for step, (tokens, rows) in zip(batch, settled, strict=True)]

    def close(self, slot: int) -> None:
        """Free the slot. Closing a free slot does nothing."""
        self._slots.close(slot)

    def _settle(self, step: DraftStep) -> tuple[list[int], dict[int, Prefix]]:
        """The slot's committed tokens and tree rows after the step, with the new rows."""
        session = self._slots[step.slot]
        where = f"slot {step.slot}"
        tokens, held = list(session.tokens), dict(session.rows)
        for node in step.accepted:
            prefix = held.pop(node, None)
            # A row whose parent was never cached cannot become a committed row; it is in `commit` again.
            if prefix is not None and len(prefix) == len(tokens) + 1:
                if list(prefix[:-1]) != tokens:
                    raise CacheError(f"{where}: accepted node {node} does not follow the committed tokens")
                tokens.append(prefix[-1])
        if step.commit_start != len(tokens):
            raise CacheError(f"{where}: commit from {step.commit_start}, the cache has {len(tokens)} committed rows")
        tokens += step.commit
        unknown = step.keep - held.keys()
        if unknown:
            raise CacheError(f"{where}: nodes {sorted(unknown)} are to be kept, but are not in the cache")
        rows = {node: prefix for node, prefix in held.items() if node in step.keep}
        paths = {tuple(tokens), *rows.values()}
        for node, prefix in rows.items():
            if prefix[:-1] not in paths or len(prefix) <= len(tokens):
                raise CacheError(f"{where}: node {node} is to be kept, but what it follows is not")
        for row in step.nodes:
            if row.node in rows or row.node < 0:
                raise CacheError(f"{where}: node {row.node} is in the cache already")
            parent = tuple(tokens) if row.parent == -1 else rows.get(row.parent)
            if not parent:
                raise CacheError(f"{where}: parent {row.parent} of node {row.node} is not in the cache")
            rows[row.node] = (*parent, row.token)
        num_new = len(step.commit) + len(step.nodes)
        longest = max([len(tokens), *map(len, rows.values())])
        if max(num_new, len(rows)) > self.max_rows or longest > self.max_length:
            raise CacheError(
                f"{where}: {num_new} rows to run, {len(rows)} in the tree, at most {self.max_rows}; "
                f"{longest} positions of {self.max_length}"
            )
        if not 0 <= step.num_children <= self.max_children:
            raise CacheError(f"{where}: {step.num_children} children, at most {self.max_children}")
        if step.expand_root and not step.commit:
            raise CacheError(f"{where}: the root can be expanded only with its row")
        return tokens, rows

    def _run(
        self, step: DraftStep, tokens: list[int], rows: dict[int, Prefix], compute_s: float
    ) -> DraftResult | Exception:
        session = self._slots[step.slot]
        session.sampler.commit(tokens[len(session.tokens) :])
        session.tokens, session.rows = tokens, rows
        wanted = [(-1, tuple(tokens))] if step.expand_root else []
        wanted += [(row.node, rows[row.node]) for row in step.nodes]
        try:
            children = {node: self._propose(session, prefix, step.num_children) for node, prefix in wanted}
        except NumericalError as exc:
            return exc
        return DraftResult(children=children, compute_s=compute_s)

    def _propose(self, session: DraftSlot, prefix: Prefix, num: int) -> tuple[Child, ...]:
        if self.next_tokens is not None:
            return tuple(Child(token=t, logprob=-0.1 - i) for i, t in enumerate(self.next_tokens(prefix)[:num]))
        assert self.logits_fn is not None
        path = prefix[len(session.tokens) :]
        return tuple(session.sampler.propose(as_row(self.logits_fn(prefix)), len(prefix), path, num))


def _sleep(delay_s: DelayFn | None, num_rows: int) -> None:
    if delay_s is not None:
        time.sleep(delay_s(num_rows))
