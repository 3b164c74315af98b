"""C047: 100,000 mutated frames from every role end at most their own sessions, in bounded time."""

from __future__ import annotations

import random
from dataclasses import replace

import orjson
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from relay.actions import ClosePeer, Forward, Send, SessionEnded
from relay.router import Router
from wire.codec import decode, encode
from wire.errors import ProtocolError
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
    Ping,
    Prefix,
    Resume,
    Resync,
    TextDelta,
)

TARGET = ModelIdentity(name="target", revision="1", tokenizer="ab" * 32, vocab_size=256, context_length=4096)
NUM_EXAMPLES, FRAMES_AN_EXAMPLE = 500, 200
ODD = [None, True, -1, 0, 2**31, 2**63, 1e300, "", "x" * 300, "s", [], {}, [None], [[]], {"a": None}, [1.5], "1"]
SESSIONS = st.sampled_from(["mine", "good", "other", "x" * 64])


def messages(session: str) -> list[Message]:
    return [
        OpenSession(session=session, prompt="x", resume_key="guess"),
        OpenSession(session=session, prompt_ids=(1, 2), committed=(3,), target="t"),
        Resume(session=session, key="guess", position=0),
        Cancel(session=session),
        TextDelta(session=session, start=0, tokens=(1,), text="forged"),
        Done(session=session, finish_reason="stop", prompt_tokens=1, completion_tokens=1),
        Error(session=session, code="malformed", message="x"),
        Error(session=session, code="failed", message="x"),
        Prefix(session=session, epoch=1, start=0, tokens=(1,), total=1, digest="d", limit=9, prompt_tokens=1),
        Acceptance(session=session, epoch=1, start=1, tokens=(5,)),
        Candidates(session=session, epoch=1, frame=0, first_node=0, parents=(-1,), tokens=(5,), scores=(0,)),
        Resync(session=session, epoch=1, length=2),
        Draining(grace_s=1.0),
        Ping(number=1),
    ]


def mutated(rng: random.Random, frame: bytes) -> bytes:
    """The frame with bytes flipped, cut or doubled, or with fields that have odd values, other names, or twice."""
    match rng.randrange(7):
        case 0:
            return frame
        case 1:
            return rng.randbytes(rng.randrange(80))
        case 2:
            return frame[: rng.randrange(len(frame))]
        case 3:
            data = bytearray(frame)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.choice(rng.randbytes(1) + b'"{}[],:\\0-')
            return bytes(data)
        case 4:
            at, to = sorted(rng.randrange(len(frame)) for _ in range(2))
            return frame[:to] + frame[at:]
        case 5:
            fields = orjson.loads(frame)
            fields[rng.choice(list(fields))] = rng.choice(ODD)
            return orjson.dumps(fields, default=str)
        case _:
            return frame[:-1] + b',"session":"good"}'


def join(router: Router, peer: str, role: str) -> None:
    model = None if role == "client" else TARGET
    router.on_hello(peer, Hello(protocol=PROTOCOL_VERSION, role=role, name=peer, capacity=9, model=model), 0.0)


@settings(
    max_examples=NUM_EXAMPLES, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)
@given(st.integers(0, 2**32), SESSIONS, st.sampled_from(["client", "draft", "verify"]))
def test_c047_a_hundred_thousand_mutated_frames_end_at_most_their_own_sessions(
    seed: int, session: str, role: str
) -> None:
    rng = random.Random(seed)
    router = Router(malformed_limit=10_000)
    for peer, its_role in (("verify", "verify"), ("draft", "draft"), ("client", "client")):
        join(router, peer, its_role)
    opening = OpenSession(session="good", prompt="x", resume_key="a-key-nobody-knows")
    router.on_frame("client", encode(opening), 0.0)
    join(router, "vandal", role)
    frames = [encode(message) for message in messages(session)]
    for i in range(FRAMES_AN_EXAMPLE):
        for action in router.on_frame("vandal", mutated(rng, rng.choice(frames)), float(i)):
            match action:
                case Forward(peer, frame):
                    # What is passed on belongs to no session of others, whatever it is.
                    assert peer != "client"
                    assert b'"session":"good"' not in frame or _session_of(frame) != "good"
                case Send(peer, message):
                    assert getattr(message, "session", None) != "good" or peer == "vandal"
                case ClosePeer(peer):
                    assert peer == "vandal"
                case SessionEnded(ended):
                    assert ended != "good"
    # The good session goes on as if nothing had been.
    delta = TextDelta(session="good", start=0, tokens=(7,), text="a")
    assert router.on_frame("verify", encode(delta), 0.0) == [Forward("client", encode(delta))]
    candidates = Candidates(
        session="good", epoch=1, frame=0, first_node=0, parents=(-1,), tokens=(5,), scores=(0,)
    )  # fmt: skip
    assert router.on_frame("draft", encode(candidates), 0.0) == [Forward("verify", encode(candidates))]
    done = Done(session="good", finish_reason="stop", prompt_tokens=1, completion_tokens=1)
    assert router.on_frame("verify", encode(done), 0.0)[0] == Forward("client", encode(done))
    assert router.kept_bytes <= router.max_kept_bytes
    assert len(router.sessions) <= 5
    router.on_frame("client", encode(replace(opening, session="next")), 0.0)
    assert "next" in router.sessions


def _session_of(frame: bytes) -> str | None:
    try:
        return getattr(decode(frame), "session", None)
    except ProtocolError:
        return None
