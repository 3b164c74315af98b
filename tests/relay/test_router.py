from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.actions import Action, ClosePeer, DropReason, Forward, Send, SessionEnded, SessionMoved
from relay.books import EPOCH_BLOCK
from relay.pairing import Peer, choose_verify
from relay.router import Router
from wire.codec import decode, encode
from wire.messages import (
    PROTOCOL_VERSION,
    Acceptance,
    Cancel,
    Candidates,
    Done,
    Draining,
    Error,
    Hello,
    Message,
    ModelIdentity,
    OpenSession,
    Paired,
    PeerGone,
    Prefix,
    Release,
    Resume,
    Resync,
    Serving,
    TextDelta,
)

TARGET = ModelIdentity(name="target", revision="1", tokenizer="ab" * 32, vocab_size=256, context_length=4096)
DRAFTER = replace(TARGET, name="drafter")
OPEN = OpenSession(session="s", prompt="hello")
CANDIDATES = Candidates(session="s", epoch=1, frame=0, first_node=0, parents=(-1,), tokens=(5,), scores=(0,))
PREFIX = Prefix(session="s", epoch=1, start=0, tokens=(1,), total=1, digest="d", limit=9, prompt_tokens=1)
ACCEPTANCE = Acceptance(session="s", epoch=1, start=1, tokens=(5,))
DELTA = TextDelta(session="s", start=0, tokens=(5,), text="a")
DONE = Done(session="s", finish_reason="stop", prompt_tokens=1, completion_tokens=1)


def join(
    router: Router, peer: str, role: str, *, model: ModelIdentity | None = None, capacity: int = 4
) -> list[Action]:
    default = {"verify": TARGET, "draft": DRAFTER, "client": None}[role]
    hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=peer, capacity=capacity, model=model or default)
    return router.on_hello(peer, hello, 0.0)


def say(router: Router, peer: str, message: Message) -> list[Action]:
    return router.on_frame(peer, encode(message), 0.0)


def paired(session: str = "s", epoch: int = 1, draft: str = "draft") -> Send:
    return Send("verify", Paired(session=session, epoch=epoch, draft=draft))


def the_error(actions: list[Action]) -> tuple[str, str | None, str]:
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.message, Error)
    return action.peer, action.message.session, action.message.code


@pytest.fixture
def router() -> Router:
    """One peer of each role."""
    router = Router()
    for role in ("verify", "draft", "client"):
        assert join(router, role, role) == []
    return router


@pytest.fixture
def running(router: Router) -> Router:
    """The same, with session "s" under way."""
    assert say(router, "client", OPEN) == [Forward("verify", encode(OPEN)), paired()]
    return router


@pytest.mark.parametrize(
    ("sender", "message", "receiver"),
    [
        ("verify", PREFIX, "draft"),
        ("verify", ACCEPTANCE, "draft"),
        ("verify", DELTA, "client"),
        ("draft", CANDIDATES, "verify"),
        ("draft", Resync(session="s", epoch=1, length=3), "verify"),
    ],
)
def test_frames_of_a_session_go_to_its_peers_unchanged(
    running: Router, sender: str, message: Message, receiver: str
) -> None:
    assert say(running, sender, message) == [Forward(receiver, encode(message))]


def test_done_ends_the_session_and_releases_the_draft_node(running: Router) -> None:
    assert say(running, "verify", DONE) == [
        Forward("client", encode(DONE)),
        Send("draft", Release(session="s", reason="done")),
        SessionEnded("s", "done", 0.0),
    ]
    assert not running.sessions
    assert all(not peer.sessions for peer in running.peers.values())


def test_an_error_of_the_verify_node_ends_the_session(running: Router) -> None:
    error = Error(session="s", code="bad_request", message="too long")
    assert say(running, "verify", error)[:2] == [
        Forward("client", encode(error)),
        Send("draft", Release(session="s", reason="bad_request")),
    ]
    assert not running.sessions


