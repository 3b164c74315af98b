"""One peer's link as a state machine, without IO: handshake, keepalive, round-trip time.

A dialer says Hello and waits for Welcome; an acceptor waits for Hello and answers with Welcome, or with an Error and
the end. Times are handed in, on one monotonic clock; `next_timer` says when `on_timer` wants to be called.

    state          event             next           what happens
    -----          -----             ----           ------------
    WAIT_HELLO     Hello             WAIT_VERDICT   PeerHello is reported; the owner calls `accept` or `refuse`
    WAIT_HELLO     other version     CLOSED         Error goes out, VersionMismatch is raised
    WAIT_HELLO     malformed frame   CLOSED         Error goes out, ProtocolError is raised
    WAIT_VERDICT   accept()          OPEN           Welcome goes out, keepalive starts
    WAIT_VERDICT   refuse()          CLOSED         Error goes out
    WAIT_WELCOME   Welcome           OPEN           keepalive starts
    WAIT_WELCOME   Error             CLOSED         Refused (or the error its code stands for), with the relay's words;
                                                    LinkLost if the relay only happens to be going
    WAIT_WELCOME   other version     CLOSED         VersionMismatch is raised
    OPEN           Ping              OPEN           Pong goes out
    OPEN           Pong              OPEN           the round trip is noted
    OPEN           fatal Error       CLOSED         PeerMismatch or VersionMismatch is raised
    OPEN           any other frame   OPEN           handed on as bytes with its type and session
    any            silence           CLOSED         LinkLost is raised, saying whose fault it was
    CLOSED         any frame         CLOSED         it was under way when we left; dropped

Anything else is a ProtocolError.

Keepalive: a Ping goes out an interval after the last Pong, and again whenever the peer has spoken since the Ping but
then not for an interval. The link is dead when a Ping has been out for the timeout and nothing has come since: at
most interval + timeout after the last frame. If our own timer fires late by more than half the timeout, it is our
loop that was blocked: the peer gets a new chance, because its answers may be waiting unread. So it does while we do not
read because it is above its rate; it goes on to hear our Pings.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from wire.codec import decode, encode, peek, protocol_of
from wire.errors import LinkLost, PeerMismatch, ProtocolError, Refused, VersionMismatch, WireError
from wire.messages import PROTOCOL_VERSION, Error, Hello, Ping, Pong, Welcome

NUM_RTT_SAMPLES = 15
DOUBT_S = 2.0
"""The timeout of a Ping to a peer that seems to have come again."""
OWN_FRAMES = frozenset({Ping.type, Pong.type, Error.type, Hello.type, Welcome.type})
"""Types that the machine looks at on an open link; nearly every frame is of another."""
FATAL: dict[str, type[WireError]] = {"mismatch": PeerMismatch, "version": VersionMismatch}
"""Errors without a session after which a reconnect would not help."""
PASSING = frozenset({"draining"})
"""Answers to a Hello that another attempt may not meet again."""


class State(Enum):
    """See the module's docstring."""

    WAIT_HELLO = auto()
    WAIT_VERDICT = auto()
    WAIT_WELCOME = auto()
    OPEN = auto()
    CLOSED = auto()


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAIT_HELLO: frozenset({State.WAIT_VERDICT, State.CLOSED}),
    State.WAIT_VERDICT: frozenset({State.OPEN, State.CLOSED}),
    State.WAIT_WELCOME: frozenset({State.OPEN, State.CLOSED}),
    State.OPEN: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class PeerHello:
    """The peer has introduced itself; call `accept` or `refuse`."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Opened:
    """The link is up, under these terms."""

    welcome: Welcome


class Received(NamedTuple):
    """A frame for the owner; `frame` is not parsed beyond its type and session. A tuple, as there are many."""

    type: str
    session: str | None
    frame: bytes


Event = PeerHello | Opened | Received


class Connection:
    """The state of one link. Use `dialing` or `accepting`."""

    def __init__(self, state: State, *, now: float, handshake_timeout_s: float) -> None:
        self.state = state
        self.hello: Hello | None = None
        self.welcome: Welcome | None = None
        self._serving = ""
        self._deadline: float | None = now + handshake_timeout_s  # of the handshake
        self._handshake_timeout_s = handshake_timeout_s
        self._out: list[bytes] = []
        self._interval_s = self._timeout_s = self._patience_s = 0.0
        self._next_ping_at = 0.0
        self._ping_number = 0
        self._ping_sent_at: float | None = None
        self._heard_at = now
        self._stalled_s = 0.0
        self._stalled_since_pong_s = 0.0
        self._rtts: deque[float] = deque(maxlen=NUM_RTT_SAMPLES)
        self.listening = True
        """Whether frames are being read; while they are not, the silence of the peer means nothing."""

    @classmethod
    def dialing(cls, hello: Hello, *, now: float, handshake_timeout_s: float) -> Connection:
        """The side that introduces itself."""
        connection = cls(State.WAIT_WELCOME, now=now, handshake_timeout_s=handshake_timeout_s)
        connection.hello = hello
        connection._out.append(encode(hello))
        return connection

    @classmethod
    def accepting(cls, *, now: float, handshake_timeout_s: float, serving: str = "") -> Connection:
        """The side that decides. `serving` says what it has, for a peer of another version to read."""
        connection = cls(State.WAIT_HELLO, now=now, handshake_timeout_s=handshake_timeout_s)
        connection._serving = serving
        return connection

    @property
    def rtt_s(self) -> float | None:
        """Median of the last round trips, less what the peer held the Ping; None before the first."""
        return statistics.median(self._rtts) if self._rtts else None

    @property
    def stalled_s(self) -> float:
        """How long our own loop has been found blocked, in total."""
        return self._stalled_s

    @property
    def has_frames_to_send(self) -> bool:
        """Whether `frames_to_send` has any."""
        return bool(self._out)

    def frames_to_send(self) -> list[bytes]:
        """Frames of the machine itself that are due, once."""
        frames, self._out = self._out, []
        return frames

    def accept(self, welcome: Welcome, now: float) -> None:
        """Let the peer in."""
        self._expect(State.WAIT_VERDICT)
        self._out.append(encode(welcome))
        self._open(welcome, now)

    def refuse(self, code: str, message: str) -> None:
        """Turn the peer away."""
        self._expect(State.WAIT_VERDICT)
        self._reject(code, message)

    def heard(self, now: float) -> None:
        """The peer is alive: a part of a frame has come."""
        self._heard_at = now

    def receive(self, frame: bytes, now: float) -> list[Event]:
        """Take one frame.

        Raises:
            ProtocolError: it is malformed, or not due in this state.
            Refused, PeerMismatch, VersionMismatch: the other side has turned us away.
        """
        if self.state is State.CLOSED:
            return []
        self._heard_at = now
        if self.state is not State.OPEN:
            return self._shake_hands(frame, now)
        kind, session = peek(frame)
        if kind not in OWN_FRAMES:
            return [Received(kind, session, frame)]
        if kind == Ping.type:
            ping = decode(frame)
            assert isinstance(ping, Ping)
            self._out.append(encode(Pong(number=ping.number)))
            return []
        if kind == Pong.type:
            self._on_pong(frame, now)
            return []
        if kind == Error.type and session is None:
            error = decode(frame)
            assert isinstance(error, Error)
            if error.code in FATAL:
                self._move(State.CLOSED)
                raise FATAL[error.code](error.message)
        if kind in (Hello.type, Welcome.type):
            raise ProtocolError(f"{kind} came on a link that is open already")
        return [Received(kind, session, frame)]

    def doubt(self, now: float) -> None:
        """The peer seems to have come by another link: it is asked whether it is here too, and has little time."""
        if self.state is State.OPEN:
            self._ping(now)
            self._patience_s = min(self._timeout_s, DOUBT_S)

    def next_timer(self) -> float | None:
        """When `on_timer` wants to be called; None for not at all."""
        if self.state is State.OPEN:
            if self._ping_sent_at is None:
                return self._next_ping_at
            if self._heard_at > self._ping_sent_at:
                return self._heard_at + self._interval_s
            return self._ping_sent_at + self._patience_s
        return self._deadline if self.state is not State.CLOSED else None

    def on_timer(self, now: float) -> None:
        """Send a Ping, or find the peer dead.

        Raises:
            LinkLost: the peer is silent.
        """
        due = self.next_timer()
        if due is None or now < due:
            return
        if self.state is not State.OPEN:
            self._move(State.CLOSED)
            raise LinkLost(f"the peer did not complete its handshake within {self._handshake_timeout_s:g} s")
        late_s = now - due
        stalled = late_s > self._patience_s / 2
        if stalled:
            self._stalled_s += late_s
            self._stalled_since_pong_s += late_s
        silent = self.listening and self._ping_sent_at is not None and self._heard_at <= self._ping_sent_at
        if stalled or not silent:
            # A Pong may be late though the peer speaks, behind a big frame, say: it is asked again.
            self._ping(now)
            return
        self._move(State.CLOSED)
        stalled_s = self._stalled_since_pong_s
        blamed = f"; our own event loop was blocked for {stalled_s:.1f} s of it" if stalled_s else ""
        raise LinkLost(
            f"peer silent for {now - self._heard_at:.1f} s (no answer to a ping within {self._patience_s:g} s{blamed})"
        )

    def _shake_hands(self, frame: bytes, now: float) -> list[Event]:
        accepting = self.state is State.WAIT_HELLO
        try:
            message = decode(frame)
        except ProtocolError as exc:
            error = exc
            # Another version's Hello may have fields that we do not know; its number says more than they do.
            theirs = protocol_of(frame)
            if theirs not in (None, PROTOCOL_VERSION):
                error = VersionMismatch(
                    f"the peer speaks protocol {theirs}, we speak protocol {PROTOCOL_VERSION} and have "
                    f"{self._serving or 'no node'}"
                )
            if accepting:
                self._reject("version" if isinstance(error, VersionMismatch) else "malformed", str(error))
            else:
                self._move(State.CLOSED)
            raise error from None
        match self.state, message:
            case State.WAIT_HELLO, Hello():
                self.hello = message
                if message.protocol != PROTOCOL_VERSION:
                    text = version_mismatch(message, self._serving)
                    self._reject("version", text)
                    raise VersionMismatch(text)
                self._move(State.WAIT_VERDICT)
                self._deadline = None
                return [PeerHello(message)]
            case State.WAIT_WELCOME, Welcome():
                if message.protocol != PROTOCOL_VERSION:
                    self._move(State.CLOSED)
                    raise VersionMismatch(f"the relay speaks protocol {message.protocol}, we speak {PROTOCOL_VERSION}")
                self._open(message, now)
                return [Opened(message)]
            case State.WAIT_WELCOME, Error():
                self._move(State.CLOSED)
                if message.code in PASSING:
                    raise LinkLost(f"the relay turned us away: {message.message}")
                raise FATAL.get(message.code, Refused)(message.message)
        text = f"{message.type} is not due in state {self.state.name}"
        if accepting:
            self._reject("malformed", text)
        raise ProtocolError(text)

    def _reject(self, code: str, message: str) -> None:
        self._out.append(encode(Error(code=code, message=message)))
        self._move(State.CLOSED)

    def _move(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state.name} to {state.name}"
        self.state = state

    def _open(self, welcome: Welcome, now: float) -> None:
        self._move(State.OPEN)
        self.welcome = welcome
        self._deadline = None
        self._interval_s, self._timeout_s = welcome.ping_interval_s, welcome.ping_timeout_s
        self._patience_s = self._timeout_s
        self._next_ping_at = now

    def _ping(self, now: float) -> None:
        self._ping_number += 1
        self._ping_sent_at = now
        self._patience_s = self._timeout_s
        self._out.append(encode(Ping(number=self._ping_number)))

    def _on_pong(self, frame: bytes, now: float) -> None:
        pong = decode(frame)
        assert isinstance(pong, Pong)
        if self._ping_sent_at is None or pong.number != self._ping_number:
            return
        self._rtts.append(max(0.0, now - self._ping_sent_at - pong.residence_s))
        # The first samples come quickly, so that the ledger of a short run has a median to go by.
        settled = len(self._rtts) >= NUM_RTT_SAMPLES // 3
        self._next_ping_at = now + (self._interval_s if settled else min(self._interval_s, 0.2))
        self._ping_sent_at = None
        self._patience_s = self._timeout_s
        self._stalled_since_pong_s = 0.0

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise RuntimeError(f"the link is in state {self.state.name}, not {state.name}")


def version_mismatch(hello: Hello, serving: str) -> str:
    """The text for a peer of another protocol version; `serving` says what the acceptor has."""
    model = ""
    if hello.model is not None:
        # Not str(model): that would name our version as the peer's.
        model = f" with {hello.model.name}@{hello.model.revision or '-'} (tokenizer {hello.model.tokenizer[:12]})"
    return (
        f"{hello.role} {hello.name}{model} speaks protocol {hello.protocol}, this relay speaks protocol "
        f"{PROTOCOL_VERSION} and has {serving or 'no node'}"
    )
