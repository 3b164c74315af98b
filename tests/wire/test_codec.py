from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.codec import append_residence, decode, digest_ids, encode, peek, protocol_of
from wire.errors import FrameTooLarge, ProtocolError
from wire.messages import (
    FINISH_REASONS,
    MAX_DURATION_S,
    MAX_FRAME_BYTES,
    MAX_NODES_PER_FRAME,
    MESSAGES,
    PROTOCOL_VERSION,
    ROLES,
    SOURCES,
    Acceptance,
    AppliedRound,
    Cancel,
    Candidates,
    ChatMessage,
    Done,
    Draining,
    Error,
    Hello,
    Message,
    ModelIdentity,
    OpenSession,
    Paired,
    PeerGone,
    Ping,
    Pong,
    Prefix,
    Probe,
    Release,
    Resume,
    Resync,
    RoundTiming,
    Serving,
    TextDelta,
    Tokenize,
    Tokenized,
    TokenLogprob,
    Waiting,
    Welcome,
)
from wire.sampling import Sampling

sessions = st.text(min_size=1, max_size=64)
names = st.text(min_size=1, max_size=40)
words = st.text(max_size=40)
ids = st.integers(0, 2**31 - 1)
id_lists = st.lists(ids, max_size=8).map(tuple)
positions = st.integers(0, 1 << 24)
epochs = st.integers(1, 1 << 24)
numbers = st.integers(0, 1 << 40)
seconds = st.floats(0.0, MAX_DURATION_S)
figures = st.floats(allow_nan=False, allow_infinity=False)
models = st.builds(
    ModelIdentity, name=names, revision=words, tokenizer=names, vocab_size=st.integers(9, 2**31 - 1),
    context_length=st.integers(2, 1 << 24), stop_ids=st.lists(st.integers(0, 8), max_size=3).map(tuple),
    weights=words, drafts_for=words,
)  # fmt: skip
samplings = st.builds(
    Sampling, temperature=st.floats(0.0, 100.0), top_k=ids, top_p=st.floats(1e-6, 1.0), min_p=st.floats(0.0, 1.0),
    seed=st.integers(-(2**63) + 1, 2**63 - 1), repetition_penalty=st.floats(1e-3, 10.0),
    presence_penalty=st.floats(-2.0, 2.0), frequency_penalty=st.floats(-2.0, 2.0),
    logit_bias=st.dictionaries(ids.map(str), st.floats(-100.0, 100.0), max_size=3), min_tokens=ids,
)  # fmt: skip


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    role = draw(st.sampled_from(ROLES))
    return Hello(
        protocol=draw(st.integers(0, 2**31 - 1)), role=role, name=draw(names), region=draw(words),
        capacity=draw(st.integers(1, 65_536)), model=None if role == "client" else draw(models),
    )  # fmt: skip


@st.composite
def open_sessions(draw: st.DrawFn) -> OpenSession:
    turns = st.lists(st.builds(ChatMessage, role=names, content=words), max_size=3).map(tuple)
    asked = draw(st.sampled_from([{"prompt": words}, {"messages": turns}, {"prompt_ids": id_lists}]))
    return OpenSession(
        session=draw(sessions), model=draw(words), sampling=draw(samplings), max_tokens=draw(positions),
        stop=tuple(draw(st.lists(names, max_size=3))), logprobs=draw(st.none() | st.integers(0, 20)),
        speculate=draw(st.booleans()), ignore_eos=draw(st.booleans()), committed=draw(id_lists), target=draw(words),
        resume_key=draw(words), **{name: draw(values) for name, values in asked.items()},
    )  # fmt: skip


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    tokens = draw(id_lists)
    total = draw(st.integers(max(1, len(tokens)), 1 << 20))
    return Prefix(
        session=draw(sessions), epoch=draw(epochs), start=draw(st.integers(0, total - len(tokens))), tokens=tokens,
        total=total, digest=digest_ids(tokens), limit=draw(st.integers(total, 1 << 24)),
        prompt_tokens=draw(st.integers(1, total)), sampling=draw(samplings),
    )  # fmt: skip


applied_rounds = st.builds(AppliedRound, frame=numbers, relay_s=seconds, apply_s=seconds, round_s=seconds)


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    first = draw(numbers)
    num = draw(st.integers(1, 8))
    return Candidates(
        session=draw(sessions), epoch=draw(epochs), frame=draw(numbers), first_node=first,
        parents=tuple(draw(st.integers(-8, first + i - 1)) for i in range(num)),
        tokens=tuple(draw(ids) for _ in range(num)), scores=tuple(draw(st.integers(0, 255)) for _ in range(num)),
        draft_s=draw(seconds), overhead_s=draw(seconds), relay_s=draw(seconds),
        applied=tuple(draw(st.lists(applied_rounds, max_size=3))),
    )  # fmt: skip


