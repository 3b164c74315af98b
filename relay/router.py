"""Which frame goes to whom: the relay's decisions, without IO.

The shell reports peers, frames and the time, and performs the actions that come back. Frames are routed by type and
session as opaque bytes; only what is rare (OpenSession, Resume, Cancel, Error, Draining) is decoded.

    from     type                   goes to                     and
    ------   --------------------   -------------------------   --------------------------------------------------
    client   OpenSession            a verify node               the session begins; a draft node is paired if one fits
    client   Resume                 -                           the client gets what was committed meanwhile
    client   Tokenize               a verify node               a session of its own, without a draft node
    client   Cancel                 the session's verify node   the session ends with the Done that answers it
    client   Probe                  the client of that name     nothing; it must have the same credential
    verify   TextDelta              the session's client        it is kept
    verify   Waiting                the session's client
    verify   Done, Tokenized, Error the session's client        the session ends
    verify   Error "malformed"      the session's draft node    it is not listened to again; another is paired
    verify   Error "draining"       -                           another verify node takes the session
    verify   Error "overloaded"     -                           the same, and an answer that has begun waits for a place
    verify   Prefix, Acceptance     the session's draft node
    draft    Candidates, Resync     the session's verify node
    draft    Error                  the session's verify node   the draft node is out; another is paired
    any      Draining               -                           the sender gets no new session; its own move away

A session without a draft node goes on (the target alone) and is paired as soon as one that fits has room. A session
whose verify node is gone is handed to another one with the same model, behind the tokens committed so far; if none is
there it waits `takeover_wait_s`, then its client is told "verify_lost". A session with a resume key whose client is
gone goes on for `keep_s`, any other ends. A peer that is closed here is forgotten at once.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from relay.actions import Action, ClosePeer, DropReason, Forward, Send, SessionEnded, SessionMoved
from relay.books import CLIENT_DUE, KEEP_S, MAX_KEPT_BYTES, MOVE_DUE, ROOM_DUE, TAKEOVER_WAIT_S, Books
from relay.pairing import MAX_SESSIONS_PER_CLIENT, Peer, choose_draft, choose_verify, fits_none
from wire.codec import decode, peek
from wire.connection import version_mismatch
from wire.errors import MAX_REASON_CHARS, ProtocolError
from wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Draining,
    Error,
    Hello,
    OpenSession,
    PeerGone,
    Release,
    Resume,
    Tokenize,
)

__all__ = ["Action", "ClosePeer", "DropReason", "Forward", "Router", "Send", "SessionEnded", "SessionMoved"]

MALFORMED_LIMIT = 20
MOVE_BEFORE_S = 5.0
"""A draining verify node's sessions move so long before it goes; those that end earlier need not."""
DRAFT_FAULT = "malformed"
"""The code of a verify node's Error that is about the draft node's candidates; the answer itself goes on."""