def test_the_verify_nodes_complaint_about_candidates_goes_to_the_draft_node_and_another_takes_over(
    running: Router,
) -> None:
    join(running, "second", "draft")
    error = Error(session="s", code="malformed", message="token out of range")
    assert say(running, "verify", error) == [Forward("draft", encode(error)), paired(epoch=2, draft="second")]
    assert say(running, "draft", CANDIDATES) == []
    assert running.drops[DropReason.NOT_PAIRED] == 1


def test_a_draft_node_that_gives_up_is_replaced_and_not_asked_again(running: Router) -> None:
    error = Error(session="s", code="draft_refused", message="no slot")
    assert say(running, "draft", error) == [Forward("verify", encode(error))]
    assert join(running, "second", "draft") == [paired(epoch=2, draft="second")]


def test_candidates_of_another_draft_node_are_dropped(running: Router) -> None:
    join(running, "second", "draft")
    assert say(running, "second", CANDIDATES) == []
    assert running.drops[DropReason.NOT_PAIRED] == 1


def test_text_of_another_verify_node_is_dropped(running: Router) -> None:
    join(running, "second", "verify")
    assert say(running, "second", DELTA) == []
    assert say(running, "second", DONE) == []
    assert "s" in running.sessions


def test_late_frames_of_nodes_are_counted_and_answered_with_silence(router: Router) -> None:
    assert say(router, "draft", CANDIDATES) == say(router, "verify", DELTA) == say(router, "verify", PREFIX) == []
    assert router.drops == {DropReason.UNKNOWN_SESSION: 3}


def test_no_verify_node_fails_at_once(router: Router) -> None:
    assert the_error(say(router, "client", replace(OPEN, model="other"))) == ("client", "s", "no_verify_node")
    router.on_gone("verify", 0.0)
    assert the_error(say(router, "client", OPEN)) == ("client", "s", "no_verify_node")


def test_the_model_asked_for_is_the_model_that_serves(router: Router) -> None:
    join(router, "other", "verify", model=replace(TARGET, name="other"))
    open_other = replace(OPEN, model="other")
    assert say(router, "client", open_other)[0] == Forward("other", encode(open_other))


def test_sessions_spread_by_load_relative_to_capacity(router: Router) -> None:
    join(router, "big", "verify", capacity=8)
    counts = {"verify": 0, "big": 0}
    for i in range(12):
        forward = say(router, "client", replace(OPEN, session=f"s{i}"))[0]
        assert isinstance(forward, Forward)
        counts[forward.peer] += 1
    assert counts == {"verify": 4, "big": 8}


def test_a_duplicate_session_is_refused_and_the_first_goes_on(running: Router) -> None:
    join(running, "second", "client")
    assert the_error(say(running, "second", OPEN)) == ("second", "s", "bad_session")
    assert say(running, "verify", DELTA) == [Forward("client", encode(DELTA))]


def test_without_speculation_no_draft_node_is_paired(router: Router) -> None:
    plain = replace(OPEN, speculate=False)
    assert say(router, "client", plain) == [Forward("verify", encode(plain))]
    assert join(router, "second", "draft") == []


def test_a_session_waits_for_room_at_a_draft_node(router: Router) -> None:
    router.on_gone("draft", 0.0)
    assert join(router, "draft", "draft", capacity=1) == []
    assert paired() in say(router, "client", OPEN)
    assert say(router, "client", replace(OPEN, session="t"))[1:] == []
    assert say(router, "verify", DONE)[-1] == paired("t", EPOCH_BLOCK + 1)


def test_a_client_may_cancel_its_own_session_only(running: Router) -> None:
    join(running, "second", "client")
    assert the_error(say(running, "second", Cancel(session="s"))) == ("second", "s", "unknown_session")
    assert say(running, "client", Cancel(session="s", reason="client gone")) == [
        Send("verify", Cancel(session="s", reason="cancelled by the client"))
    ]
    assert "s" in running.sessions, "the verify node's Done ends it"


def test_a_frame_with_two_sessions_reaches_neither(running: Router) -> None:
    say(running, "client", replace(OPEN, session="t"))
    assert (
        the_error(running.on_frame("client", b'{"type":"cancel","session":"t","session":"s"}', 0.0))[2] == "malformed"
    )


