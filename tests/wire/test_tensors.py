from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import FrameTooLarge, ProtocolError
from wire.messages import MAX_FRAME_BYTES
from wire.tensors import ITEM_BYTES, TensorHeader, decode_tensor, encode_tensor

HEADER = TensorHeader(session="s1", name="hidden_states", dtype="float32", shape=(2, 3))
PAYLOAD = bytes(range(24))


@given(
    st.text(min_size=1, max_size=64), st.text(min_size=1, max_size=30), st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 3), max_size=4).map(tuple), st.data(),
)  # fmt: skip
def test_a_tensor_comes_back_as_it_was_sent(
    session: str, name: str, dtype: str, shape: tuple[int, ...], data: st.DataObject
) -> None:
    header = TensorHeader(session=session, name=name, dtype=dtype, shape=shape)
    payload = data.draw(st.binary(min_size=header.payload_bytes, max_size=header.payload_bytes))
    assert header.payload_bytes == math.prod(shape) * ITEM_BYTES[dtype]
    got, view = decode_tensor(encode_tensor(header, payload))
    assert (got, bytes(view)) == (header, payload)


def test_the_payload_is_a_view_of_the_frame() -> None:
    frame = encode_tensor(HEADER, memoryview(PAYLOAD))
    assert decode_tensor(frame)[1].obj is frame


def test_every_truncation_is_a_protocol_error() -> None:
    frame = encode_tensor(HEADER, PAYLOAD)
    for size in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode_tensor(frame[:size])
    with pytest.raises(ProtocolError, match="must have 24 bytes, got 25"):
        decode_tensor(frame + b"\0")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"float32"', b'"float64"', "tensor.dtype must be one of"),
        (b'"little"', b'"bigger"', "tensor.order must be one of little"),
        (b"[2,3]", b"[2,4]", "must have 32 bytes, got 24"),
        (b"[2,3]", b"[-2]", "must hold integers"),
        (b"[2,3]", b"null", "tensor.shape must be a list"),
        (b'"name"', b'"mane"', "has no field"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_by_name(old: bytes, new: bytes, message: str) -> None:
    frame = encode_tensor(HEADER, PAYLOAD)
    head = frame[4:-24].replace(old, new)
    with pytest.raises(ProtocolError, match=message):
        decode_tensor(len(head).to_bytes(4, "little") + head + PAYLOAD)


def test_sizes_are_bounded_before_anything_is_allocated() -> None:
    huge = TensorHeader(session="s", name="h", dtype="uint8", shape=(MAX_FRAME_BYTES,))
    with pytest.raises(FrameTooLarge, match="tensor h has"):
        encode_tensor(huge, bytes(MAX_FRAME_BYTES))
    with pytest.raises(FrameTooLarge):
        decode_tensor(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="header has 4294967295 bytes"):
        decode_tensor(b"\xff" * 64)
    with pytest.raises(ProtocolError, match="contiguous"):
        encode_tensor(HEADER, memoryview(bytes(48))[::2])


def test_damaged_tensor_frames_raise_protocol_errors_only() -> None:
    rng = random.Random(1)
    frame = encode_tensor(HEADER, PAYLOAD)
    for _ in range(3000):
        data = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            header, payload = decode_tensor(bytes(data))
        except ProtocolError:
            continue
        assert payload.nbytes == header.payload_bytes
