"""What the next piece of work of a verify node is made of: chunks of prompts, or one pass for many sessions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from node_verify.session import Prefill, Session, Verify
from speculation.batching import Turns, fill_pass
from speculation.costs import PassCosts
from speculation.passes import VerifyPass
from speculation.selection import Pick, SelectionPolicy


def plan_prefill(turns: Turns, sessions: Mapping[str, Session]) -> list[Prefill]:
    """The next piece of prefill; nothing if no session has prompt tokens left."""
    left = {name: sessions[name].num_to_prefill for name in turns.reading}
    chunks = [(sessions[name], num_tokens) for name, num_tokens in turns.prefill(left)]
    return [
        Prefill(each.id, each.slot, each.num_prefilled, each.num_prefilled + num_tokens) for each, num_tokens in chunks
    ]


def plan_pass(
    ready: Sequence[Session],
    selection: SelectionPolicy,
    *,
    max_rows: int,
    costs: PassCosts | None,
    whole: bool,
    num_tops: int,
) -> list[Verify]:
    """The next pass, for as many of the sessions that are ready as fit.

    Args:
        ready: in turn.
        whole: see `speculation.batching.fill_pass`.
        num_tops: most probable tokens to report for sessions that speculate.
    """
    offers = [_offer(session, selection) for session in ready]
    shares = fill_pass(offers, max_rows=max_rows, costs=costs, whole=whole)
    return [_verify(session, picks, num_tops) for session, picks in zip(ready, shares, strict=False)]


def lacks_candidates(session: Session) -> bool:
    """Whether a paired session has none, though it could use some."""
    return session.drafting and not (session.tree and session.tree.nodes) and _max_depth(session) >= 1


def _max_depth(session: Session) -> int:
    """Of candidates worth a row. The last position needs none: the target decides it in the pass of the one before."""
    assert session.request is not None
    assert session.tree is not None
    return session.request.limit - session.tree.length - 1 if session.request.speculate else 0


def _offer(session: Session, selection: SelectionPolicy) -> Iterator[Pick]:
    max_depth = _max_depth(session)
    if max_depth < 1 or session.tree is None:
        return iter(())
    return selection.candidates(session.tree, session.estimates, max_depth=max_depth)


def _verify(session: Session, picks: Sequence[Pick], num_tops: int) -> Verify:
    request, tree = session.request, session.tree
    assert request is not None
    assert tree is not None
    request_pass = VerifyPass(
        slot=session.slot,
        start=tree.length,
        tokens=(tree.committed[-1], *(pick.token for pick in picks)),
        parents=(-1, *(pick.parent + 1 for pick in picks)),
        max_tokens=request.limit - tree.length,
        num_logprobs=request.num_logprobs,
        num_tops=num_tops if request.speculate else 0,
    )
    sources = tuple(pick.source for pick in picks)
    return Verify(session.id, request_pass, sources, max((pick.depth for pick in picks), default=0))