def test_a_client_that_is_gone_cancels_its_sessions(running: Router) -> None:
    assert running.on_gone("client", 2.0) == [
        Send("verify", Cancel(session="s", reason="client gone")),
        Send("draft", Release(session="s", reason="client gone")),
        SessionEnded("s", "client gone", 2.0),
    ]


def test_a_lost_draft_node_is_replaced_under_the_next_epoch(running: Router) -> None:
    gone, *rest = running.on_gone("draft", 0.0, "reset")
    assert gone == Send("verify", PeerGone(session="s", role="draft", reason="draft node draft was lost: reset"))
    assert rest == []
    assert say(running, "verify", ACCEPTANCE) == []
    assert running.drops[DropReason.NO_DRAFT_NODE] == 1
    assert join(running, "second", "draft") == [paired(epoch=2, draft="second")]
    join(running, "third", "draft")
    assert running.on_gone("second", 0.0)[1:] == [paired(epoch=3, draft="third")]


def test_c040_a_lost_verify_node_is_replaced_behind_the_committed_tokens(running: Router) -> None:
    say(running, "verify", DELTA)
    say(running, "verify", TextDelta(session="s", start=1, tokens=(6, 7), text="bc"))
    join(running, "other", "verify", model=replace(TARGET, weights="other"))
    join(running, "second", "verify")
    reopened = replace(OPEN, committed=(5, 6, 7))
    assert running.on_gone("verify", 1.0) == [
        Send("draft", Release(session="s", reason="verify node lost")),
        SessionMoved("s", "verify node second", 3),
        Forward("second", encode(reopened)),
        Send("second", Paired(session="s", epoch=2, draft="draft")),
    ]
    assert say(running, "second", replace(DELTA, start=3)) == [Forward("client", encode(replace(DELTA, start=3)))]
    assert running.next_timer() is None


def test_c040_without_a_replacement_the_client_is_told_within_the_stated_time(running: Router) -> None:
    say(running, "verify", DELTA)
    join(running, "other", "verify", model=replace(TARGET, weights="other"))
    assert running.on_gone("verify", 1.0) == [Send("draft", Release(session="s", reason="verify node lost"))]
    assert running.next_timer() == 11.0
    assert running.on_timer(10.9) == []
    error, ended = running.on_timer(11.0)
    assert isinstance(error, Forward)
    assert error.peer == "client"
    told = decode(error.frame)
    assert isinstance(told, Error)
    assert (told.session, told.code) == ("s", "verify_lost")
    assert "no other node took over within 10 s" in told.message
    assert ended == SessionEnded("s", "verify node lost", 11.0)
    assert running.next_timer() is None


FULL = Error(session="s", code="overloaded", message="the line is full")


def resent(actions: list[Action]) -> list[tuple[str, tuple[int, ...]]]:
    """To whom a session was sent anew, behind which tokens."""
    sent = [(a.peer, decode(a.frame)) for a in actions if isinstance(a, Forward)]
    return [(peer, message.committed) for peer, message in sent if isinstance(message, OpenSession)]


def test_c040_a_replacement_without_a_place_is_passed_over(running: Router) -> None:
    for name in ("verify2", "verify3"):
        join(running, name, "verify")
    say(running, "verify", DELTA)
    assert resent(running.on_gone("verify", 5.0)) == [("verify2", (5,))]
    assert resent(say(running, "verify2", FULL)) == [("verify3", (5,))]
    assert say(running, "verify3", DONE)[0] == Forward("client", encode(DONE))
    assert running.deadlines == {}