@st.composite
def acceptances(draw: st.DrawFn) -> Acceptance:
    tokens = draw(id_lists)
    timings = st.builds(
        RoundTiming, frame=numbers, relay_s=seconds, queue_s=seconds, verify_s=seconds, overhead_s=seconds
    )
    return Acceptance(
        session=draw(sessions), epoch=draw(epochs), start=draw(positions), tokens=tokens,
        num_accepted=draw(st.integers(0, len(tokens))), orphan_frame=draw(st.integers(-1, 1 << 40)),
        rounds=tuple(draw(st.lists(timings, max_size=3))), hop_rtt_s=draw(seconds), relay_s=draw(seconds),
    )  # fmt: skip


logprobs = st.builds(
    TokenLogprob, logprob=figures, top_ids=id_lists, top_logprobs=st.lists(figures, max_size=3).map(tuple),
    token_hex=words, top_hex=st.lists(words, max_size=3).map(tuple),
)  # fmt: skip
BY_TYPE: dict[type[Message], st.SearchStrategy[Any]] = {
    Hello: hellos(),
    Welcome: st.builds(
        Welcome, protocol=ids, peer=names, max_frame_bytes=st.integers(1024, 1 << 30),
        ping_interval_s=st.floats(0.01, 3600), ping_timeout_s=st.floats(0.01, 3600),
        frames_per_s=seconds, bytes_per_s=seconds,
    ),
    OpenSession: open_sessions(),
    Resume: st.builds(Resume, session=sessions, key=names, position=positions),
    Serving: st.builds(Serving, session=sessions, model=words, target=names, keep_s=seconds),
    Waiting: st.builds(Waiting, session=sessions, place=st.integers(1, 65_536)),
    Cancel: st.builds(Cancel, session=sessions, reason=words),
    Tokenize: st.builds(Tokenize, session=sessions, model=words, prompt=words),
    Tokenized: st.builds(Tokenized, session=sessions, tokens=id_lists, text=words, context_length=epochs),
    TextDelta: st.builds(
        TextDelta, session=sessions, start=positions, tokens=id_lists, text=words,
        sources=st.lists(st.sampled_from(SOURCES), max_size=4).map(tuple),
        logprobs=st.none() | st.lists(logprobs, max_size=3).map(tuple),
    ),
    Done: st.builds(
        Done, session=sessions, finish_reason=st.sampled_from(FINISH_REASONS), prompt_tokens=positions,
        completion_tokens=positions, report=st.dictionaries(names, figures, max_size=4),
    ),
    Error: st.builds(Error, session=st.none() | sessions, code=names, message=words),
    Paired: st.builds(Paired, session=sessions, epoch=epochs, draft=words),
    PeerGone: st.builds(PeerGone, session=sessions, role=st.sampled_from(ROLES), reason=words),
    Release: st.builds(Release, session=sessions, reason=words),
    Prefix: prefixes(),
    Candidates: candidates(),
    Acceptance: acceptances(),
    Resync: st.builds(Resync, session=sessions, epoch=epochs, length=positions),
    Draining: st.builds(Draining, grace_s=seconds, reason=words),
    Ping: st.builds(Ping, number=numbers),
    Pong: st.builds(Pong, number=numbers, residence_s=seconds),
    Probe: st.builds(Probe, session=sessions, sender=words, answer_bytes=st.integers(0, 1 << 20), pad=words),
}  # fmt: skip
any_message = st.one_of(*BY_TYPE.values())

CANDIDATES = Candidates(
    session="s1", epoch=1, frame=7, first_node=10, parents=(-5, 10), tokens=(3, 4), scores=(1, 2), draft_s=0.02
)
TIMING = RoundTiming(frame=7, relay_s=0.001, queue_s=0.002, verify_s=0.03, overhead_s=0.004)
ACCEPTANCE = Acceptance(session="s1", epoch=1, start=5, tokens=(3, 4), num_accepted=1, rounds=(TIMING,))
HELLO = Hello(
    protocol=PROTOCOL_VERSION, role="draft", name="d1",
    model=ModelIdentity(name="m", revision="r", tokenizer="t", vocab_size=100, context_length=64, stop_ids=(2,)),
)  # fmt: skip
EXAMPLES = (
    HELLO,
    CANDIDATES,
    ACCEPTANCE,
    OpenSession(session="s1", prompt="hello", stop=("x",), sampling=Sampling(logit_bias={"5": 1.5}, temperature=0.7)),
    TextDelta(session="s1", start=0, tokens=(1,), text="é", sources=("draft",), logprobs=(TokenLogprob(logprob=-1.0),)),
    Done(session="s1", finish_reason="stop", prompt_tokens=1, completion_tokens=2, report={"rounds": 3.0}),
    Prefix(session="s1", epoch=1, start=0, tokens=(1, 2), total=2, digest="0", limit=9, prompt_tokens=1),
    Error(code="bad_request", message="no"),
    Ping(number=3),
)


