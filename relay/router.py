"""Which frame goes to whom: the relay's decisions, without IO.

The shell reports peers and frames and performs the actions that come back. Frames are routed by type and session as
opaque bytes; only what is rare (OpenSession, Cancel, Error) is decoded.

    from     type                   goes to                     and
    ------   --------------------   -------------------------   --------------------------------------------------
    client   OpenSession            a verify node               the session begins; a draft node is paired if one fits
    client   Tokenize               a verify node               likewise, without a draft node
    client   Cancel                 the session's verify node   the session ends with the Done that answers it
    verify   TextDelta              the session's client
    verify   Done, Tokenized, Error the session's client        the session ends
    verify   Error "malformed"      the session's draft node    it is not listened to again; another is paired
    verify   Prefix, Acceptance     the session's draft node
    draft    Candidates, Resync     the session's verify node
    draft    Error                  the session's verify node   the draft node is out; another is paired
    any      Draining               -                           the sender gets no new session

A session without a draft node goes on (the target alone) and is paired as soon as one that fits has room. A session
without its verify node or its client is over. A peer that is closed here is forgotten at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from relay.pairing import Peer, Session, choose_draft, choose_verify, fits_none
from wire.codec import decode, peek
from wire.connection import version_mismatch
from wire.errors import ProtocolError
from wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Draining,
    Error,
    Hello,
    Message,
    OpenSession,
    Paired,
    PeerGone,
    Release,
    Tokenize,
)

MALFORMED_LIMIT = 20
MAX_SESSIONS_PER_CLIENT = 256
MAX_REASON_CHARS = 1000
DRAFT_FAULT = "malformed"
"""The code of a verify node's Error that is about the draft node's candidates; the answer itself goes on."""


class DropReason(Enum):
    """Why a frame went no further, or a peer had to go."""

    MALFORMED = "malformed"
    WRONG_ROLE = "wrong_role"
    BAD_REQUEST = "bad_request"
    UNKNOWN_SESSION = "unknown_session"
    NOT_PAIRED = "not_paired"
    NO_DRAFT_NODE = "no_draft_node"
    NO_VERIFY_NODE = "no_verify_node"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    UNKNOWN_PEER = "unknown_peer"
    SLOW_CONSUMER = "slow_consumer"
    NOT_ABOUT_A_SESSION = "not_about_a_session"


@dataclass(frozen=True, slots=True)
class Send:
    """Send the relay's own message."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass a frame on as it came."""

    peer: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """Tell the peer why (an Error with this code) and close its link; the router has forgotten it already."""

    peer: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session is over, for the log and the trace."""

    session: str
    reason: str
    duration_s: float


Action = Send | Forward | ClosePeer | SessionEnded


class Router:
    """Decides for all peers and sessions of one relay.

    Args:
        malformed_limit: a peer is closed with its frame number `malformed_limit` that no correct peer sends.
    """

    def __init__(self, *, malformed_limit: int = MALFORMED_LIMIT) -> None:
        self.malformed_limit = malformed_limit
        self.peers: dict[str, Peer] = {}
        self.sessions: dict[str, Session] = {}
        self.drops: Counter[DropReason] = Counter()
        self.draining = False

    def on_hello(self, peer_id: str, hello: Hello, now: float) -> list[Action]:
        """A peer has introduced itself. It is in, unless a ClosePeer for it comes back."""
        if peer_id in self.peers:
            raise ValueError(f"peer {peer_id} is connected already")
        peer = Peer(peer_id, hello)
        if hello.protocol != PROTOCOL_VERSION:
            return [ClosePeer(peer_id, "version", version_mismatch(hello, self.serving())[:MAX_REASON_CHARS])]
        if self.draining:
            self.drops[DropReason.DRAINING] += 1
            return [ClosePeer(peer_id, "draining", "the relay is shutting down")]
        if hello.role == "draft":
            reason = fits_none(peer, self._nodes("verify"))
            if reason is not None:
                return [ClosePeer(peer_id, "mismatch", reason[:MAX_REASON_CHARS])]
        self.peers[peer_id] = peer
        actions: list[Action] = []
        if hello.role == "verify":
            for draft in self._nodes("draft"):
                reason = fits_none(draft, self._nodes("verify"))
                if reason is not None:
                    actions += self.expel(draft.id, "mismatch", reason, now)
        return actions + self._pair_waiting()

    def on_gone(self, peer_id: str, now: float, reason: str = "link lost") -> list[Action]:
        """A peer's link is gone; nothing happens if the peer was closed from here."""
        peer = self.peers.pop(peer_id, None)
        if peer is None:
            return []
        text = f"{peer} was lost: {reason}"[:MAX_REASON_CHARS]
        actions: list[Action] = []
        for session in [self.sessions[session_id] for session_id in peer.sessions]:
            match peer.hello.role:
                case "client":
                    actions.append(Send(session.verify, Cancel(session=session.id, reason="client gone")))
                    actions += self._end(session, "client gone", now)
                case "verify":
                    actions.append(Send(session.client, Error(session=session.id, code="verify_lost", message=text)))
                    actions += self._end(session, "verify node lost", now)
                case _:
                    session.draft = None
                    actions.append(Send(session.verify, PeerGone(session=session.id, role="draft", reason=text)))
        return actions + self._pair_waiting()

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
        if kind == Draining.type:
            peer.draining = True
            return []
        if kind == Error.type and session_id is None:
            return self._drop(DropReason.NOT_ABOUT_A_SESSION)
        handler = _HANDLERS.get((peer.hello.role, kind))
        if handler is None:
            text = f"{kind} is not for a {peer.hello.role} to send"
            return self._malformed(peer, DropReason.WRONG_ROLE, "not_allowed", text, now)
        try:
            if session_id is None:
                raise ProtocolError(f"{kind} needs a session")
            return handler(self, peer, session_id, frame, now)
        except ProtocolError as exc:
            return self.on_malformed(peer_id, str(exc), now)

    def on_malformed(self, peer_id: str, reason: str, now: float) -> list[Action]:
        """A peer sent what no correct peer sends; only that peer is told, and closed when it does not stop."""
        peer = self.peers.get(peer_id)
        if peer is None:
            return self._drop(DropReason.UNKNOWN_PEER)
        return self._malformed(peer, DropReason.MALFORMED, "malformed", reason, now)

    def expel(self, peer_id: str, code: str, reason: str, now: float) -> list[Action]:
        """Close a peer; its sessions go as if it had left."""
        if peer_id not in self.peers:
            return []
        reason = reason[:MAX_REASON_CHARS]
        return [ClosePeer(peer_id, code, reason), *self.on_gone(peer_id, now, reason)]

    def serving(self) -> str:
        """The connected nodes and their models, in words."""
        nodes = [f"{peer} with {peer.model}" for peer in self.peers.values() if peer.hello.model is not None]
        return ", ".join(nodes) or "no node"

    def _open(self, client: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        try:
            request = decode(frame)
        except ProtocolError as exc:
            return self._fail(client, session_id, DropReason.BAD_REQUEST, "bad_request", str(exc))
        assert isinstance(request, OpenSession | Tokenize), "peek and decode agree on the type"
        if session_id in self.sessions:
            text = f"session {session_id} exists already"
            return self._fail(client, session_id, DropReason.BAD_REQUEST, "bad_session", text)
        if self.draining:
            return self._fail(client, session_id, DropReason.DRAINING, "draining", "the relay is shutting down")
        if len(client.sessions) >= MAX_SESSIONS_PER_CLIENT:
            text = f"{len(client.sessions)} sessions are open on this link, the limit is {MAX_SESSIONS_PER_CLIENT}"
            return self._fail(client, session_id, DropReason.OVERLOADED, "overloaded", text)
        verify, why_not = choose_verify(request.model, self._nodes("verify"))
        if verify is None:
            return self._fail(client, session_id, DropReason.NO_VERIFY_NODE, "no_verify_node", why_not)
        speculate = isinstance(request, OpenSession) and request.speculate
        session = Session(session_id, client.id, verify.id, speculate, now)
        self.sessions[session_id] = session
        client.sessions[session_id] = verify.sessions[session_id] = None
        return [Forward(verify.id, frame), *self._pair(session)]

    def _cancel(self, client: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self.sessions.get(session_id)
        if session is None or session.client != client.id:
            text = f"this link has no session {session_id}; it may have ended"
            return self._fail(client, session_id, DropReason.UNKNOWN_SESSION, "unknown_session", text)
        cancel = decode(frame)
        assert isinstance(cancel, Cancel), "peek and decode agree on the type"
        # The verify node acts on the reason ("client gone": answer nobody), so it is not for a client to choose.
        return [Send(session.verify, Cancel(session=session_id, reason="cancelled by the client"))]

    def _to_client(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        return [Forward(session.client, frame)] if session else []

    def _done(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        if session is None:
            return []
        return [Forward(session.client, frame), *self._end(session, "done", now), *self._pair_waiting()]

    def _verify_error(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        if session is None:
            return []
        error = decode(frame)
        assert isinstance(error, Error), "peek and decode agree on the type"
        if error.code != DRAFT_FAULT:
            return [Forward(session.client, frame), *self._end(session, error.code, now), *self._pair_waiting()]
        if session.draft is None:
            return self._drop(DropReason.NO_DRAFT_NODE)
        # The Error frees the session at the draft node, as a Release would.
        draft = self._unpair(session)
        session.refused.add(draft)
        return [Forward(draft, frame), *self._pair_waiting()]

    def _to_draft(self, verify: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(verify, session_id)
        if session is None:
            return []
        if session.draft is None:
            return self._drop(DropReason.NO_DRAFT_NODE)
        return [Forward(session.draft, frame)]

    def _to_verify(self, draft: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(draft, session_id)
        return [Forward(session.verify, frame)] if session else []

    def _draft_error(self, draft: Peer, session_id: str, frame: bytes, now: float) -> list[Action]:
        session = self._session_of(draft, session_id)
        if session is None:
            return []
        # The draft node has freed the session already, so it gets no Release.
        session.refused.add(self._unpair(session))
        return [Forward(session.verify, frame), *self._pair_waiting()]

    def _session_of(self, node: Peer, session_id: str) -> Session | None:
        """The session, if this node serves it; a frame for another is late, which is normal, and counted."""
        session = self.sessions.get(session_id)
        if session is not None and node.id in (session.verify, session.draft):
            return session
        self._drop(DropReason.UNKNOWN_SESSION if session is None else DropReason.NOT_PAIRED)
        return None

    def _end(self, session: Session, reason: str, now: float) -> list[Action]:
        """Forget a session and free it at the draft node; whoever calls then pairs what waits for the room."""
        del self.sessions[session.id]
        for peer_id in (session.client, session.verify):
            if peer_id in self.peers:
                del self.peers[peer_id].sessions[session.id]
        actions: list[Action] = []
        if session.draft is not None:
            actions.append(Send(self._unpair(session), Release(session=session.id, reason=reason)))
        return [*actions, SessionEnded(session.id, reason, now - session.opened_at)]

    def _pair_waiting(self) -> list[Action]:
        """Pair what waits for a draft node, the oldest session first."""
        if not any(draft.has_room for draft in self._nodes("draft")):
            return []
        return [action for session in self.sessions.values() for action in self._pair(session)]

    def _pair(self, session: Session) -> list[Action]:
        if not session.speculate or session.draft is not None:
            return []
        draft = choose_draft(session, self.peers[session.verify].model, self._nodes("draft"))
        if draft is None:
            return []
        session.draft = draft.id
        session.epoch += 1
        draft.sessions[session.id] = None
        return [Send(session.verify, Paired(session=session.id, epoch=session.epoch, draft=draft.hello.name))]

    def _unpair(self, session: Session) -> str:
        draft = session.draft
        assert draft is not None
        del self.peers[draft].sessions[session.id]
        session.draft = None
        return draft

    def _nodes(self, role: str) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.hello.role == role]

    def _drop(self, reason: DropReason) -> list[Action]:
        self.drops[reason] += 1
        return []

    def _fail(self, client: Peer, session_id: str, drop: DropReason, code: str, message: str) -> list[Action]:
        self.drops[drop] += 1
        return [Send(client.id, Error(session=session_id, code=code, message=message[:MAX_REASON_CHARS]))]

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
    ("client", "cancel"): Router._cancel,
    ("verify", "text_delta"): Router._to_client,
    ("verify", "done"): Router._done,
    ("verify", "tokenized"): Router._done,
    ("verify", "error"): Router._verify_error,
    ("verify", "prefix"): Router._to_draft,
    ("verify", "acceptance"): Router._to_draft,
    ("draft", "candidates"): Router._to_verify,
    ("draft", "resync"): Router._to_verify,
    ("draft", "error"): Router._draft_error,
}
