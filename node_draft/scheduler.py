"""What the draft node does next. Pure: messages and results in, actions out, time an argument.

A session's life:

    loading    its prefix is still arriving in parts: it has no tree yet
    drafting   its tree is grown as the growth policy says, past everything in flight
    (released) forgotten; whatever still arrives for it is stale

One step of the model is in work at a time. Acceptances that come meanwhile are applied to the tree at once; the
step's children are dropped if their parent has died. What the cache must then forget is told to the runner with the
next step, as a rewind in place.

The cache rule: before a step, the committed rows of a session's cache are the longest run of committed tokens
that have been through the model; the step begins by feeding those that are missing, so that no token is skipped
(cases.md C020), and candidates are always drafted behind a complete prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from node_draft.session import (
    Action,
    CloseSlot,
    Counters,
    FrameAnswered,
    OpenSlot,
    Send,
    SentFrame,
    Session,
)
from speculation.growth import FlushState, GrowthPolicy
from speculation.passes import Child, DraftResult, DraftStep, NodeRow
from speculation.tree import ROOT, Arrival, Tree, score_byte
from wire.codec import digest_ids
from wire.messages import (
    MAX_NODES_PER_FRAME,
    Acceptance,
    Candidates,
    Error,
    Message,
    Prefix,
    Release,
    Resync,
)


class DraftScheduler:
    """Decides for all sessions of one draft node.

    Args:
        growth: the policy of every session.
        num_slots, max_length, max_rows: of the runner.
        max_ahead: of the runner.
        max_prefill: most committed tokens fed in one step, so that one long prompt does not hold up the others.
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
        self._turns: OrderedDict[str, None] = OrderedDict()
        self.running: tuple[str, int] | None = None  # (session, epoch) of the step in work
        self._running_nodes: tuple[int, ...] = ()

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
            self._turns[session.id] = None
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
            session.verify_s = timing.verify_s + timing.overhead_s
            sent = session.in_flight.pop(timing.frame, None)
            if sent is not None:
                answered = FrameAnswered(session.id, sent.started_at, sent.sent_at, sent.draft_s, timing, acceptance)
                actions.append(answered)
            # Frames before an answered one were lost, or will be answered out of turn: either way not waited for.
            for frame in [f for f in session.in_flight if f < timing.frame]:
                del session.in_flight[frame]
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

    def on_release(self, session_id: str) -> list[Action]:
        """Forget a session."""
        session = self.sessions.pop(session_id, None)
        if session is None:
            return []
        self._turns.pop(session_id, None)
        self._free_slots.append(session.slot)
        return [CloseSlot(session.slot)]

    def next_step(self, now: float) -> tuple[DraftStep | None, list[Action]]:
        """The next step for the model, if any session has work and none is running; and frames that are due."""
        actions: list[Action] = []
        if self.running is not None:
            return None, actions
        for session_id in list(self._turns):
            session = self.sessions[session_id]
            if session.tree is None:
                continue
            step = self._plan(session)
            actions += self._flush_if_due(session, now, can_grow=step is not None)
            if step is not None:
                self._turns.move_to_end(session_id)
                if session.started_at is None:
                    session.started_at = now
                self.running = (session_id, session.epoch)
                self._running_nodes = tuple(row.node for row in step.nodes)
                self.counters.num_steps += 1
                self.counters.num_rows += len(step.commit) + len(step.nodes)
                return step, actions
        return None, actions

    def on_step_done(self, result: DraftResult | Exception, now: float) -> list[Action]:
        """Take the children that the step proposed."""
        if self.running is None:
            raise ValueError("no step is running")
        session_id, epoch = self.running
        self.running = None
        session = self.sessions.get(session_id)
        if session is None or session.epoch != epoch or session.tree is None:
            return []
        if isinstance(result, Exception):
            refusal = Error(session=session_id, code="draft_failed", message=f"{type(result).__name__}: {result}")
            return [*self.on_release(session_id), Send(refusal)]
        session.draft_s += result.compute_s
        tree = session.tree
        session.cached.update(n for n in self._running_nodes if n in tree.nodes or n in session.accepted)
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

    def tip_position(self, session_id: str) -> int:
        """Position that the session's deepest path proposes next; for traces."""
        tree = self.sessions[session_id].tree
        assert tree is not None
        return max((node.position for node in tree.nodes.values()), default=tree.length - 1) + 1

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

    def _plan(self, session: Session) -> DraftStep | None:
        """The session's next step; None when the policy has nothing to grow."""
        tree = session.tree
        assert tree is not None
        if not session.wanted or len(session.in_flight) >= self.max_in_flight:
            return None
        # A node that has been run hangs on one that has, so these follow the cached tokens without a gap.
        kept = [node for node in session.accepted if node in session.cached]
        num_cached = session.num_cached + len(kept)
        commit = tuple(tree.committed[num_cached : num_cached + self.max_prefill])
        complete = num_cached + len(commit) == tree.length
        num_live = sum(node in tree.nodes for node in session.cached)
        room = self.max_rows - max(len(commit), num_live) if complete else 0
        expansion = self.growth.expand(tree, session.frontier, root_is_new=bool(commit), limit=session.limit, room=room)
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
        if len(rows) + expand_root == 1:
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
        self.counters.num_frames += 1
        message = Candidates(
            session=session.id,
            epoch=session.epoch,
            frame=frame,
            first_node=first,
            parents=tuple(self._wire_parent(session, tree, node) for node in nodes),
            tokens=tuple(tree.nodes[node].token for node in nodes),
            scores=tuple(score_byte(tree.step_logprob(node)) for node in nodes),
            draft_s=draft_s,
            overhead_s=max(0.0, now - started_at - draft_s),
        )
        return [Send(message), *self._flush(session, now)]

    @staticmethod
    def _wire_parent(session: Session, tree: Tree, node: int) -> int:
        parent = tree.nodes[node].parent
        return -tree.length if parent == ROOT else session.wire_ids[parent]
