from __future__ import annotations

import heapq
import itertools
import random

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.aio.memory import LinkModel
from wire.codec import decode, encode
from wire.connection import DOUBT_S, TRANSITIONS, Connection, Event, Opened, PeerHello, Received, State
from wire.errors import LinkLost, PeerMismatch, ProtocolError, Refused, VersionMismatch
from wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Draining,
    Error,
    Hello,
    Message,
    ModelIdentity,
    Ping,
    Pong,
    Release,
    Welcome,
)

INTERVAL_S, TIMEOUT_S = 5.0, 8.0
MODEL = ModelIdentity(name="tiny", revision="r1", tokenizer="abc", vocab_size=100, context_length=64)
HELLO = Hello(protocol=PROTOCOL_VERSION, role="draft", name="d1", model=MODEL)
WELCOME = Welcome(
    protocol=PROTOCOL_VERSION, peer="relay", max_frame_bytes=MAX_FRAME_BYTES,
    ping_interval_s=INTERVAL_S, ping_timeout_s=TIMEOUT_S,
)  # fmt: skip
RELEASE = encode(Release(session="s1"))


def dialer(now: float = 0.0) -> Connection:
    return Connection.dialing(HELLO, now=now, handshake_timeout_s=3.0)


def acceptor(now: float = 0.0) -> Connection:
    return Connection.accepting(now=now, handshake_timeout_s=3.0, serving="verify big@r2")


def opened(now: float = 0.0) -> Connection:
    connection = dialer(now)
    connection.frames_to_send()
    connection.receive(encode(WELCOME), now)
    return connection


def sent(connection: Connection) -> list[Message]:
    return [decode(frame) for frame in connection.frames_to_send()]


def test_a_handshake_opens_both_sides_under_the_acceptors_terms() -> None:
    near, far = dialer(), acceptor()
    (hello,) = near.frames_to_send()
    assert far.receive(hello, 0.1) == [PeerHello(HELLO)]
    assert far.next_timer() is None
    far.accept(WELCOME, 0.1)
    (welcome,) = far.frames_to_send()
    assert near.receive(welcome, 0.2) == [Opened(WELCOME)]
    assert near.state is far.state is State.OPEN
    assert (near.welcome, far.hello) == (WELCOME, HELLO)


def test_a_refused_peer_hears_why() -> None:
    near, far = dialer(), acceptor()
    far.receive(near.frames_to_send()[0], 0.0)
    far.refuse("duplicate", "d1 is here already")
    assert far.state is State.CLOSED
    with pytest.raises(Refused, match="d1 is here already"):
        near.receive(far.frames_to_send()[0], 0.0)
    assert near.state is State.CLOSED


@pytest.mark.parametrize(("code", "error"), [("mismatch", PeerMismatch), ("version", VersionMismatch)])
def test_codes_that_say_more_have_errors_of_their_own(code: str, error: type[Exception]) -> None:
    near = dialer()
    with pytest.raises(error, match="words"):
        near.receive(encode(Error(code=code, message="words")), 0.0)
    near = opened()
    with pytest.raises(error, match="words"):
        near.receive(encode(Error(code=code, message="words")), 0.0)
    assert near.state is State.CLOSED


def test_a_relay_that_is_going_may_be_asked_again() -> None:
    """A node that took this for a refusal would end for good, because its relay was restarted at the wrong moment."""
    near, far = dialer(), acceptor()
    far.receive(near.frames_to_send()[0], 0.0)
    far.refuse("draining", "the relay is shutting down")
    with pytest.raises(LinkLost, match="the relay is shutting down"):
        near.receive(far.frames_to_send()[0], 0.0)
    assert near.state is State.CLOSED


def test_other_errors_without_a_session_are_the_owners_business() -> None:
    frame = encode(Error(code="malformed", message="words"))
    assert opened().receive(frame, 0.0) == [Received("error", None, frame)]