class Router(Books):
    """Decides for all peers and sessions of one relay.

    Args:
        malformed_limit: a peer is closed with its frame number `malformed_limit` that no correct peer sends.
    """

    def __init__(
        self,
        *,
        malformed_limit: int = MALFORMED_LIMIT,
        keep_s: float = KEEP_S,
        takeover_wait_s: float = TAKEOVER_WAIT_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        super().__init__(keep_s=keep_s, takeover_wait_s=takeover_wait_s, max_kept_bytes=max_kept_bytes)
        self.malformed_limit = malformed_limit
        self.draining = False

    def on_hello(
        self,
        peer_id: str,
        hello: Hello,
        now: float,
        *,
        group: str = "",
        max_sessions: int = MAX_SESSIONS_PER_CLIENT,
        credential: str = "",
    ) -> list[Action]:
        """A peer has introduced itself. It is in, unless a ClosePeer for it comes back.

        Args:
            group, max_sessions: sessions of all clients of one group are held to this limit together; "" is no group.
            credential: what the peer came with; probes go between clients of the same one.
        """
        if peer_id in self.peers:
            raise ValueError(f"peer {peer_id} is connected already")
        peer = Peer(peer_id, hello, group or peer_id, max_sessions, credential)
        if hello.protocol != PROTOCOL_VERSION:
            return [ClosePeer(peer_id, "version", version_mismatch(hello, self.serving())[:MAX_REASON_CHARS])]
        if self.draining:
            self.drops[DropReason.DRAINING] += 1
            return [ClosePeer(peer_id, "draining", "the relay is shutting down")]
        if hello.role == "draft":
            reason = fits_none(peer, self.nodes("verify"))
            if reason is not None:
                return [ClosePeer(peer_id, "mismatch", reason[:MAX_REASON_CHARS])]
        self.peers[peer_id] = peer
        actions: list[Action] = []
        if hello.role == "verify":
            for draft in self.nodes("draft"):
                reason = fits_none(draft, self.nodes("verify"))
                if reason is not None:
                    actions += self.expel(draft.id, "mismatch", reason, now)
            # A copy: who cannot be handed on is forgotten.
            for session in list(self.sessions.values()):
                if session.verify is None and session.last is None:
                    actions += self._take_over(session, now)
        return actions + self._settle(now)

    def on_gone(self, peer_id: str, now: float, reason: str = "link lost", *, final: bool = False) -> list[Action]:
        """A peer's link is gone; nothing happens if the peer was closed from here.

        Args:
            final: it will not come back for its sessions.
        """
        peer = self.peers.pop(peer_id, None)
        if peer is None:
            return []
        self._forget_dues(peer_id)
        text = f"{peer} was lost: {reason}"[:MAX_REASON_CHARS]
        actions: list[Action] = []
        for session in [self.sessions[session_id] for session_id in peer.sessions]:
            match peer.hello.role:
                case "client" if session.resume_key and session.kept is not None and not final:
                    session.client = None
                    self.deadlines[session.id, CLIENT_DUE] = now + self.keep_s
                case "client":
                    actions += self._abandon(session, "client gone", now)
                case "verify":
                    session.lost, session.lost_at = text, now
                    actions += self._leave_nodes(session, "verify node lost")
                    actions += self._take_over(session, now)
                case _:
                    session.draft = None
                    assert session.verify is not None, "who has no verify node has no draft node"
                    actions.append(Send(session.verify, PeerGone(session=session.id, role="draft", reason=text)))
        return actions + self._settle(now)

    def next_timer(self) -> float | None:
        """When `on_timer` wants to be called; None for not at all."""
        return min(self.deadlines.values(), default=None)

    def on_timer(self, now: float) -> list[Action]:
        """End what nobody came back for, give up what nobody took over, move what must move."""
        actions: list[Action] = []
        for name, due in [key for key, at in self.deadlines.items() if at <= now]:
            if self.deadlines.pop((name, due), None) is None:
                continue
            if due == MOVE_DUE:
                actions += self._move_away(self.peers[name], now)
                continue
            if due == ROOM_DUE:
                actions += self._try_again(name, now)
                continue
            session = self.sessions[name]
            if due == CLIENT_DUE:
                self.drops[DropReason.CLIENT_AWAY] += 1
                actions += self._abandon(session, f"its client was away for {self.keep_s:g} s", now)
            else:
                full = f", {len(session.full)} with the same model had no place" if session.full else ""
                session.lost += f"; no other node took over within {self.takeover_wait_s:g} s{full}"
                actions += self._give_up(session, now)
        return actions + self._settle(now) if actions else actions

    def on_drain(self, grace_s: float, reason: str) -> list[Action]:
        """The relay itself goes: no new peers and sessions; everybody is told."""
        self.draining = True
        return [Send(peer_id, Draining(grace_s=grace_s, reason=reason)) for peer_id in self.peers]

    def on_frame(self, peer_id: str, frame: bytes, now: float) -> list[Action]:
        """Take one frame of a peer."""
        try:
            kind, session_id = peek(frame)
        except ProtocolError as exc:
            return self.on_malformed(peer_id, str(exc), now)
        return self.route(peer_id, kind, session_id, frame, now)

    def route(self, peer_id: str, kind: str, session_id: str | None, frame: bytes, now: float) -> list[Action]:
        """Take one frame whose type and session are known."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return self._drop(DropReason.UNKNOWN_PEER)
        handler = _HANDLERS.get((peer.hello.role, kind))
        try:
            if session_id is None:
                if kind == Draining.type:
                    return self._draining(peer, frame, now)
                if kind == Error.type:
                    return self._drop(DropReason.NOT_ABOUT_A_SESSION)
                if handler is not None:
                    raise ProtocolError(f"{kind} needs a session")
            elif handler is not None:
                return handler(self, peer, session_id, frame, now)
        except ProtocolError as exc:
            return self.on_malformed(peer_id, str(exc), now)
        text = f"{kind} is not for a {peer.hello.role} to send"
        return self._malformed(peer, DropReason.WRONG_ROLE, "not_allowed", text, now)

    def on_malformed(self, peer_id: str, reason: str, now: float) -> list[Action]:
        """A peer sent what no correct peer sends; only that peer is told, and closed when it does not stop."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return self._drop(DropReason.UNKNOWN_PEER)
        return self._malformed(peer, DropReason.MALFORMED, "malformed", reason, now)

    def on_queue_full(self, peer_id: str, frame: bytes, why: str, now: float) -> list[Action]:
        """There is no room in a peer's queue for a frame (empty for a message of the relay's own). Many requests at
        once need not mean that a verify node does not read; anything else does, and the peer is closed."""
        kind, session_id = peek(frame) if frame else ("", None)
        session = self.sessions.get(session_id or "")
        if session is not None and session.verify == peer_id and kind in (OpenSession.type, Tokenize.type):
            return [*self._no_room(session, self.peers[peer_id], why, now), *self._settle(now)]
        self.drops[DropReason.SLOW_CONSUMER] += 1
        return self.expel(peer_id, "slow_consumer", f"it reads too slowly: {why}", now)

    def expel(self, peer_id: str, code: str, reason: str, now: float) -> list[Action]:
        """Close a peer; its sessions go as if it had left."""
        if peer_id not in self.peers:
            return []
        reason = reason[:MAX_REASON_CHARS]
        final = code != "slow_consumer"
        return [ClosePeer(peer_id, code, reason), *self.on_gone(peer_id, now, reason, final=final)]

    def _open(self, client: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        try:
            request = decode(frame)
        except ProtocolError as exc:
            return self._fail(client, session_id, DropReason.BAD_REQUEST, "bad_request", str(exc))
        assert isinstance(request, OpenSession | Tokenize), "peek and decode agree on the type"
        if self._is_repeated(client, session_id, frame):
            return self._drop(DropReason.REPEATED)
        if session_id in self.sessions:
            text = f"session {session_id} exists already"
            return self._fail(client, session_id, DropReason.BAD_REQUEST, "bad_session", text)
        if self.draining:
            return self._fail(client, session_id, DropReason.DRAINING, "draining", "the relay is shutting down")
        num_open = sum(len(peer.sessions) for peer in self.nodes("client") if peer.group == client.group)
        if num_open >= client.max_sessions:
            text = f"{num_open} sessions are open already, the limit is {client.max_sessions}"
            return self._fail(client, session_id, DropReason.OVERLOADED, "overloaded", text)
        fingerprint = request.target if isinstance(request, OpenSession) else ""
        verify, why_not = choose_verify(request.model, fingerprint, self.nodes("verify"))
        if verify is None:
            return self._fail(client, session_id, DropReason.NO_VERIFY_NODE, "no_verify_node", why_not)
        return self._begin(client, request, frame, verify, now)

    def _resume(self, client: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        resume = decode(frame)
        assert isinstance(resume, Resume), "peek and decode agree on the type"
        session = self.sessions.get(session_id)
        known = session is not None and hmac.compare_digest(session.resume_key.encode(), resume.key.encode())
        if session is None or not known:
            text = f"session {session_id} is not known here with this key; it may have ended"
            return self._fail(client, session_id, DropReason.UNKNOWN_SESSION, "unknown_session", text)
        missed = session.kept.since(resume.position) if session.kept is not None else None
        if missed is None:
            text = f"what session {session_id} committed from {resume.position} on is not kept any more"
            failed = self._fail(client, session_id, DropReason.RESUME_GONE, "resume_gone", text)
            return [*self._abandon(session, "its client was away for too long", now), *failed]
        # The old link may still be there, half open: the key decides whose session it is.
        if session.client in self.peers:
            del self.peers[session.client].sessions[session_id]
        session.client = client.id
        client.sessions[session_id] = None
        self.deadlines.pop((session_id, CLIENT_DUE), None)
        self.num_resumed += 1
        actions: list[Action] = [Forward(client.id, part) for part in missed]
        if session.last is None:
            return actions
        return [*actions, Forward(client.id, session.last), *self._end(session, "done", now)]

    def _cancel(self, client: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self.sessions.get(session_id)
        if session is None or session.client != client.id:
            text = f"this link has no session {session_id}; it may have ended"
            return self._fail(client, session_id, DropReason.UNKNOWN_SESSION, "unknown_session", text)
        cancel = decode(frame)
        assert isinstance(cancel, Cancel), "peek and decode agree on the type"
        if session.verify is None:
            return self._cancelled(session, now)
        # The verify node acts on the reason ("client gone": answer nobody), so it is not for a client to choose.
        return [Send(session.verify, Cancel(session=session_id, reason="cancelled by the client"))]

    def _draining(self, peer: Peer, frame: bytes, now: float) -> list[Action]:
        """The peer gets no new session. Another draft node takes its sessions at once; of a verify node's, those that
        do not end in time."""
        draining = decode(frame)
        assert isinstance(draining, Draining), "peek and decode agree on the type"
        peer.draining = True
        if peer.hello.role == "verify":
            self.deadlines[peer.id, MOVE_DUE] = now + max(0.0, draining.grace_s - MOVE_BEFORE_S)
        if peer.hello.role != "draft":
            return []
        actions: list[Action] = []
        for session in [self.sessions[session_id] for session_id in peer.sessions]:
            if choose_draft(session, self.nodes("draft")) is not None:
                released = Release(session=session.id, reason="the draft node is draining")
                actions += [Send(self._unpair(session), released), *self._pair(session)]
        return actions

    def _to_client(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        if session is None:
            return []
        self._keep(session, frame)
        if session.client is not None:
            return [Forward(session.client, frame)]
        return self._abandon(session, "its answer is not kept any more", now) if session.kept is None else []

    def _waiting(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        return [Forward(session.client, frame)] if session is not None and session.client is not None else []

    def _done(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        if session is None:
            return []
        return [*self._finish(session, frame, "done", now), *self._settle(now)]

    def _verify_error(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        if session is None:
            return []
        error = decode(frame)
        assert isinstance(error, Error), "peek and decode agree on the type"
        if error.code == "draining":
            verify.draining = True
            return [*self._move(session, f"{verify} is draining", now), *self._settle(now)]
        if error.code == "overloaded":
            return [*self._crowded_out(session, verify, frame, now), *self._settle(now)]
        if error.code != DRAFT_FAULT:
            return [*self._finish(session, frame, error.code, now), *self._settle(now)]
        if session.draft is None:
            return self._drop(DropReason.NO_DRAFT_NODE)
        # The Error frees the session at the draft node, as a Release would.
        draft = self._unpair(session)
        session.refused.add(draft)
        return [Forward(draft, frame), *self._settle(now)]

    def _to_draft(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        if session is None:
            return []
        if session.draft is None:
            return self._drop(DropReason.NO_DRAFT_NODE)
        return [Forward(session.draft, frame)]

    def _to_verify(self, draft: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(draft, session_id)
        return [Forward(session.verify, frame)] if session and session.verify else []

    def _draft_error(self, draft: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(draft, session_id)
        if session is None:
            return []
        # The draft node has freed the session already, so it gets no Release.
        session.refused.add(self._unpair(session))
        assert session.verify is not None, "who has no verify node has no draft node"
        return [Forward(session.verify, frame), *self._settle(now)]

    def _malformed(self, peer: Peer, drop: DropReason, code: str, reason: str, now: float) -> list[Action]:
        self.drops[drop] += 1
        peer.num_malformed += 1
        reason = reason[:MAX_REASON_CHARS]
        if peer.num_malformed >= self.malformed_limit:
            return self.expel(peer.id, code, f"{peer.num_malformed} malformed frames, the last: {reason}", now)
        return [Send(peer.id, Error(code=code, message=reason))]


_Handler = Callable[[Router, Peer, str, bytes, float], list[Action]]
_HANDLERS: dict[tuple[str, str], _Handler] = {
    ("client", "open_session"): Router._open,
    ("client", "tokenize"): Router._open,
    ("client", "resume"): Router._resume,
    ("client", "cancel"): Router._cancel,
    ("client", "probe"): Router._probe,
    ("verify", "text_delta"): Router._to_client,
    ("verify", "waiting"): Router._waiting,
    ("verify", "done"): Router._done,
    ("verify", "tokenized"): Router._done,
    ("verify", "error"): Router._verify_error,
    ("verify", "prefix"): Router._to_draft,
    ("verify", "acceptance"): Router._to_draft,
    ("draft", "candidates"): Router._to_verify,
    ("draft", "resync"): Router._to_verify,
    ("draft", "error"): Router._draft_error,
}