def test_c040_an_answer_that_has_begun_waits_for_a_place_where_all_are_full(running: Router) -> None:
    """Within the stated time, counted from the loss: a node that refuses it does not start the time anew."""
    join(running, "verify2", "verify")
    other = replace(OPEN, session="other", speculate=False)
    join(running, "client2", "client")
    running.on_gone("draft", 0.0)
    assert resent(say(running, "client2", other)) == [("verify2", ())]
    say(running, "verify", DELTA)
    assert resent(running.on_gone("verify", 5.0)) == [("verify2", (5,))]
    assert resent(running.on_frame("verify2", encode(FULL), 6.0)) == []
    assert running.next_timer() == 15.0
    # It is tried again when a session ends there, and not before.
    assert say(running, "verify2", replace(DELTA, session="other")) == [
        Forward("client2", encode(replace(DELTA, session="other")))
    ]
    assert resent(running.on_frame("verify2", encode(replace(DONE, session="other")), 7.0)) == [("verify2", (5,))]
    # Somebody else was faster; nothing comes any more.
    assert resent(running.on_frame("verify2", encode(FULL), 8.0)) == []
    assert running.on_timer(14.9) == []
    (told, *_) = running.on_timer(15.0)
    assert isinstance(told, Forward)
    error = decode(told.frame)
    assert isinstance(error, Error)
    assert error.code == "verify_lost"
    assert "took over within 10 s, 1 with the same model had no place" in error.message
    assert running.sessions == {}


def test_a_new_request_that_no_node_has_a_place_for_is_refused_at_once(running: Router) -> None:
    join(running, "verify2", "verify")
    assert resent(say(running, "verify", FULL)) == [("verify2", ())]
    assert say(running, "verify2", FULL)[0] == Forward("client", encode(FULL))
    assert running.sessions == {}


def test_c040_a_replacement_may_come_while_the_session_waits(running: Router) -> None:
    say(running, "verify", DELTA)
    running.on_gone("verify", 1.0)
    assert the_error(say(running, "client", replace(OPEN, session="t")))[2] == "no_verify_node", (
        "new requests fail fast"
    )
    assert join(running, "verify", "verify") == [
        SessionMoved("s", "verify node verify", 1),
        Forward("verify", encode(replace(OPEN, committed=(5,)))),
        paired(epoch=2),
    ]
    assert running.next_timer() is None


def test_cancelling_what_nobody_works_on_ends_it(running: Router) -> None:
    say(running, "verify", DELTA)
    running.on_gone("verify", 1.0)
    done, ended = say(running, "client", Cancel(session="s"))
    assert isinstance(done, Forward)
    assert decode(done.frame) == Done(session="s", finish_reason="cancelled", prompt_tokens=0, completion_tokens=1)
    assert ended == SessionEnded("s", "cancelled", 0.0)
    assert running.next_timer() is None


def test_a_session_that_is_not_kept_fails_with_its_verify_node() -> None:
    router = Router(max_kept_bytes=10)
    for role in ("verify", "client"):
        join(router, role, role)
    say(router, "client", OPEN)
    assert router.drops[DropReason.NOT_KEPT] == 1
    assert router.kept_bytes == 0
    error, _ = router.on_gone("verify", 1.0)
    assert isinstance(error, Forward)
    assert b"too much memory" in error.frame


@pytest.fixture
def resumable(router: Router) -> Router:
    """With session "s" under way, of a client that may come back for it."""
    serving = Serving(session="s", model="target", target=TARGET.fingerprint, keep_s=30.0)
    opening = replace(OPEN, resume_key="k")
    assert say(router, "client", opening) == [Forward("verify", encode(opening)), Send("client", serving), paired()]
    for start in range(3):
        say(router, "verify", replace(DELTA, start=start))
    return router


def test_a_client_that_was_away_gets_what_was_committed_since_its_position(resumable: Router) -> None:
    assert resumable.on_gone("client", 1.0) == []
    assert say(resumable, "verify", replace(DELTA, start=3)) == []
    join(resumable, "again", "client")
    resume = Resume(session="s", key="k", position=2)
    assert say(resumable, "again", resume) == [Forward("again", encode(replace(DELTA, start=i))) for i in (2, 3)]
    assert resumable.next_timer() is None
    assert say(resumable, "verify", replace(DELTA, start=4)) == [Forward("again", encode(replace(DELTA, start=4)))]
    assert say(resumable, "again", replace(resume, position=5)) == [], "up to date"