def test_a_version_mismatch_names_versions_and_models_of_both_sides() -> None:
    far = acceptor()
    hello = orjson.dumps(orjson.loads(encode(HELLO)) | {"protocol": 7})
    with pytest.raises(VersionMismatch, match=r"d1 with tiny@r1 .*protocol 7.*protocol 1 .*verify big@r2"):
        far.receive(hello, 0.0)
    assert far.state is State.CLOSED
    (error,) = sent(far)
    assert isinstance(error, Error)
    assert error.code == "version"


def test_a_version_is_told_even_where_its_hello_cannot_be_read() -> None:
    far = acceptor()
    with pytest.raises(VersionMismatch, match="peer speaks protocol 7, we speak protocol 1 and have verify big@r2"):
        far.receive(b'{"type":"hello","protocol":7,"flavour":"new"}', 0.0)
    (error,) = sent(far)
    assert isinstance(error, Error)
    assert error.code == "version"
    near = dialer()
    with pytest.raises(VersionMismatch, match="protocol 7"):
        near.receive(b'{"type":"welcome","protocol":7,"flavour":"new"}', 0.0)


@pytest.mark.parametrize("frame", [b"GET / HTTP/1.1", b"{", RELEASE, encode(WELCOME), encode(Ping(number=1))])
def test_a_stranger_that_does_not_say_hello_is_told_and_left(frame: bytes) -> None:
    far = acceptor()
    with pytest.raises(ProtocolError):
        far.receive(frame, 0.0)
    assert far.state is State.CLOSED
    (error,) = sent(far)
    assert isinstance(error, Error)
    assert error.code == "malformed"
    assert far.receive(encode(HELLO), 0.1) == []


@pytest.mark.parametrize("make", [dialer, acceptor])
def test_a_handshake_has_a_time_limit(make: object) -> None:
    connection = make(10.0)  # type: ignore[operator]
    assert connection.next_timer() == 13.0
    connection.on_timer(12.9)
    with pytest.raises(LinkLost, match="handshake within 3 s"):
        connection.on_timer(13.0)
    assert connection.state is State.CLOSED
    assert connection.next_timer() is None


def test_frames_of_sessions_pass_unparsed() -> None:
    frame = b'{"type":"candidates","session":"s1","rubbish":'
    assert opened().receive(frame, 0.0) == [Received("candidates", "s1", frame)]
    draining = encode(Draining(grace_s=1.0))
    assert opened().receive(draining, 0.0) == [Received("draining", None, draining)]


@pytest.mark.parametrize("message", [HELLO, WELCOME])
def test_a_second_handshake_is_a_protocol_error(message: Message) -> None:
    with pytest.raises(ProtocolError, match="open already"):
        opened().receive(encode(message), 0.0)


def test_a_verdict_is_given_once() -> None:
    far = acceptor()
    with pytest.raises(RuntimeError, match="WAIT_HELLO"):
        far.accept(WELCOME, 0.0)
    far.receive(encode(HELLO), 0.0)
    far.accept(WELCOME, 0.0)
    with pytest.raises(RuntimeError, match="OPEN"):
        far.refuse("late", "too late")


def test_a_ping_is_answered_by_its_number() -> None:
    connection = opened()
    assert connection.receive(encode(Ping(number=41)), 0.0) == []
    assert sent(connection) == [Pong(number=41)]


def test_the_round_trip_is_our_own_time_less_the_peers_residence() -> None:
    connection = opened()
    now = 0.0
    for rtt_s in (0.086, 0.5, 0.087):
        now = connection.next_timer() or 0.0
        connection.on_timer(now)
        (ping,) = sent(connection)
        assert isinstance(ping, Ping)
        connection.receive(encode(Pong(number=ping.number, residence_s=1.0)), now + rtt_s + 1.0)
    assert connection.rtt_s == pytest.approx(0.087)
    connection.receive(encode(Pong(number=1)), now + 9.0)
    assert connection.rtt_s == pytest.approx(0.087)


def test_a_silent_peer_is_dead_a_timeout_after_the_ping() -> None:
    connection = opened()
    connection.on_timer(0.0)
    assert connection.next_timer() == TIMEOUT_S
    connection.on_timer(TIMEOUT_S - 0.1)
    with pytest.raises(LinkLost, match=r"peer silent for 8.0 s \(no answer to a ping within 8 s\)"):
        connection.on_timer(TIMEOUT_S)
    assert connection.state is State.CLOSED


