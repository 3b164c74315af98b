"""The binary frame of a tensor: it says itself what it holds.

    4 bytes   length of the header, little-endian
    header    JSON: session, name, dtype, shape, order ("little")
    payload   the elements in row-major order, nothing else

No message needs it today; it is what hidden states will travel in. Bytes in, bytes out: neither torch nor numpy here,
so that a relay can check a frame that it forwards. The payload is never copied on the way in.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import orjson

from wire.errors import FrameTooLarge, ProtocolError
from wire.fields import build, check_choice, check_ints, check_text
from wire.messages import MAX_FRAME_BYTES, MAX_NAME_CHARS

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1}
BYTE_ORDER = "little"
MAX_DIMENSIONS = 8
MAX_ELEMENTS = MAX_FRAME_BYTES
MAX_HEADER_BYTES = 4096
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What stands in front of the elements.

    Attributes:
        name: which tensor it is, e.g. "hidden_states".
        dtype: one of ITEM_BYTES.
        shape: sizes of the dimensions; empty for a scalar.
        order: byte order of the elements; only "little" is spoken.
    """

    session: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    order: str = BYTE_ORDER

    def __post_init__(self) -> None:
        check_text("tensor.session", self.session, 64, empty=False)
        check_text("tensor.name", self.name, MAX_NAME_CHARS, empty=False)
        check_choice("tensor.dtype", self.dtype, tuple(ITEM_BYTES))
        check_ints("tensor.shape", self.shape, 0, MAX_ELEMENTS, MAX_DIMENSIONS)
        check_choice("tensor.order", self.order, (BYTE_ORDER,))

    @property
    def payload_bytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def encode_tensor(header: TensorHeader, payload: bytes | memoryview) -> bytes:
    """The frame of a tensor.

    Args:
        payload: the elements, contiguous, in row-major order and little-endian.

    Raises:
        ProtocolError: the payload is not of the size that the header says.
        FrameTooLarge: above MAX_FRAME_BYTES.
    """
    view = memoryview(payload)
    if not view.c_contiguous:
        raise ProtocolError("tensor payload must be contiguous")
    _check_size(header, view.nbytes)
    head = orjson.dumps(header)
    size_bytes = _LENGTH.size + len(head) + view.nbytes
    if size_bytes > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"tensor {header.name}", size_bytes, MAX_FRAME_BYTES)
    return b"".join((_LENGTH.pack(len(head)), head, view))


def decode_tensor(frame: bytes | memoryview) -> tuple[TensorHeader, memoryview]:
    """Header and elements of a frame; the elements are a view of `frame`.

    Raises:
        ProtocolError: anything that `encode_tensor` would not have written; FrameTooLarge above MAX_FRAME_BYTES.
    """
    view = memoryview(frame).cast("B")
    if view.nbytes > MAX_FRAME_BYTES:
        raise FrameTooLarge("tensor frame", view.nbytes, MAX_FRAME_BYTES)
    if view.nbytes < _LENGTH.size:
        raise ProtocolError(f"tensor frame has {view.nbytes} bytes, too few for the length of its header")
    (num_header_bytes,) = _LENGTH.unpack_from(view)
    start = _LENGTH.size + num_header_bytes
    if num_header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"tensor header has {num_header_bytes} bytes, the limit is {MAX_HEADER_BYTES}")
    if start > view.nbytes:
        raise ProtocolError(f"tensor frame ends in its header: {view.nbytes} bytes, the header needs {start}")
    try:
        data = orjson.loads(view[_LENGTH.size : start])
    except orjson.JSONDecodeError as exc:
        raise ProtocolError(f"tensor header is not JSON: {exc}") from None
    header = build(TensorHeader, data, "tensor")
    payload = view[start:]
    _check_size(header, payload.nbytes)
    return header, payload


def _check_size(header: TensorHeader, num_bytes: int) -> None:
    if num_bytes != header.payload_bytes:
        raise ProtocolError(
            f"tensor {header.name} of shape {list(header.shape)} and type {header.dtype} must have "
            f"{header.payload_bytes} bytes, got {num_bytes}"
        )