def test_the_end_of_an_answer_waits_for_its_client(resumable: Router) -> None:
    resumable.on_gone("client", 1.0)
    assert say(resumable, "verify", DONE) == [Send("draft", Release(session="s", reason="done"))]
    join(resumable, "again", "client")
    assert say(resumable, "again", Resume(session="s", key="k", position=3)) == [
        Forward("again", encode(DONE)),
        SessionEnded("s", "done", 0.0),
    ]


def test_a_client_that_does_not_come_back_ends_its_session(resumable: Router) -> None:
    resumable.on_gone("client", 1.0)
    assert resumable.next_timer() == 31.0
    cancel, _, ended = resumable.on_timer(31.0)
    assert cancel == Send("verify", Cancel(session="s", reason="client gone"))
    assert ended == SessionEnded("s", "its client was away for 30 s", 31.0)
    assert resumable.drops[DropReason.CLIENT_AWAY] == 1


@pytest.mark.parametrize("session", ["s", "t"])
def test_only_the_key_opens_a_session_to_another_link(resumable: Router, session: str) -> None:
    join(resumable, "thief", "client")
    actions = say(resumable, "thief", Resume(session=session, key="guessed", position=0))
    assert the_error(actions) == ("thief", session, "unknown_session")
    assert resumable.sessions["s"].client == "client"


def test_a_resume_takes_the_session_from_a_link_that_is_half_open(resumable: Router) -> None:
    join(resumable, "again", "client")
    assert say(resumable, "again", Resume(session="s", key="k", position=3)) == []
    assert resumable.on_gone("client", 1.0) == []
    assert say(resumable, "verify", DELTA)[0] == Forward("again", encode(DELTA))


def test_c036_a_position_that_is_gone_is_told_and_no_gap_is_left(resumable: Router) -> None:
    resumable.sessions["s"].kept.max_recent_bytes = 300  # type: ignore[union-attr]
    resumable.on_gone("client", 1.0)
    for start in range(3, 10):
        say(resumable, "verify", replace(DELTA, start=start))
    join(resumable, "again", "client")
    actions = say(resumable, "again", Resume(session="s", key="k", position=3))
    assert actions[0] == Send("verify", Cancel(session="s", reason="client gone"))
    assert the_error(actions[-1:]) == ("again", "s", "resume_gone")
    assert not resumable.sessions
    assert resumable.kept_bytes == 0


def test_a_malformed_client_gets_no_second_chance() -> None:
    router = Router(malformed_limit=1)
    for role in ("verify", "client"):
        join(router, role, role)
    say(router, "client", replace(OPEN, resume_key="k"))
    assert SessionEnded("s", "client gone", 0.0) in router.on_frame("client", b"{}", 0.0)


def test_a_draining_draft_node_hands_its_sessions_to_another_at_once(running: Router) -> None:
    join(running, "second", "draft")
    assert say(running, "draft", Draining(grace_s=5.0)) == [
        Send("draft", Release(session="s", reason="the draft node is draining")),
        paired(epoch=2, draft="second"),
    ]


def test_c068_long_answers_of_a_draining_verify_node_move_and_short_ones_finish(running: Router) -> None:
    say(running, "client", replace(OPEN, session="short"))
    join(running, "second", "verify")
    assert running.on_frame("verify", encode(Draining(grace_s=20.0)), 100.0) == []
    assert running.next_timer() == 115.0
    say(running, "verify", replace(DONE, session="short"))
    say(running, "verify", DELTA)
    assert running.on_timer(115.0) == [
        Send("verify", Cancel(session="s", reason="moved to another node")),
        Send("draft", Release(session="s", reason="moved to another verify node")),
        SessionMoved("s", "verify node second", 1),
        Forward("second", encode(replace(OPEN, committed=(5,)))),
        Send("second", Paired(session="s", epoch=2, draft="draft")),
    ]
    assert say(running, "verify", DONE) == [], "the Done that answers the cancel is late"


