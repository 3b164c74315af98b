"""C044: big frames go in parts, and small ones between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.codec import encode
from wire.errors import FrameTooLarge, ProtocolError, QueueFull
from wire.messages import MAX_FRAME_BYTES, Cancel, OpenSession, TextDelta
from wire.outbox import Outbox
from wire.parts import PART_BYTES, Assembler, is_part, split


@given(st.integers(0, 5 * PART_BYTES + 3), st.integers(0, 255))
def test_what_is_split_comes_back(num_bytes: int, byte: int) -> None:
    frame = bytes([byte]) * num_bytes + b"}"
    parts = split(frame)
    assembler = Assembler()
    for part in parts:
        assert is_part(part)
        assert len(part) <= PART_BYTES + 2
    assert [assembler.take(part) for part in parts] == [None] * (len(parts) - 1) + [frame]


def test_no_frame_of_ours_looks_like_a_part() -> None:
    assert not is_part(encode(Cancel(session="s")))
    assert not is_part(b"")


@pytest.mark.parametrize("part", [b"", b"\0", b"\0\0", b"\0\2x", b"{}"])
def test_what_is_no_part_is_refused(part: bytes) -> None:
    assembler = Assembler()
    assembler.take(b"\0\0begin")
    with pytest.raises(ProtocolError):
        assembler.take(part)
    assert assembler.take(b"\0\1end") == b"end", "nothing is left of what was broken off"


def test_c032_parts_are_held_to_the_one_limit() -> None:
    assembler = Assembler()
    part = b"\0\0" + b"x" * (MAX_FRAME_BYTES // 2)
    assembler.take(part)
    assembler.take(part)
    with pytest.raises(FrameTooLarge):
        assembler.take(b"\0\1x")


def delta(session: str, num_bytes: int = 10, start: int = 0) -> bytes:
    return encode(TextDelta(session=session, start=start, tokens=(1,), text="x" * num_bytes))


def test_c044_small_frames_pass_a_big_one_and_those_of_its_session_do_not() -> None:
    outbox = Outbox(100, 1 << 22)
    big = encode(OpenSession(session="big", prompt="x" * 100_000))
    outbox.add(delta("a"), 0.0)
    outbox.add(big, 0.0)
    cancel = encode(Cancel(session="big"))
    outbox.add(cancel, 0.0)
    outbox.add(delta("b"), 0.0)
    outbox.add_first([b"pong"], 0.0)
    small = [frame for frame, _ in outbox.take_small(1 << 20)]
    assert small == [b"pong", delta("a"), delta("b")]
    assembler, came = Assembler(), []
    while (entry := outbox.take_big()) is not None:
        came.append(assembler.take(entry[0]) if is_part(entry[0]) else entry[0])
    assert [frame for frame in came if frame] == [big, cancel]
    assert (len(outbox), outbox.num_bytes) == (0, 0)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([10, 2 * PART_BYTES, 5 * PART_BYTES]), st.booleans()),
        max_size=20,
    )
)
def test_c044_each_session_keeps_its_order_and_nothing_is_lost(frames: list[tuple[str, int, bool]]) -> None:
    outbox, assembler = Outbox(10_000, 1 << 30), Assembler()
    sent: dict[str, list[bytes]] = {}
    came: dict[str, list[bytes]] = {}

    def step() -> bool:
        """What a link does in one turn: all that is small, then one part."""
        found = [frame for frame, _ in outbox.take_small(1 << 20)]
        if (entry := outbox.take_big()) is not None:
            whole = assembler.take(entry[0]) if is_part(entry[0]) else entry[0]
            found += [whole] if whole is not None else []
        for frame in found:
            came.setdefault(chr(frame[frame.index(b'"session":"') + 11]), []).append(frame)
        return len(outbox) > 0

    for i, (session, num_bytes, stepping) in enumerate(frames):
        frame = delta(session, num_bytes, i)
        outbox.add(frame, 0.0)
        sent.setdefault(session, []).append(frame)
        if stepping:
            step()
    while step():
        continue
    assert came == sent
    assert outbox.num_bytes == 0


def test_the_bounds_hold_for_parts_too() -> None:
    outbox = Outbox(100, 3 * PART_BYTES)
    outbox.add(delta("a", 2 * PART_BYTES), 0.0)
    with pytest.raises(QueueFull):
        outbox.add(delta("a", 2 * PART_BYTES), 0.0)
    with pytest.raises(FrameTooLarge):
        Outbox(100, 1 << 30).add(b"x" * (MAX_FRAME_BYTES + 1), 0.0)


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 1000), st.booleans())
def test_what_is_taken_at_once_is_bounded(sizes: list[int], max_bytes: int, with_big: bool) -> None:
    outbox = Outbox(1000, 1 << 30)
    if with_big:
        outbox.add(delta("big", 2 * PART_BYTES), 0.0)
    frames = [delta("a", size, i) for i, size in enumerate(sizes)]
    for i, frame in enumerate(frames):
        outbox.add(frame, float(i))
    taken = []
    while batch := outbox.take_small(max_bytes):
        assert sum(len(frame) for frame, _ in batch[:-1]) < max_bytes
        taken += batch
    assert taken == [(frame, float(i)) for i, frame in enumerate(frames)]
    while outbox.take_big() is not None:
        continue
    assert outbox.num_bytes == 0
