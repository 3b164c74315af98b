"""What the draft node does next. Pure: messages and results in, actions out, time an argument.

A session's life:

    loading    its prefix is still arriving in parts: it has no tree yet
    drafting   its tree is grown as the growth policy says, past everything in flight
    (released) forgotten; whatever still arrives for it is stale

One step of the model is in work at a time; it serves all sessions that want to grow, as far as it has rows, the one
served longest ago first. Acceptances that come meanwhile are applied to the tree at once; children are dropped
if their parent has died. What the cache must forget is told to the runner with the next step, as a rewind in place.

The cache rule: before a step, the committed rows of a session's cache are the longest run of committed tokens
that have been through the model; the step begins by feeding those that are missing, so that no token is skipped
(cases.md C020), and candidates are always drafted behind a complete prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from node_draft.frames import next_frame
from node_draft.session import (
    Action,
    CloseSlot,
    Counters,
    FrameAnswered,
    OpenSlot,
    Send,
    Session,
)
from speculation.batching import Rota
from speculation.growth import FlushState, GrowthPolicy
from speculation.passes import Child, DraftResult, DraftStep, NodeRow
from speculation.tree import ROOT, Arrival, Tree
from wire.codec import digest_ids
from wire.errors import in_words
from wire.messages import (
    MAX_NODES_PER_FRAME,
    Acceptance,
    AppliedRound,
    Error,
    Message,
    Prefix,
    Release,
    Resync,
)

LEAST_SHARE = 2
"""Nodes that a session may run in a step, however many share it."""


class DraftScheduler:
    """Decides for all sessions of one draft node.

    Args:
        growth: the policy of every session.
        num_slots, max_length, max_rows: of the runner; max_rows is that of a step, all sessions together.
        max_ahead: of the runner; used while one session has the drafter to itself.
        max_prefill: most committed tokens fed in one step, of all sessions together, so that one long prompt does not
            hold up the others.
    """

    def __init__(
        self,
        *,
        growth: GrowthPolicy,
        num_slots: int,
        max_length: int,
        max_rows: int,
        max_ahead: int = 0,
        max_prefill: int = 128,
        max_in_flight: int = 256,
    ) -> None:
        self.growth = growth
        self.max_length = max_length
        self.max_rows = max_rows
        self.max_ahead = max_ahead
        self.max_prefill = min(max_prefill, max_rows)
        self.max_in_flight = max_in_flight
        self.sessions: dict[str, Session] = {}
        self.counters = Counters()
        self._free_slots = list(range(num_slots))[::-1]
        self._turns = Rota()
        self.running: list[Session] = []  # of each part of the step in work
        self._running_nodes: list[tuple[int, ...]] = []
        self._num_growing = 0

    def on_message(self, message: Message, now: float) -> list[Action]:
        """Handle whatever the relay delivers; types that are not for a draft node are stale."""
        match message:
            case Prefix():
                return self.on_prefix(message)
            case Acceptance():
                return self.on_acceptance(message, now)
            case Release():
                return self.on_release(message.session)
            case Error(session=str(session)):
                return self.on_release(session)
        self.counters.num_stale_messages += 1
        return []

    def on_prefix(self, prefix: Prefix) -> list[Action]:
        """Take one part of a session's prefix; a new epoch starts the session anew."""
        actions: list[Action] = []
        session = self.sessions.get(prefix.session)
        if session is not None and session.epoch > prefix.epoch:
            self.counters.num_stale_messages += 1
            return []
        if session is None or session.epoch < prefix.epoch:
            actions += self.on_release(prefix.session)
            refusal = self._refusal(prefix)
            if refusal:
                return [*actions, Send(Error(session=prefix.session, code="draft_refused", message=refusal))]
            session = Session(
                id=prefix.session,
                epoch=prefix.epoch,
                slot=self._free_slots.pop(),
                total=prefix.total,
                # The cache holds max_length positions, so that much can be drafted and no more.
                limit=min(prefix.limit, self.max_length),
                digest=prefix.digest,
                num_prompt=prefix.prompt_tokens,
                sampling=prefix.sampling,
            )
            self.sessions[session.id] = session
            self._turns.join(session.id)
            actions.append(OpenSlot(session.slot, session.sampling, session.num_prompt))
        if session.tree is None:
            session.parts[prefix.start] = prefix.tokens
            actions += self._load(session)
        return actions

    def on_acceptance(self, acceptance: Acceptance, now: float) -> list[Action]:
        """Walk the tree along newly committed tokens. Late and repeated ones do nothing; a gap asks for a resync."""
        session = self.sessions.get(acceptance.session)
        if session is None or session.epoch != acceptance.epoch or session.tree is None:
            self.counters.num_stale_messages += 1
            return []
        actions: list[Action] = []
        session.wanted = acceptance.wanted
        for timing in acceptance.rounds:
            sent = session.take_answered(timing)
            if sent is not None:
                answered = FrameAnswered(session.id, sent.started_at, sent.sent_at, sent.draft_s, timing, acceptance)
                actions.append(answered)
        tree = session.tree
        if acceptance.start > tree.length:
            if session.resync_at != tree.length:
                session.resync_at = tree.length
                self.counters.num_resyncs += 1
                actions.append(Send(Resync(session=session.id, epoch=session.epoch, length=tree.length)))
            return actions
        fresh = acceptance.tokens[tree.length - acceptance.start :]
        commit = tree.commit(fresh)
        session.accepted += commit.passed
        session.cached.difference_update(commit.died)
        for node in (*commit.died, *commit.passed):
            session.wire_ids.pop(node, None)
        session.unsent = [node for node in session.unsent if node in tree.nodes]
        if acceptance.orphan_frame >= session.resend_floor:
            # Resend, not redraft: what was lost is the frame, the nodes are as good as before.
            session.resend_floor = session.next_frame
            session.unsent = list(tree.nodes)
            session.wire_ids.clear()
            self.counters.num_resends += 1
            actions += self._flush(session, now)
        return actions

    def on_round_over(self, session_id: str, epoch: int, applied: AppliedRound) -> None:
        """The shell has measured how long the acceptance that ended a round took to apply: the next frame tells it."""
        session = self.sessions.get(session_id)
        if session is not None and session.epoch == epoch:
            session.applied.append(applied)

    def on_release(self, session_id: str) -> list[Action]:
        """Forget a session."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return []
        self._turns.leave(session_id)
        self._free_slots.append(session.slot)
        return [CloseSlot(session.slot)]

    def next_step(self, now: float) -> tuple[list[DraftStep], list[Action]]:
        """The next step for the model, in parts that each belong to another session; and frames that are due.

        No parts while a step is running or no session has work.
        """
        actions: list[Action] = []
        parts: list[DraftStep] = []
        if self.running:
            return parts, actions
        room, tokens = self.max_rows, self.max_prefill
        growing = [session for name in self._turns if (session := self.sessions[name]).tree is not None]
        self._num_growing = sum(session.wanted for session in growing)
        for session in growing:
            max_commit = min(tokens, room)
            part = self._plan(session, room=room, max_commit=max_commit) if room > 0 else None
            # Who is left out for want of room has not stopped growing, and is first in the next step.
            actions += self._flush_if_due(session, now, can_grow=part is not None or max_commit < 1)
            if part is not None:
                session.started_at = now if session.started_at is None else session.started_at
                parts.append(part)
                self.running.append(session)
                room -= len(part.commit) + len(part.nodes)
                tokens -= len(part.commit)
        self._turns.served([session.id for session in self.running])
        self._running_nodes = [tuple(row.node for row in part.nodes) for part in parts]
        self.counters.num_steps += bool(parts)
        self.counters.num_rows += self.max_rows - room
        return parts, actions

    def on_step_done(self, results: Sequence[DraftResult | Exception], now: float) -> list[Action]:
        """Take the children that the step proposed, for each of its parts."""
        running, self.running = self.running, []
        if not running or len(results) != len(running):
            raise ValueError(f"a step of {len(running)} parts is running, {len(results)} results came")
        actions: list[Action] = []
        for session, nodes, result in zip(running, self._running_nodes, results, strict=True):
            # By identity: another session of this name may have come meanwhile, under the same epoch.
            if self.sessions.get(session.id) is session and session.tree is not None:
                actions += self._on_part_done(session, session.tree, nodes, result, now)
        return actions

    def _on_part_done(
        self, session: Session, tree: Tree, nodes: tuple[int, ...], result: DraftResult | Exception, now: float
    ) -> list[Action]:
        if isinstance(result, Exception):
            refusal = Error(session=session.id, code="draft_failed", message=in_words(result))
            return [*self.on_release(session.id), Send(refusal)]
        session.draft_s += result.compute_s
        session.cached.update(n for n in nodes if n in tree.nodes or n in session.accepted)
        first_node = session.next_node
        whole = True
        for parent, children in result.children.items():
            if parent >= first_node:
                # A chain's own node has been run. Where one of them has passed unseen its row is dropped, and those
                # of the nodes behind it hang on nothing.
                whole = whole and parent in tree.nodes
                if whole:
                    session.cached.add(parent)
            self._attach(session, tree, parent, children)
        return self._flush_if_due(session, now, can_grow=True)

    def _attach(self, session: Session, tree: Tree, parent: int, children: Sequence[Child]) -> None:
        """Hang the children that are probable enough on their parent, if it still lives."""
        above = tree.logprob(parent) if parent in tree.nodes else 0.0
        least = self.growth.least_logprob - above
        kept = [(child.token, child.logprob) for child in children if child.logprob >= least]
        first = session.next_node
        session.next_node += len(kept)
        if parent in tree.nodes or (parent == ROOT and session.num_cached == tree.length):
            live = tree.grow(first, parent, kept)
        else:
            # ROOT means the last token that was committed when the step was planned, not now.
            anchor = parent if parent != ROOT else -session.num_cached
            live = [
                first + i
                for i, (token, logprob) in enumerate(kept)
                if tree.add(first + i, anchor, token, logprob) is Arrival.LIVE
            ]
        session.unsent += live
        for node in live:
            session.frontier.push(tree, node)
        self.counters.num_nodes += len(live)
        self.counters.num_wasted += len(kept) - len(live)

    def _refusal(self, prefix: Prefix) -> str:
        if not self._free_slots:
            return f"all {len(self.sessions)} slots of the draft node are taken"
        if prefix.total >= self.max_length:
            return f"prefix has {prefix.total} tokens, the draft node's cache holds {self.max_length}"
        return ""

    def _load(self, session: Session) -> list[Action]:
        """Start drafting when the parts make up the whole prefix and its digest is right."""
        tokens: list[int] = []
        while (part := session.parts.get(len(tokens))) is not None and part:
            tokens += part
        if len(tokens) != session.total:
            return []
        if digest_ids(tokens) != session.digest:
            message = f"prefix of {session.total} tokens does not have the digest {session.digest}"
            return [*self.on_release(session.id), Send(Error(session=session.id, code="malformed", message=message))]
        session.parts.clear()
        session.tree = Tree(tokens)
        return []

    def _plan(self, session: Session, *, room: int, max_commit: int) -> DraftStep | None:
        """The session's part of the next step; None when the policy has nothing to grow, or there is no room for it.

        Args:
            room: rows that are left of the step.
            max_commit: most committed tokens to feed.
        """
        tree = session.tree
        assert tree is not None
        if not session.wanted or len(session.in_flight) >= self.max_in_flight:
            return None
        # A node that has been run hangs on one that has, so these follow the cached tokens without a gap.
        kept = [node for node in session.accepted if node in session.cached]
        num_cached = session.num_cached + len(kept)
        commit = tuple(tree.committed[num_cached : num_cached + max_commit])
        complete = num_cached + len(commit) == tree.length
        if not (complete or commit):
            return None
        num_live = sum(node in tree.nodes for node in session.cached)
        room = max(0, min(room - len(commit), self.max_rows - num_live)) if complete else 0
        share = min(room, max(LEAST_SHARE, 2 * self.growth.rows // max(2, self._num_growing)))
        expansion = self.growth.expand(
            tree, session.frontier, root_is_new=bool(commit), limit=session.limit, room=share
        )  # fmt: skip
        if expansion is None:
            return None
        wanted = [node for node in expansion.nodes if node != ROOT]
        rows = self._rows(session, wanted, room)
        run = {row.node for row in rows}
        for node in wanted:
            if node not in run:
                session.frontier.push(tree, node)
        expand_root = complete and bool(commit) and ROOT in expansion.nodes
        if not (commit or rows):
            return None
        num_ahead = 0
        if self._num_growing == 1 and len(rows) + expand_root == 1:
            num_ahead = max(0, min(expansion.num_ahead, self.max_ahead, room - len(rows)))
        session.cached = {node for node in session.cached if node in tree.nodes}
        keep = frozenset(session.cached)
        session.accepted.clear()
        session.num_cached = num_cached + len(commit)
        return DraftStep(
            slot=session.slot,
            accepted=tuple(kept),
            keep=keep,
            commit_start=num_cached,
            commit=commit,
            nodes=tuple(rows),
            expand_root=expand_root,
            num_children=expansion.num_children,
            num_ahead=num_ahead,
            first_node=session.next_node,
        )

    def _rows(self, session: Session, wanted: list[int], room: int) -> list[NodeRow]:
        """Rows for the wanted nodes and those of their ancestors that the cache lacks, parents first."""
        tree = session.tree
        assert tree is not None
        rows: dict[int, NodeRow] = {}
        for node in wanted:
            missing = [n for n in tree.path(node) if n not in session.cached and n not in rows]
            if len(rows) + len(missing) > room:
                break
            for n in missing:
                rows[n] = NodeRow(node=n, parent=tree.nodes[n].parent, token=tree.nodes[n].token)
        return list(rows.values())

    def _flush_if_due(self, session: Session, now: float, *, can_grow: bool) -> list[Action]:
        """Send what is good enough, if the policy says that it is time."""
        tree = session.tree
        if tree is None or not session.unsent:
            return []
        state = FlushState(
            num_unsent=len(session.unsent),
            can_grow=can_grow,
            num_live_sent=len(session.wire_ids),
            since_flush_s=now - session.flushed_at,
            verify_s=session.verify_s,
            num_sessions=max(1, self._num_growing),
        )
        return self._flush(session, now) if self.growth.flush(state) else []

    def _flush(self, session: Session, now: float) -> list[Action]:
        """Send the unsent nodes that are good enough, in frames."""
        tree = session.tree
        if tree is None:
            return []
        # Looking through them is a part of the cost of a frame, so it counts as one.
        session.flushed_at = now
        ready = [node for node in session.unsent if self.growth.sendable(tree, node)]
        nodes = ready[:MAX_NODES_PER_FRAME]
        if not nodes:
            return []
        self.counters.num_frames += 1
        return [Send(next_frame(session, tree, nodes, now)), *self._flush(session, now)]