def test_every_message_of_the_protocol_is_tried() -> None:
    assert {cls.type for cls in BY_TYPE} == set(MESSAGES)


@given(any_message)
def test_decode_gives_back_what_encode_was_given_and_peek_agrees(message: Message) -> None:
    frame = encode(message)
    assert decode(frame) == message
    assert decode(frame.decode()) == message
    assert peek(frame) == (message.type, getattr(message, "session", None))


def test_a_frame_begins_with_type_and_session_and_omits_defaults() -> None:
    assert encode(Error(session="s1", code="c", message="m")).startswith(b'{"type":"error","session":"s1","code"')
    assert encode(Error(code="c", message="m")) == b'{"type":"error","code":"c","message":"m"}'
    assert encode(Release(session="s")) == b'{"type":"release","session":"s"}'
    assert b"relay_s" not in encode(CANDIDATES)


def test_peek_reads_other_layouts_too() -> None:
    assert peek(b'{ "number": 1, "type": "ping" }') == ("ping", None)
    assert peek(b'{"session":"a","type":"cancel"}') == ("cancel", "a")
    assert peek(rb'{"type":"cancel","session":"\u0061\""}') == ("cancel", 'a"')


def test_peek_does_not_parse_the_rest_of_a_canonical_frame() -> None:
    assert peek(b'{"type":"cancel","session":"s1","reason":' + b"[" * 5000) == ("cancel", "s1")


@pytest.mark.parametrize(
    "frame",
    [
        b'{"type":"cancel","session":"mine","session":"yours"}',
        b'{"type":"cancel","session":"mine","type":"resync","epoch":1,"length":1}',
        b'{"type":"ping","type":"pong","number":1}',
    ],
)
def test_a_frame_routed_as_one_thing_is_not_read_as_another(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="twice"):
        decode(frame)


@given(st.one_of(candidates(), acceptances()), seconds)
def test_residence_is_appended_without_touching_the_rest(message: Candidates | Acceptance, relay_s: float) -> None:
    marked = decode(append_residence(encode(message), relay_s))
    assert isinstance(marked, Candidates | Acceptance)
    assert marked.relay_s == pytest.approx(relay_s, abs=1e-6)
    assert dataclasses.replace(marked, relay_s=message.relay_s) == message


def test_residence_is_told_apart_from_that_of_the_rounds_inside_a_frame() -> None:
    marked = decode(append_residence(encode(ACCEPTANCE), 0.5))
    assert marked == dataclasses.replace(ACCEPTANCE, relay_s=0.5)


def test_residence_leaves_alone_what_it_cannot_mark() -> None:
    assert append_residence(b'{"a":1} ', 0.5) == b'{"a":1} '
    full = b'{"a":"' + b"x" * (MAX_FRAME_BYTES - 8) + b'"}'
    assert len(full) == MAX_FRAME_BYTES
    assert append_residence(full, 0.5) == full


