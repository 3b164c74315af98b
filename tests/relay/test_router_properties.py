"""Whatever happens in whatever order, the router's books balance."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relay.actions import Action, ClosePeer, Forward, Send, SessionEnded, SessionMoved
from relay.router import Router
from wire.codec import decode, encode, peek
from wire.messages import (
    PROTOCOL_VERSION,
    Acceptance,
    Cancel,
    Candidates,
    Done,
    Draining,
    Error,
    Hello,
    ModelIdentity,
    OpenSession,
    Paired,
    PeerGone,
    Prefix,
    Release,
    Resume,
    TextDelta,
)

TARGET = ModelIdentity(name="target", revision="1", tokenizer="ab" * 32, vocab_size=256, context_length=4096)
MODELS = [replace(TARGET, name="m0"), replace(TARGET, name="m1", tokenizer="cd" * 32)]
PEERS = st.sampled_from([f"{role}{i}" for role in ("client", "verify", "draft") for i in range(3)])
SESSIONS = st.sampled_from([f"s{i}" for i in range(5)])


def frames(session: str) -> list[bytes]:
    return [
        encode(message)
        for message in (
            OpenSession(session=session, prompt="x"),
            OpenSession(session=session, prompt="x", speculate=False, model="m1"),
            Cancel(session=session),
            TextDelta(session=session, start=0, tokens=(1,), text="a"),
            Done(session=session, finish_reason="stop", prompt_tokens=1, completion_tokens=1),
            Error(session=session, code="failed", message="x"),
            Error(session=session, code="malformed", message="x"),
            Error(code="malformed", message="x"),
            Prefix(session=session, epoch=1, start=0, tokens=(1,), total=1, digest="d", limit=9, prompt_tokens=1),
            Acceptance(session=session, epoch=1, start=1, tokens=(5,)),
            Candidates(session=session, epoch=1, frame=0, first_node=0, parents=(-1,), tokens=(5,), scores=(0,)),
            Draining(grace_s=6.0),
            OpenSession(session=session, prompt="x", resume_key="k"),
            Resume(session=session, key="k", position=0),
            Resume(session=session, key="no", position=0),
            Error(session=session, code="overloaded", message="x"),
        )
    ]


class RouterMachine(RuleBasedStateMachine):
    """Joins, leaves, frames and garbage. The books here are kept from the actions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(malformed_limit=4, keep_s=3.0, takeover_wait_s=2.0, max_kept_bytes=500)
        self.now = 0.0
        self.connected: dict[str, str] = {}
        self.drafting: dict[str, dict[str, str]] = {}
        """Session to the draft node that has not been freed, by verify node."""
        self.epochs: dict[str, int] = {}
        self.open: set[str] = set()

    def check(self, actions: list[Action]) -> None:
        moved = set()
        for action in actions:
            match action:
                case SessionMoved(session, _, num_tokens):
                    assert session in self.open
                    moved.add((session, num_tokens))
                case ClosePeer(peer):
                    assert self.connected.pop(peer, None) is not None, "closed twice, or never let in"
                case Forward(peer, frame):
                    assert peer in self.connected
                    if peek(frame)[0] == "open_session":
                        request = decode(frame)
                        assert isinstance(request, OpenSession)
                        assert not self.router.peers[peer].draining, "a draining node got a session"
                        if (request.session, len(request.committed)) not in moved:
                            assert request.session not in self.open
                            self.open.add(request.session)
                            self.epochs[request.session] = 0
                case Send(peer, message):
                    assert peer in self.connected, f"{message} to a peer that has left"
                    if isinstance(message, Paired):
                        assert message.session in self.open
                        assert message.epoch == self.epochs[message.session] + 1
                        self.epochs[message.session] = message.epoch
                    if isinstance(message, Release):
                        assert self.connected[peer] == "draft"
                    if isinstance(message, PeerGone):
                        assert message.session in self.open
                case SessionEnded(session):
                    assert session in self.open, "ended twice, or never begun"
                    self.open.remove(session)

    @rule(peer=PEERS, model=st.sampled_from(MODELS), capacity=st.integers(1, 2))
    def join(self, peer: str, model: ModelIdentity, capacity: int) -> None:
        if peer in self.connected:
            return
        role = peer[:-1]
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            role=role,
            name=peer,
            capacity=capacity,
            model=model if role != "client" else None,
        )
        self.connected[peer] = role
        self.check(self.router.on_hello(peer, hello, self.now))

    @rule(peer=PEERS)
    def leave(self, peer: str) -> None:
        was = self.pairings()
        self.connected.pop(peer, None)
        actions = self.router.on_gone(peer, self.now)
        self.check(actions)
        self.check_releases(was, actions, told={})

    @rule(peer=PEERS, session=SESSIONS, kind=st.integers(0, 15))
    def frame(self, peer: str, session: str, kind: int) -> None:
        frame = frames(session)[kind]
        was = self.pairings()
        actions = self.router.on_frame(peer, frame, self.now)
        self.check(actions)
        # An Error between verify and draft node frees the session there as a Release does.
        told = {session: was[session][0]} if peek(frame)[0] == "error" and session in was else {}
        self.check_releases(was, actions, told)

    @rule(peer=PEERS, frame=st.binary(max_size=20))
    def garbage(self, peer: str, frame: bytes) -> None:
        was = self.pairings()
        actions = self.router.on_frame(peer, frame, self.now)
        self.check(actions)
        self.check_releases(was, actions, told={})

    @rule(peer=PEERS)
    def slow(self, peer: str) -> None:
        was = self.pairings()
        actions = self.router.expel(peer, "slow_consumer", "slow", self.now)
        self.check(actions)
        self.check_releases(was, actions, told={})

    @rule(session=SESSIONS, kind=st.sampled_from([0, 10]))
    def full(self, session: str, kind: int) -> None:
        """The request, or candidates, of a session do not fit the queue to its verify node."""
        known = self.router.sessions.get(session)
        if known is None or known.verify is None:
            return
        was = self.pairings()
        actions = self.router.on_queue_full(known.verify, frames(session)[kind], "full", self.now)
        self.check(actions)
        self.check_releases(was, actions, told={})

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 2.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        was = self.pairings()
        actions = self.router.on_timer(self.now)
        self.check(actions)
        self.check_releases(was, actions, told={})

    def pairings(self) -> dict[str, tuple[str | None, int]]:
        """Of each session, its draft node and the epoch."""
        return {session.id: (session.draft, session.epoch) for session in self.router.sessions.values()}

    def check_releases(
        self, was: dict[str, tuple[str | None, int]], actions: list[Action], told: dict[str, str | None]
    ) -> None:
        """A draft node that has lost a session, if only to get it again under the next epoch, is released exactly once,
        unless it has left or knows already."""
        released = [
            (a.message.session, a.peer) for a in actions if isinstance(a, Send) and isinstance(a.message, Release)
        ]
        assert len(released) == len(set(released))
        is_now = self.pairings()
        for session, (draft, epoch) in was.items():
            lost = draft is not None and is_now.get(session) != (draft, epoch)
            if told.get(session) != draft:
                assert ((session, draft) in released) == (lost and draft in self.connected)
        for session, draft in released:
            assert was[session][0] == draft

    @invariant()
    def books_balance(self) -> None:
        router = self.router
        assert set(router.peers) == set(self.connected)
        assert set(router.sessions) == self.open
        held = {peer.id: set(peer.sessions) for peer in router.peers.values()}
        for session in router.sessions.values():
            for peer_id in (session.client, session.verify, session.draft):
                if peer_id is not None:
                    held[peer_id].remove(session.id)
            # Whoever waits has a deadline, and nobody waits for ever.
            waits = session.verify is None and session.last is None
            assert waits == ((session.id, "verify") in router.deadlines)
            assert (session.client is None) == ((session.id, "client") in router.deadlines)
            if session.draft is not None:
                assert session.speculate
                assert session.verify is not None
                assert router.peers[session.draft].model.tokenizer == router.peers[session.verify].model.tokenizer
        assert router.kept_bytes == sum(s.kept.num_bytes for s in router.sessions.values() if s.kept is not None)
        assert router.kept_bytes <= router.max_kept_bytes
        for node, _ in (key for key in router.deadlines if key[1] in ("move", "room")):
            assert router.peers[node].hello.role == "verify"
        assert not any(held.values()), "a peer holds a session that it has no part in"
        for peer in router.peers.values():
            if peer.hello.role == "draft":
                assert peer.load <= 1


RouterMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRouterMachine = RouterMachine.TestCase