def test_a_peer_that_speaks_is_not_dead_though_its_pong_is_late() -> None:
    connection = opened()
    connection.on_timer(0.0)
    connection.receive(RELEASE, 7.9)
    assert connection.next_timer() == 7.9 + INTERVAL_S
    connection.on_timer(7.9 + INTERVAL_S)
    assert [type(message) for message in sent(connection)] == [Ping, Ping]
    with pytest.raises(LinkLost, match="silent for 13"):
        connection.on_timer(7.9 + INTERVAL_S + TIMEOUT_S)


def test_c029_c080_a_blocked_loop_of_our_own_is_not_blamed_on_the_peer() -> None:
    connection = opened()
    connection.on_timer(0.0)
    connection.on_timer(38.0)  # asked for 8.0: we were away for 30 s, and the Pong may lie in the socket's buffer
    assert connection.state is State.OPEN
    assert connection.stalled_s == 30.0
    ping = sent(connection)[-1]
    assert isinstance(ping, Ping)
    connection.receive(encode(Pong(number=ping.number - 1)), 38.0)
    assert connection.rtt_s is None, "a round trip that our own stall is part of says nothing about the wire"
    connection.receive(encode(Pong(number=ping.number)), 38.1)
    assert connection.rtt_s == pytest.approx(0.1)


def test_c080_after_our_own_stall_the_cause_tells_both() -> None:
    connection = opened()
    connection.on_timer(0.0)
    connection.on_timer(38.0)
    with pytest.raises(LinkLost, match=r"peer silent for 46.0 s .*our own event loop was blocked for 30.0 s"):
        connection.on_timer(46.0)


def test_every_move_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)
    assert not TRANSITIONS[State.CLOSED]
    assert all(State.CLOSED in moves for state, moves in TRANSITIONS.items() if state is not State.CLOSED)


class World:
    """Two connections on a virtual clock, with a delay between them; `dead` after a point nothing arrives."""

    def __init__(self, delay_s: float, jitter_s: float, seed: int) -> None:
        self.now = 0.0
        self.swallowing = False
        self.ends = (dialer(), acceptor())
        self.events: list[list[Event]] = [[], []]
        self.lost_at: dict[int, float] = {}
        rng = random.Random(seed)
        self._models = [LinkModel(delay_s=delay_s, jitter_s=jitter_s, rng=rng) for _ in range(2)]
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def run(self, until: float) -> None:
        while self._step(until):
            pass
        self.now = until

    def send(self, end: int, frame: bytes) -> None:
        for at in self._models[end].arrivals(self.now):
            if not self.swallowing:
                heapq.heappush(self._under_way, (at, next(self._order), 1 - end, frame))

    def _step(self, until: float) -> bool:
        for end, connection in enumerate(self.ends):
            for frame in connection.frames_to_send():
                self.send(end, frame)
        timers = [(at, end) for end, connection in enumerate(self.ends) if (at := connection.next_timer()) is not None]
        timer_at, timer_end = min(timers, default=(float("inf"), 0))
        arrival_at = self._under_way[0][0] if self._under_way else float("inf")
        if min(timer_at, arrival_at) > until:
            return False
        if arrival_at <= timer_at:
            self.now, _, end, frame = heapq.heappop(self._under_way)
            events = self.ends[end].receive(frame, self.now)
            self.events[end] += events
            if any(isinstance(event, PeerHello) for event in events):
                self.ends[end].accept(WELCOME, self.now)
            return True
        self.now = max(self.now, timer_at)
        try:
            self.ends[timer_end].on_timer(self.now)
        except LinkLost:
            self.lost_at[timer_end] = self.now
        return True


