"""The relay's books: who is connected, who serves which session, what is kept of it; and the moves in them.

Each move changes the books and returns what the peers must be told. `relay/router.py` makes them, event by event.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from relay.actions import Action, DropReason, Forward, Send, SessionEnded, SessionMoved
from relay.kept import KeptAnswer
from relay.pairing import Peer, Session, choose_draft, choose_verify
from wire.codec import decode, encode
from wire.errors import MAX_REASON_CHARS, ProtocolError
from wire.messages import PROBE_PREFIX, Cancel, Done, Error, OpenSession, Paired, Release, Serving, Tokenize

KEEP_S = 30.0
TAKEOVER_WAIT_S = 10.0
MAX_KEPT_BYTES = 64 << 20
EPOCH_BLOCK, NUM_EPOCH_BLOCKS = 1024, 8192
"""All epochs of so many pairings and sessions are below MAX_POSITION."""
CLIENT_DUE, VERIFY_DUE, MOVE_DUE, ROOM_DUE = "client", "verify", "move", "room"
"""What a deadline is for: a client that is away, a session without a verify node, a node whose sessions move, one whose
queue was full."""
ROOM_S = 0.05
"""So long a full queue has before the next request is put into it."""


class Books:
    """Peers and sessions of one relay.

    Args:
        keep_s: how long a session with a resume key outlives its client's link.
        takeover_wait_s: how long a session waits for another verify node before its client is told.
        max_kept_bytes: bound of all that is kept of requests and answers; a session beyond it is not kept.
    """

    def __init__(
        self,
        *,
        keep_s: float = KEEP_S,
        takeover_wait_s: float = TAKEOVER_WAIT_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self.keep_s = keep_s
        self.takeover_wait_s = takeover_wait_s
        self.max_kept_bytes = max_kept_bytes
        self.peers: dict[str, Peer] = {}
        self.sessions: dict[str, Session] = {}
        self.drops: Counter[DropReason] = Counter()
        self.deadlines: dict[tuple[str, str], float] = {}
        self.kept_bytes = 0
        self.num_opened = 0
        self.num_moved = 0
        self.num_resumed = 0
        self._held: dict[str, list[str]] = {}
        """By verify node, sessions that found no room in its queue."""
        self._vacated: list[str] = []
        """Verify nodes that sessions have left, once for each, since `_settle`."""

    def nodes(self, role: str) -> list[Peer]:
        """The connected nodes of one role."""
        return [peer for peer in self.peers.values() if peer.hello.role == role]

    def serving(self) -> str:
        """The connected nodes and their models, in words."""
        nodes = [f"{peer} with {peer.model}" for peer in self.peers.values() if peer.hello.model is not None]
        return ", ".join(nodes) or "no node"

    def _begin(
        self, client: Peer, request: OpenSession | Tokenize, frame: bytes, verify: Peer, now: float
    ) -> list[Action]:
        answer = request if isinstance(request, OpenSession) else None
        session = Session(
            id=request.session,
            client=client.id,
            verify=verify.id,
            speculate=answer is not None and answer.speculate,
            opened_at=now,
            target=verify.model,
            kept=KeptAnswer(frame, answer.committed if answer is not None else ()),
            resume_key=answer.resume_key if answer is not None else "",
            epochs_from=self.num_opened % NUM_EPOCH_BLOCKS * EPOCH_BLOCK,
        )
        assert session.kept is not None
        self.kept_bytes += session.kept.num_bytes
        if self.kept_bytes > self.max_kept_bytes:
            self._stop_keeping(session)
        self.num_opened += 1
        self.sessions[session.id] = session
        client.sessions[session.id] = verify.sessions[session.id] = None
        actions: list[Action] = [Forward(verify.id, frame)]
        if session.resume_key:
            keep_s = self.keep_s if session.kept is not None else 0.0
            model = verify.model
            serving = Serving(session=session.id, model=model.name, target=model.fingerprint, keep_s=keep_s)
            actions.append(Send(client.id, serving))
        return actions + self._pair(session)

    def _is_repeated(self, client: Peer, session_id: str, frame: bytes) -> bool:
        """Whether a request has come twice over the link of its client: messages may."""
        session = self.sessions.get(session_id)
        if session is None or session.kept is None:
            return False
        return session.client == client.id and session.kept.opening == frame

    def _keep(self, session: Session, frame: bytes) -> None:
        """Keep a frame of the answer, if there is room; else the session can neither be resumed nor move."""
        kept = session.kept
        if kept is None:
            return
        before = kept.num_bytes
        try:
            kept.add(frame)
        except ProtocolError:
            self.kept_bytes += kept.num_bytes - before
            self._stop_keeping(session)
            return
        self.kept_bytes += kept.num_bytes - before
        if self.kept_bytes > self.max_kept_bytes:
            self._stop_keeping(session)

    def _stop_keeping(self, session: Session) -> None:
        if session.kept is not None:
            self.kept_bytes -= session.kept.num_bytes
            session.kept = None
            self.drops[DropReason.NOT_KEPT] += 1

    def _move(self, session: Session, why: str, now: float) -> list[Action]:
        session.lost, session.lost_at = why, now
        return [*self._leave_nodes(session, "moved to another verify node"), *self._take_over(session, now)]

    def _take_over(self, session: Session, now: float) -> list[Action]:
        """Have another verify node of the same model go on behind the committed tokens, or wait for one."""
        if session.kept is None:
            session.lost += "; what was committed took too much memory to be kept"
            return self._give_up(session, now)
        nodes = [node for node in self.nodes("verify") if node.id not in session.full]
        verify, _ = choose_verify("", session.target.fingerprint, nodes)
        if verify is None:
            self.deadlines[session.id, VERIFY_DUE] = session.lost_at + self.takeover_wait_s
            return []
        self.deadlines.pop((session.id, VERIFY_DUE), None)
        try:
            opening = decode(session.kept.opening)
            tokens = session.kept.tokens()
            frame = session.kept.opening
            if isinstance(opening, OpenSession):
                frame = encode(replace(opening, committed=tokens))
        except ProtocolError as exc:
            session.lost += f"; the answer so far cannot be handed on: {exc}"
            return self._give_up(session, now)
        session.verify = verify.id
        verify.sessions[session.id] = None
        self.num_moved += 1
        return [SessionMoved(session.id, str(verify), len(tokens)), Forward(verify.id, frame), *self._pair(session)]

    def _crowded_out(self, session: Session, verify: Peer, frame: bytes, now: float) -> list[Action]:
        """The verify node's line is full: another one takes the session. Where none has a place, an answer that has
        begun waits for one, and a new request is refused with this frame."""
        session.full.add(verify.id)
        others = [node for node in self.nodes("verify") if node.id not in session.full]
        other, _ = choose_verify("", session.target.fingerprint, others)
        if session.kept is None or (other is None and not session.lost):
            return self._finish(session, frame, "overloaded", now)
        return [
            *self._leave_nodes(session, "no place at its verify node", had_place=False),
            *self._take_over(session, now),
        ]

    def _no_room(self, session: Session, verify: Peer, why: str, now: float) -> list[Action]:
        """A request did not fit the queue to its verify node: another node takes it. Where none can, a new request is
        refused, and an answer that has begun tries again in a moment."""
        self.drops[DropReason.OVERLOADED] += 1
        self._held.setdefault(verify.id, []).append(session.id)
        self.deadlines.setdefault((verify.id, ROOM_DUE), now + ROOM_S)
        text = f"the way to {verify} is full: {why}"[:MAX_REASON_CHARS]
        refusal = encode(Error(session=session.id, code="overloaded", message=text))
        return self._crowded_out(session, verify, refusal, now)

    def _try_again(self, verify_id: str, now: float) -> list[Action]:
        """One of the sessions that found no room in the queue to a verify node goes there now."""
        held = self._held.pop(verify_id, [])
        while held:
            session = self.sessions.get(held.pop(0))
            if session is None or (session.id, VERIFY_DUE) not in self.deadlines:
                continue
            if held:
                self._held[verify_id] = held
                self.deadlines[verify_id, ROOM_DUE] = now + ROOM_S
            session.full.discard(verify_id)
            return self._take_over(session, now)
        return []

    def _forget_dues(self, node_id: str) -> None:
        """Nothing is to be done about a node any more."""
        for due in (MOVE_DUE, ROOM_DUE):
            self.deadlines.pop((node_id, due), None)
        self._held.pop(node_id, None)

    def _move_away(self, verify: Peer, now: float) -> list[Action]:
        """Hand a draining node's sessions to others; where there is none, they stay as long as it does."""
        actions: list[Action] = []
        for session in [self.sessions[session_id] for session_id in verify.sessions]:
            other, _ = choose_verify("", session.target.fingerprint, self.nodes("verify"))
            if other is not None and session.kept is not None:
                actions.append(Send(verify.id, Cancel(session=session.id, reason="moved to another node")))
                actions += self._move(session, f"{verify} is draining", now)
        return actions

    def _settle(self, now: float) -> list[Action]:
        """Give places that have become free to those that wait: at verify nodes, then at draft nodes."""
        actions: list[Action] = []
        for verify_id in self._vacated:
            verify = self.peers.get(verify_id)
            if verify is None or verify.draining:
                continue
            waiting = (self.sessions[name] for name, due in self.deadlines if due == VERIFY_DUE)
            session = next((s for s in waiting if s.target.fingerprint == verify.model.fingerprint), None)
            if session is not None:
                session.full.discard(verify_id)
                actions += self._take_over(session, now)
        self._vacated.clear()
        return actions + self._pair_waiting()

    def _give_up(self, session: Session, now: float) -> list[Action]:
        """No verify node goes on with the session."""
        self.drops[DropReason.VERIFY_LOST] += 1
        error = Error(session=session.id, code="verify_lost", message=session.lost[:MAX_REASON_CHARS])
        return self._finish(session, encode(error), "verify node lost", now)

    def _finish(self, session: Session, frame: bytes, reason: str, now: float) -> list[Action]:
        """The answer is over and this frame says so; a client that is away may still come for it."""
        actions = self._leave_nodes(session, reason)
        if session.client is None:
            session.last = frame
            return actions
        return [Forward(session.client, frame), *actions, *self._end(session, reason, now)]

    def _abandon(self, session: Session, reason: str, now: float) -> list[Action]:
        """Nobody wants the answer any more."""
        actions: list[Action] = []
        if session.verify is not None:
            actions.append(Send(session.verify, Cancel(session=session.id, reason="client gone")))
        return [*actions, *self._end(session, reason, now)]

    def _cancelled(self, session: Session, now: float) -> list[Action]:
        """The client does not want an answer that nobody is working on."""
        num_tokens = len(session.kept.tokens()) if session.kept is not None else 0
        done = Done(
            session=session.id, finish_reason="cancelled", prompt_tokens=0, completion_tokens=num_tokens
        )  # fmt: skip
        return self._finish(session, encode(done), "cancelled", now)

    def _leave_nodes(self, session: Session, reason: str, *, had_place: bool = True) -> list[Action]:
        """No node has a part in the session any more; its draft node is told, its verify node knows."""
        self.deadlines.pop((session.id, VERIFY_DUE), None)
        if session.verify is not None and session.verify in self.peers:
            del self.peers[session.verify].sessions[session.id]
            if had_place:
                self._vacated.append(session.verify)
        session.verify = None
        if session.draft is None:
            return []
        return [Send(self._unpair(session), Release(session=session.id, reason=reason))]

    def _end(self, session: Session, reason: str, now: float) -> list[Action]:
        """Forget a session and free it at the draft node; whoever calls then pairs what waits for the room."""
        actions = self._leave_nodes(session, reason)
        del self.sessions[session.id]
        self.deadlines.pop((session.id, CLIENT_DUE), None)
        if session.kept is not None:
            self.kept_bytes -= session.kept.num_bytes
        if session.client in self.peers:
            del self.peers[session.client].sessions[session.id]
        return [*actions, SessionEnded(session.id, reason, now - session.opened_at)]

    def _pair_waiting(self) -> list[Action]:
        """Pair what waits for a draft node, the oldest session first."""
        if not any(draft.has_room for draft in self.nodes("draft")):
            return []
        return [action for session in self.sessions.values() for action in self._pair(session)]

    def _pair(self, session: Session) -> list[Action]:
        if not session.speculate or session.draft is not None or session.verify is None:
            return []
        draft = choose_draft(session, self.nodes("draft"))
        if draft is None:
            return []
        session.draft = draft.id
        session.epoch += 1
        draft.sessions[session.id] = None
        epoch = session.epochs_from + session.epoch
        return [Send(session.verify, Paired(session=session.id, epoch=epoch, draft=draft.hello.name))]

    def _unpair(self, session: Session) -> str:
        draft = session.draft
        assert draft is not None
        del self.peers[draft].sessions[session.id]
        session.draft = None
        return draft

    def _session_of(self, node: Peer, session_id: str) -> Session | None:
        """The session, if this node serves it; a frame for another is late, which is normal, and counted."""
        session = self.sessions.get(session_id)
        if session is not None and node.id in (session.verify, session.draft):
            return session
        self._drop(DropReason.UNKNOWN_SESSION if session is None else DropReason.NOT_PAIRED)
        return None

    def _probe(self, client: Peer, name: str, frame: bytes, now: float) -> list[Action]:
        known = self.peers.values() if name.startswith(PROBE_PREFIX) else ()
        for peer in known:
            if peer.hello.name == name and peer.hello.role == "client" and peer.credential == client.credential:
                return [Forward(peer.id, frame)]
        text = f"no client {name} with the credential of {client.hello.name} takes probes here"
        return self._fail(client, name, DropReason.NO_PROBE_PEER, "no_probe_peer", text)

    def _drop(self, reason: DropReason) -> list[Action]:
        self.drops[reason] += 1
        return []

    def _fail(self, client: Peer, session_id: str, drop: DropReason, code: str, message: str) -> list[Action]:
        self.drops[drop] += 1
        return [Send(client.id, Error(session=session_id, code=code, message=message[:MAX_REASON_CHARS]))]