def test_c068_without_another_node_the_answer_stays_to_the_end_of_the_grace_time(running: Router) -> None:
    running.on_frame("verify", encode(Draining(grace_s=20.0)), 100.0)
    assert running.on_timer(115.0) == []
    assert running.sessions["s"].verify == "verify"


def test_a_request_that_meets_a_draining_node_goes_to_another(running: Router) -> None:
    join(running, "second", "verify")
    error = Error(session="s", code="draining", message="the verify node is draining")
    assert Forward("second", encode(OPEN)) in say(running, "verify", error)
    assert running.peers["verify"].draining


def test_nodes_are_chosen_by_round_trip_and_load(router: Router) -> None:
    join(router, "far", "verify", capacity=16)
    join(router, "draining", "verify")
    router.peers["draining"].draining = True
    for name, rtt_s in (("verify", 0.02), ("far", 0.2), ("draining", 0.0)):
        router.peers[name].rtt_s = rtt_s
    chosen = []
    for i in range(7):
        frame = encode(OpenSession(session=f"n{i}", prompt="x", speculate=False))
        (forward,) = router.on_frame("client", frame, 0.0)
        chosen.append(forward.peer)
    assert chosen == ["verify"] * 4 + ["far"] * 3, "the near one until it is full, for then it has a line"


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=5)
)
def test_no_choice_is_ever_worse_than_another_in_both_round_trip_and_load(
    nodes: list[tuple[bool, float, int, int]],
) -> None:
    peers = []
    for i, (draining, rtt_s, num_sessions, capacity) in enumerate(nodes):
        hello = Hello(protocol=PROTOCOL_VERSION, role="verify", name=f"n{i}", capacity=capacity, model=TARGET)
        sessions = dict.fromkeys(map(str, range(num_sessions)))
        peers.append(Peer(f"n{i}", hello, draining=draining, rtt_s=rtt_s, sessions=sessions))
    chosen, _ = choose_verify("", "", peers)
    ready = [peer for peer in peers if not peer.draining]
    assert (chosen is not None) == bool(ready)
    if chosen is not None:
        assert not chosen.draining
        for peer in ready:
            load = [(len(p.sessions) + 1) / p.hello.capacity for p in (peer, chosen)]
            assert not (peer.rtt_s < chosen.rtt_s and load[0] < load[1])  # type: ignore[operator]


def test_draining_nodes_get_no_new_session_and_keep_the_old(running: Router) -> None:
    draining = Draining(grace_s=1.0)
    assert say(running, "draft", draining) == []
    open_t = replace(OPEN, session="t")
    assert say(running, "client", open_t) == [Forward("verify", encode(open_t))]
    assert say(running, "draft", CANDIDATES) == [Forward("verify", encode(CANDIDATES))]
    say(running, "verify", draining)
    assert the_error(say(running, "client", replace(OPEN, session="u")))[2] == "no_verify_node"
    assert say(running, "verify", DELTA) == [Forward("client", encode(DELTA))]


def test_a_draining_relay_takes_neither_sessions_nor_peers(running: Router) -> None:
    assert {a.peer for a in running.on_drain(5.0, "update") if isinstance(a, Send)} == {"verify", "draft", "client"}
    assert the_error(say(running, "client", replace(OPEN, session="t")))[2] == "draining"
    assert join(running, "late", "client") == [ClosePeer("late", "draining", "the relay is shutting down")]
    assert say(running, "verify", DELTA) == [Forward("client", encode(DELTA))]


def test_c018_a_draft_node_that_fits_no_verify_node_is_refused(router: Router) -> None:
    (closed,) = join(router, "odd", "draft", model=replace(DRAFTER, tokenizer="cd" * 32))
    assert isinstance(closed, ClosePeer)
    assert (closed.peer, closed.code) == ("odd", "mismatch")
    for part in ("odd", "drafter@1", "cdcdcdcdcdcd", "verify", "target@1", "abababababab", "protocol 1"):
        assert part in closed.reason
    assert "odd" not in router.peers


