"""What is kept of an answer is all of its tokens, and its newest frames as they came."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.kept import FRAME_OVERHEAD_BYTES, KeptAnswer
from wire.codec import encode
from wire.errors import ProtocolError
from wire.messages import TextDelta


def frames_of(sizes: list[int], start: int) -> list[bytes]:
    frames = []
    for size in sizes:
        tokens = tuple(range(start, start + size))
        frames.append(encode(TextDelta(session="s", start=start, tokens=tokens, text="x" * size)))
        start += size
    return frames


@given(st.lists(st.integers(1, 5), max_size=30), st.integers(0, 5), st.integers(0, 1000))
def test_every_token_is_kept_and_every_answer_is_whole_or_none(sizes: list[int], num: int, bound: int) -> None:
    kept = KeptAnswer(b"opening", range(num), max_recent_bytes=bound)
    frames = frames_of(sizes, num)
    for frame in frames:
        kept.add(frame)
        assert kept.num_bytes <= len(b"opening") + bound + 4 * (num + sum(sizes))
    assert kept.tokens() == tuple(range(num + sum(sizes)))
    position = num
    for i in range(len(frames) + 1):
        since = kept.since(position)
        assert since is None or since == frames[i:]
        # What fits the bound is there: only what does not may be gone.
        if sum(len(frame) + FRAME_OVERHEAD_BYTES for frame in frames[i:]) <= bound:
            assert since is not None
        position += sizes[i] if i < len(sizes) else 1
    assert kept.since(position) is None, "a position that has not been reached"


def test_repeated_tokens_count_once_and_a_gap_is_an_error() -> None:
    kept = KeptAnswer(b"")
    for start, tokens in ((0, (7, 8)), (0, (7, 8)), (1, (8, 9))):
        kept.add(encode(TextDelta(session="s", start=start, tokens=tokens, text="x")))
    assert kept.tokens() == (7, 8, 9)
    kept.add(encode(TextDelta(session="s", start=4, tokens=(1,), text="x")))
    with pytest.raises(ProtocolError, match="from 4 came when 3 was due"):
        kept.tokens()


def test_c036_the_buffer_starts_at_50() -> None:
    frames = frames_of([1] * 58, 0)
    kept = KeptAnswer(b"", max_recent_bytes=sum(len(frame) + FRAME_OVERHEAD_BYTES for frame in frames[50:]))
    for frame in frames:
        kept.add(frame)
    assert kept.since(57) == frames[57:]
    assert kept.since(50) == frames[50:]
    assert kept.since(49) is None


@pytest.mark.parametrize(
    "frame",
    [
        b"{",
        b"[]",
        b'{"type":"done","session":"s","start":0,"tokens":[1]}',
        b'{"type":"text_delta","session":"s","start":-1,"tokens":[1]}',
        b'{"type":"text_delta","session":"s","start":true,"tokens":[1]}',
        b'{"type":"text_delta","session":"s","start":0,"tokens":"1"}',
        b'{"type":"text_delta","session":"s","start":0,"tokens":["1"]}',
        b'{"type":"text_delta","session":"s","start":0,"tokens":[1.5]}',
        b'{"type":"text_delta","session":"s","start":0,"tokens":[2147483648]}',
    ],
)
def test_what_is_no_delta_is_a_protocol_error(frame: bytes) -> None:
    kept = KeptAnswer(b"")
    kept.add(frame)
    with pytest.raises(ProtocolError):
        kept.tokens()
