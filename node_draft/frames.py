"""The side of a session that faces its verify node: nodes of the tree become a frame of candidates. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from node_draft.session import SentFrame, Session
from speculation.tree import ROOT, Tree, score_byte
from wire.messages import Candidates


def next_frame(session: Session, tree: Tree, nodes: Sequence[int], now: float) -> Candidates:
    """The next frame, with these unsent nodes, parents first; notes that it is under way since `now`."""
    sent = set(nodes)
    session.unsent = [node for node in session.unsent if node not in sent]
    first = session.next_wire_id
    for i, node in enumerate(nodes):
        session.wire_ids[node] = first + i
    session.next_wire_id += len(nodes)
    frame = session.next_frame
    session.next_frame += 1
    started_at = now if session.started_at is None else session.started_at
    draft_s = min(session.draft_s, now - started_at)
    session.in_flight[frame] = SentFrame(started_at, now, draft_s)
    session.started_at, session.draft_s = None, 0.0
    applied = tuple(session.applied)
    session.applied.clear()
    return Candidates(
        session=session.id,
        epoch=session.epoch,
        frame=frame,
        first_node=first,
        parents=tuple(_wire_parent(session, tree, node) for node in nodes),
        tokens=tuple(tree.nodes[node].token for node in nodes),
        scores=tuple(score_byte(tree.step_logprob(node)) for node in nodes),
        draft_s=draft_s,
        overhead_s=max(0.0, now - started_at - draft_s),
        applied=applied,
    )


def _wire_parent(session: Session, tree: Tree, node: int) -> int:
    parent = tree.nodes[node].parent
    return -tree.length if parent == ROOT else session.wire_ids[parent]
