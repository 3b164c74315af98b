"""What a scheduler asks a model runner for, and what it gets back.

Both nodes follow one scheme: the scheduler says what to compute (`DraftStep`, `VerifyPass`), a runner in the model's
own thread computes it, the scheduler is told the result. Runners are named in `engine/runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.messages import TokenLogprob
from wire.sampling import Sampling

__all__ = ["Child", "DraftResult", "DraftStep", "NodeRow", "Sampling", "TokenLogprob", "VerifyPass", "VerifyResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPass:
    """One pass of the target over the pending token and some candidates of one session.

    Attributes:
        slot: cache slot of the session.
        start: committed length; the pass decides positions start, start + 1, ...
        tokens: row 0 is the pending token (the last committed one, at position start - 1, not yet in the cache);
            rows 1.. are candidates, parents before children.
        parents: row of each row's parent; -1 for row 0.
        max_tokens: most tokens to commit; the walk stops there.
        num_logprobs: top log-probabilities to report with each token; None for none.
        num_tops: most probable tokens to report at each committed position.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    max_tokens: int
    num_logprobs: int | None = None
    num_tops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """The target's own tokens along the walk.

    Attributes:
        tokens: at least one; the target's token at start, start + 1, ...
        rows: rows of the accepted candidates in path order, so tokens[i] is the token of rows[i], and
            len(tokens) is len(rows) + 1 unless the walk was stopped on a candidate.
        logprobs: one for each token if asked for.
        tops: for each token, the target's `num_tops` most probable ones at its position, best first (of the raw
            logits: what else the target was inclined to say, for recycling); empty if not asked for or not known.
        compute_s: time in the model (forward, sampling, compaction).
        overhead_s: the runner's own Python around it.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    tops: tuple[tuple[int, ...], ...] = ()
    compute_s: float = 0.0
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A tree node to be run through the draft model. `parent` is a node id, or -1 for the last committed token."""

    node: int
    parent: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep:
    """One step of the drafter for one session.

    The cache of a slot holds committed tokens (one row for each position 0..) and, behind them, nodes of the tree.
    A step first settles the cache, then runs new rows:

    Attributes:
        slot: cache slot of the session.
        accepted: nodes, in path order, that have become committed tokens since the last step; those of their rows
            that the cache holds become committed rows without being computed again.
        keep: nodes still alive whose rows must stay; all other tree rows are dropped (a rewind, in place).
        commit_start, commit: committed tokens that the cache lacks, from position commit_start, fed in order.
        nodes: tree nodes to run, parents before children.
        expand_root: whether children of the last committed token are wanted (it must be the last of `commit`).
        num_children: children wanted for each row run in `nodes`, and for the root if expand_root.
        num_ahead: up to so many times more, run the best child and take its best child in turn: a chain in one call.
            For a single row whose one child is wanted, and a runner that has `max_ahead`.
        first_node: id that the first child is going to have, if num_ahead; those of the chain follow it.
    """

    slot: int
    accepted: tuple[int, ...]
    keep: frozenset[int]
    commit_start: int
    commit: tuple[int, ...]
    nodes: tuple[NodeRow, ...]
    expand_root: bool
    num_children: int
    num_ahead: int = 0
    first_node: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A proposed continuation. `logprob` <= 0 is the drafter's estimate that the target chooses it, in nats."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftResult:
    """Children by parent: -1 stands for the last committed token. Best child first.

    Of a chain, parents are in path order: the row of the step, then `first_node` and so on, each of which has been run.
    """

    children: dict[int, tuple[Child, ...]]
    compute_s: float = 0.0
    overhead_s: float = 0.0