def test_c018_a_verify_node_that_comes_later_refuses_the_draft_nodes_that_fit_none() -> None:
    router = Router()
    join(router, "odd", "draft", model=replace(DRAFTER, tokenizer="cd" * 32))
    join(router, "good", "draft")
    (closed,) = join(router, "verify", "verify")
    assert isinstance(closed, ClosePeer)
    assert (closed.peer, closed.code) == ("odd", "mismatch")
    assert set(router.peers) == {"good", "verify"}


def test_a_draft_node_that_fits_one_of_several_verify_nodes_serves_that_one(router: Router) -> None:
    other = replace(TARGET, name="other", tokenizer="cd" * 32)
    join(router, "other", "verify", model=other)
    assert join(router, "second", "draft", model=replace(other, name="small")) == []
    assert say(router, "client", replace(OPEN, model="other"))[1:] == [
        Send("other", Paired(session="s", epoch=1, draft="second"))
    ]


def test_c018_another_protocol_version_is_refused_with_both_sides_named(router: Router) -> None:
    hello = Hello(protocol=2, role="draft", name="new", model=DRAFTER)
    (closed,) = router.on_hello("new", hello, 0.0)
    assert isinstance(closed, ClosePeer)
    assert closed.code == "version"
    for part in ("new", "drafter@1", "abababababab", "protocol 2", "protocol 1", "target@1"):
        assert part in closed.reason


@pytest.mark.parametrize(
    ("peer", "message"),
    [("client", CANDIDATES), ("client", DELTA), ("draft", ACCEPTANCE), ("draft", OPEN), ("verify", CANDIDATES),
     ("verify", Cancel(session="s")), ("client", Release(session="s"))],
)  # fmt: skip
def test_a_role_may_send_only_its_own_messages(running: Router, peer: str, message: Message) -> None:
    assert the_error(say(running, peer, message)) == (peer, None, "not_allowed")
    assert running.drops[DropReason.WRONG_ROLE] == 1
    assert "s" in running.sessions


@pytest.mark.parametrize("frame", [b"", b"{", b"[]", b'{"type":"nonsense"}', b'{"type":"cancel"}', b"\xff\xfe\x00",
                                   b'{"type":"cancel","session":"%s"}' % (b"x" * 65)])  # fmt: skip
def test_malformed_frames_cost_their_sender_an_error(running: Router, frame: bytes) -> None:
    assert the_error(running.on_frame("client", frame, 0.0)) == ("client", None, "malformed")
    assert running.drops[DropReason.MALFORMED] == 1


def test_the_sender_of_too_many_malformed_frames_is_closed_and_its_sessions_end() -> None:
    router = Router(malformed_limit=3)
    for role in ("verify", "client"):
        join(router, role, role)
    say(router, "client", OPEN)
    for _ in range(2):
        router.on_frame("client", b"{", 0.0)
    closed, cancel, _ = router.on_frame("client", b"{", 0.0)
    assert isinstance(closed, ClosePeer)
    assert closed.code == "malformed"
    assert cancel == Send("verify", Cancel(session="s", reason="client gone"))
    assert router.on_frame("client", b"{", 0.0) == []
    assert router.drops[DropReason.UNKNOWN_PEER] == 1


def test_a_request_out_of_range_fails_alone_and_is_not_held_against_the_client(router: Router) -> None:
    frame = b'{"type":"open_session","session":"s","prompt":"x","max_tokens":-1}'
    assert the_error(router.on_frame("client", frame, 0.0)) == ("client", "s", "bad_request")
    assert router.peers["client"].num_malformed == 0


def test_a_client_has_a_limit_of_sessions(router: Router) -> None:
    codes = set()
    for i in range(257):
        actions = say(router, "client", replace(OPEN, session=f"s{i}", speculate=False))
        codes |= {action.message.code for action in actions if isinstance(action, Send)}  # type: ignore[attr-defined]
    assert codes == {"overloaded"}
    assert len(router.sessions) == 256