def test_a_frame_above_the_limit_is_neither_written_nor_read() -> None:
    with pytest.raises(FrameTooLarge, match=r"open_session has .* bytes, above the limit of 1048576"):
        encode(OpenSession(session="s", prompt="é" * 600_000))
    with pytest.raises(FrameTooLarge):
        decode(b" " * (MAX_FRAME_BYTES + 1))
    with pytest.raises(FrameTooLarge):
        decode("é" * (MAX_FRAME_BYTES // 2 + 1))


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ProtocolError, match="JSON cannot carry"):
        encode(Cancel(session="s", reason="\ud800"))
    with pytest.raises(ProtocolError):
        decode('{"type":"cancel","session":"\ud800"}')


OVER = {"frame": 1, "relay_s": 0.001, "apply_s": 0.002, "round_s": 0.1}


def corrupted(**fields: Any) -> bytes:
    return orjson.dumps(orjson.loads(encode(CANDIDATES)) | fields)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (corrupted(tokens=[3, -1]), "candidates.tokens must hold integers in 0..2147483647, got -1"),
        (corrupted(tokens=[3, 2**31]), "candidates.tokens must hold integers"),
        (corrupted(tokens=[3, 1.0]), "candidates.tokens must hold items of type int"),
        (corrupted(tokens=[3, True]), "candidates.tokens must hold items of type int"),
        (corrupted(tokens=[], parents=[], scores=[]), "at least one"),
        (corrupted(tokens=[3]), "as many parents as tokens"),
        (corrupted(tokens=[3] * (MAX_NODES_PER_FRAME + 1)), "the limit is 1024"),
        (corrupted(parents=[-5, 11]), "must be an earlier node"),
        (corrupted(scores=[1, 256]), "candidates.scores"),
        (corrupted(draft_s=None), "candidates.draft_s must be of type float, got None"),
        (encode(CANDIDATES).replace(b"0.02", b"NaN"), "not JSON"),
        (encode(CANDIDATES).replace(b"0.02", b"1e999"), "not JSON"),
        (encode(CANDIDATES)[:-9], "not JSON"),
        (corrupted(nonce=1), "candidates has no field 'nonce'"),
        (corrupted(applied=[OVER] * 65), "candidates.applied has 65 entries, the limit is 64"),
        (corrupted(applied=[OVER | {"apply_s": -0.1}]), "applied.apply_s must be in 0..1e.07, got -0.1"),
        (corrupted(applied=[{"frame": 1}]), r"candidates.applied\[0\] lacks relay_s, apply_s, round_s"),
        (corrupted(session=5), "session"),
        (b'{"type":"candidates","session":"s1"}', "candidates lacks epoch, frame"),
        (b'{"type":"teapot"}', "type must be one of"),
        (b'{"type":["ping"]}', "type must be one of"),
        (b"[1]", "must be an object"),
        (b"", "not JSON"),
        (b'{"type":"ping","number":' + b"[" * 1000 + b"]" * 1000 + b"}", "ping.number"),
        (b"[" * 1000 + b"]" * 1000, "must be an object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"type":"cancel","session":"\xff"}', "UTF-8"),
        (b'{"type":"done","session":"s","finish_reason":"stop","prompt_tokens":1,"completion_tokens":1,'
         b'"report":{"a":"b"}}', "done.report must hold numbers"),
        (b'{"type":"open_session","session":"s","prompt":"p","sampling":{"logit_bias":{"' + b"1" * 5000 + b'":1}}}',
         "keyed by token ids"),
        (b'{"type":"ping","number":1,"' + b"k" * 100_000 + b'":1}', "no field"),
    ],
)  # fmt: skip
def test_c047_a_malformed_frame_is_a_short_protocol_error(frame: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as caught:
        decode(frame)
    # It has to fit into the message of an Error frame.
    encode(Error(code="malformed", message=str(caught.value)))


def test_c047_ten_thousand_damaged_frames_raise_protocol_errors_only() -> None:
    rng = random.Random(47)
    frames = [encode(message) for message in EXAMPLES]
    num_refused = 0
    for _ in range(10_000):
        frame = damaged(rng, rng.choice(frames))
        peeked = None
        with contextlib.suppress(ProtocolError):
            peeked = peek(frame)
        try:
            message = decode(frame)
        except ProtocolError:
            num_refused += 1
            continue
        assert peeked == (message.type, getattr(message, "session", None))
    assert 5000 < num_refused < 10_000


def damaged(rng: random.Random, frame: bytes) -> bytes:
    """A frame with bytes flipped, lost or doubled, or with a value that its field does not take."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(64))
    if kind == 1:
        return frame[: rng.randrange(len(frame))]
    if kind == 2:
        data = bytearray(frame)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice(rng.randbytes(1) + b'"{}[],:\\0-')
        return bytes(data)
    if kind == 3:
        at, to = sorted(rng.randrange(len(frame)) for _ in range(2))
        return frame[:to] + frame[at:]
    odd = [None, True, -1, 2**31, 2**63, 1e300, "", "x" * 300, [], {}, [None], [[]], {"a": None}, ["a"], [1.5], "1"]
    data_of = orjson.loads(frame)
    if kind == 4:
        data_of[rng.choice(list(data_of))] = rng.choice(odd)
    else:
        data_of[rng.choice(["epoch", "tokens", "sampling", "x", "relay_s", "model"])] = rng.choice(odd)
    return orjson.dumps(data_of)


def test_the_protocol_version_is_read_from_a_hello_that_is_not_ours() -> None:
    assert protocol_of(b'{"type":"hello","protocol":9,"flavour":"new"}') == 9
    assert protocol_of(b'{"type":"hello","protocol":true}') is None
    assert protocol_of(b"[]") is None
    assert protocol_of(b"{") is None


def test_digest_is_over_little_endian_ids() -> None:
    assert digest_ids([1, 258]) == hashlib.sha256(b"\x01\0\0\0\x02\x01\0\0").hexdigest()
    assert digest_ids(()) == hashlib.sha256(b"").hexdigest()