@given(st.floats(0.0, 0.7), st.floats(0.0, 0.7), st.integers(0, 2**32))
def test_a_slow_link_lives_and_its_round_trip_is_measured(delay_s: float, jitter_s: float, seed: int) -> None:
    world = World(delay_s, jitter_s, seed)
    world.run(300.0)
    assert not world.lost_at
    for connection in world.ends:
        assert connection.state is State.OPEN
        assert connection.rtt_s is not None
        assert 2 * delay_s - 1e-9 <= connection.rtt_s <= 2 * (delay_s + jitter_s) + 1e-9


@given(
    st.floats(0.0, 0.7),
    st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(0, 1)), max_size=20),
    st.floats(3.0, 60.0),
    st.integers(0, 2**32),
)
def test_c030_both_sides_find_a_dead_path_within_interval_and_timeout(
    delay_s: float, traffic: list[tuple[float, int]], dies_at: float, seed: int
) -> None:
    world = World(delay_s, 0.1, seed)
    world.run(3.0)
    for pause_s, end in traffic:
        if world.now + pause_s > dies_at:
            break
        world.run(world.now + pause_s)
        world.send(end, RELEASE)
    world.run(dies_at)
    assert not world.lost_at
    world.swallowing = True
    world.run(dies_at + 60.0)
    assert set(world.lost_at) == {0, 1}
    last_arrival = dies_at + delay_s + 0.1
    assert max(world.lost_at.values()) <= last_arrival + INTERVAL_S + TIMEOUT_S + 1e-6


@given(st.floats(0.0, 0.7), st.floats(0.0, 0.5), st.integers(0, 2**32))
def test_c034_a_link_without_traffic_is_never_silent_for_half_the_shortest_idle_limit(
    delay_s: float, jitter_s: float, seed: int
) -> None:
    """Middleboxes forget a connection after a silence, 60 s being the shortest limit in common use; the relay's own
    interval is 5 s."""
    world = World(delay_s, jitter_s, seed)
    sent_at: list[float] = []
    send = world.send
    world.send = lambda end, frame: (sent_at.append(world.now), send(end, frame))[1]  # type: ignore[func-returns-value, method-assign]
    world.run(300.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(sent_at)]
    # Nothing but the keepalive's own frames moves; a Ping follows its Pong within the interval.
    assert max(gaps) <= INTERVAL_S + 2 * (delay_s + jitter_s) + 1e-6
    assert sent_at[-1] > 290.0


def test_who_does_not_read_does_not_call_the_peer_silent_and_is_heard_on() -> None:
    """A link above its rate is read later, as long as that takes; its peer gets Pings in time all the while."""
    connection = opened()
    sent_at, now = [], 0.0
    connection.listening = False
    while now < 100.0:
        timer = connection.next_timer()
        assert timer is not None
        now = timer
        connection.on_timer(now)
        sent_at += [now] * len(sent(connection))
    assert max(b - a for a, b in itertools.pairwise(sent_at)) < INTERVAL_S + TIMEOUT_S
    connection.listening = True
    with pytest.raises(LinkLost, match="peer silent"):
        connection.on_timer(connection.next_timer() or 0.0)


def test_a_peer_that_seems_to_have_come_again_has_little_time_to_say_that_it_is_here_too() -> None:
    gone, here = opened(), opened()
    for connection in (gone, here):
        connection.on_timer(0.0)
        connection.receive(encode(Pong(number=1)), 0.1)
        sent(connection)
        connection.doubt(1.0)
        assert sent(connection) == [Ping(number=2)]
        assert connection.next_timer() == 1.0 + DOUBT_S
    here.receive(encode(Pong(number=2)), 1.5)
    here.on_timer(1.0 + DOUBT_S)
    with pytest.raises(LinkLost, match=r"peer silent for 2\.9 s \(no answer to a ping within 2 s\)"):
        gone.on_timer(1.0 + DOUBT_S)
    # From then on it has the time that everybody has.
    assert here.next_timer() == 1.0 + DOUBT_S + TIMEOUT_S


def test_a_blocked_loop_of_our_own_is_not_blamed_on_a_peer_in_doubt() -> None:
    connection = opened()
    connection.doubt(1.0)
    connection.on_timer(1.0 + 2 * DOUBT_S)
    connection.receive(encode(Pong(number=2)), 1.0 + 2 * DOUBT_S)