def test_a_session_that_cannot_be_handed_on_ends_alone_when_a_verify_node_comes(running: Router) -> None:
    say(running, "client", replace(OPEN, session="whole"))
    say(running, "verify", replace(DELTA, start=5))  # a gap: what was committed is not known
    running.on_gone("verify", 1.0)
    actions = join(running, "second", "verify")
    (told,) = [decode(a.frame) for a in actions if isinstance(a, Forward) and a.peer == "client"]
    assert isinstance(told, Error)
    assert (told.session, told.code) == ("s", "verify_lost")
    assert list(running.sessions) == ["whole"]
    assert running.sessions["whole"].verify == "second"


def full(router: Router, peer: str, message: Message, now: float = 0.0) -> list[Action]:
    """There was no room in the peer's queue for this message."""
    return router.on_queue_full(peer, encode(message), "4 frames wait already", now)


def test_a_request_that_does_not_fit_a_verify_nodes_queue_goes_to_another_or_is_refused(running: Router) -> None:
    assert the_error_told(full(running, "verify", OPEN)) == ("s", "overloaded")
    assert "verify" in running.peers
    join(running, "second", "verify")
    say(running, "client", OPEN)
    assert resent(full(running, running.sessions["s"].verify or "", OPEN)) == [("second", ())]
    # The queue has room again, and nobody waits for it.
    assert running.on_timer(1.0) == []
    assert running.deadlines == {}


def the_error_told(actions: list[Action]) -> tuple[str | None, str]:
    (told,) = [decode(a.frame) for a in actions if isinstance(a, Forward) and a.peer == "client"]
    assert isinstance(told, Error)
    return told.session, told.code


def test_answers_that_have_begun_wait_for_room_in_a_verify_nodes_queue(running: Router) -> None:
    """Who takes over many sessions at once must not be closed for it: it would come back to the same crowd."""
    others = [replace(OPEN, session=f"s{i}", speculate=False) for i in range(2)]
    for other in others:
        say(running, "client", other)
    running.on_gone("verify", 1.0)
    assert [peer for peer, _ in resent(running.on_hello("second", hello_of("second"), 2.0))] == ["second"] * 3
    for i in range(2):
        assert resent(full(running, "second", others[i], 2.0)) == []
    assert [s.verify for s in running.sessions.values()] == ["second", None, None]
    for i in range(2):
        at = running.next_timer()
        assert at is not None
        assert at < 3.0
        assert resent(running.on_timer(at)) == [("second", ())]
        assert running.sessions[f"s{i}"].verify == "second"
    assert running.deadlines == {}
    # For anything else a full queue is its reader's fault.
    closed = full(running, "second", CANDIDATES, 4.0)[0]
    assert isinstance(closed, ClosePeer)
    assert closed.code == "slow_consumer"


def hello_of(name: str) -> Hello:
    return Hello(protocol=PROTOCOL_VERSION, role="verify", name=name, model=TARGET)


def test_a_node_that_goes_leaves_nobody_waiting_for_its_queue(running: Router) -> None:
    running.on_gone("verify", 1.0)
    running.on_hello("second", hello_of("second"), 2.0)
    full(running, "second", OPEN, 2.0)
    running.on_gone("second", 2.01)
    assert running.next_timer() == 11.0


def test_a_request_that_comes_twice_counts_once(running: Router) -> None:
    assert say(running, "client", OPEN) == []
    assert running.drops[DropReason.REPEATED] == 1
    assert the_error(say(running, "client", replace(OPEN, prompt="another")))[2] == "bad_session"
    assert say(running, "verify", DONE)[0] == Forward("client", encode(DONE))


def test_candidates_for_an_earlier_session_of_the_same_name_are_of_another_epoch(running: Router) -> None:
    """They may arrive when the name is in use again; taken for the new one's, they would cost it its draft node."""
    say(running, "verify", DONE)
    _, pairing = say(running, "client", OPEN)
    assert isinstance(pairing, Send)
    assert isinstance(pairing.message, Paired)
    assert pairing.message.epoch != CANDIDATES.epoch
