"""Messages to frames and back: JSON by orjson, `type` and `session` first.

The relay routes by `peek`, which reads only the beginning of a frame, and marks its residence by `append_residence`,
which splices bytes before the final brace; neither parses what it forwards.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import struct
from collections.abc import Sequence
from typing import Any

import orjson

from wire.errors import FrameTooLarge, ProtocolError
from wire.fields import build, check_text, shown
from wire.messages import MAX_DURATION_S, MAX_FRAME_BYTES, MESSAGES, Message, TextDelta

_HEAD = re.compile(rb'\{"type":"([a-z_]{1,32})"(?:,"session":"([^"\\\x00-\x1f]{1,64})")?[,}]')

_NAMES = {name.encode(): name for name in MESSAGES}


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        FrameTooLarge: above MAX_FRAME_BYTES; nothing was sent.
        ProtocolError: a text that is not Unicode (a lone surrogate).
    """
    data: dict[str, Any] = {"type": message.type}
    session = getattr(message, "session", None)
    if session is not None:
        data["session"] = session
    for name, default in _fields(type(message)):  # type: ignore[arg-type]  # a class is hashable
        value = getattr(message, name)
        if value != default:
            data[name] = value
    try:
        frame = orjson.dumps(data)
    except orjson.JSONEncodeError as exc:
        raise ProtocolError(f"{message.type} has a value that JSON cannot carry: {exc}") from None
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge(message.type, len(frame), MAX_FRAME_BYTES)
    return frame


def decode(frame: bytes | str) -> Message:
    """The message of a frame.

    Raises:
        ProtocolError: for anything that `encode` would not have written; FrameTooLarge above MAX_FRAME_BYTES.
    """
    if isinstance(frame, str):
        frame = frame.encode("utf-8", "surrogatepass")
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge("frame", len(frame), MAX_FRAME_BYTES)
    data = _parse(frame)
    cls = _class_of(data)
    # Of a key given twice the parser takes the last, and `peek` the first: what was routed as one session must not be
    # read as another.
    head = _canonical_head(frame)
    if head is not None and head != (cls.type, data.get("session")):
        raise ProtocolError(f"{cls.type} gives its type or session twice")
    del data["type"]
    return build(cls, data, cls.type)


def peek(frame: bytes) -> tuple[str, str | None]:
    """Type and session of a frame, from its beginning alone where it is in canonical form.

    Raises:
        ProtocolError: it has no known type, or a session that is no string.
    """
    head = _canonical_head(frame)
    if head is not None:
        return head
    data = _parse(frame)
    cls = _class_of(data)
    session = data.get("session")
    if session is not None:
        check_text("session", session, 64, empty=False)
    return cls.type, session


def session_of(frame: bytes) -> str | None:
    """The session of a frame; None if it has none, or cannot be read that far."""
    try:
        return peek(frame)[1]
    except ProtocolError:
        return None


def protocol_of(frame: bytes) -> int | None:
    """The protocol version in a `Hello` or `Welcome` that we cannot decode, perhaps for that reason; None if none."""
    try:
        version = _parse(frame).get("protocol")
    except ProtocolError:
        return None
    return version if type(version) is int else None


def append_residence(frame: bytes, relay_s: float) -> bytes:
    """The frame, of `Candidates` or `Acceptance`, with `relay_s` as its last field.

    A sender's own `relay_s` stays in front of it and counts for nothing: of a key given twice, JSON parsers take the
    last. A frame that does not end like one of `encode`, or would become too large, is returned as it is.
    """
    marked = b'%b,"relay_s":%.6f}' % (frame[:-1], min(max(relay_s, 0.0), MAX_DURATION_S))
    return marked if frame.endswith(b"}") and len(marked) <= MAX_FRAME_BYTES else frame


def delta_tokens(frame: bytes) -> tuple[int, list[int]]:
    """Start and tokens of a `TextDelta` in canonical form, without building and checking the rest of it.

    Raises:
        ProtocolError: it is none.
    """
    data = _parse(frame)
    start, tokens = data.get("start", 0), data.get("tokens", [])
    if data.get("type") != TextDelta.type or type(start) is not int or type(tokens) is not list:
        raise ProtocolError(f"a text_delta has start and tokens, got {shown(data)}")
    return start, tokens


def digest_ids(ids: Sequence[int]) -> str:
    """SHA-256 over the ids as little-endian 4-byte integers, in hex."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


def _canonical_head(frame: bytes) -> tuple[str, str | None] | None:
    """Type and session, if the frame begins as `encode` begins it; None otherwise."""
    head = _HEAD.match(frame)
    if head is None:
        return None
    raw, session = head.groups()
    name = _NAMES.get(raw)
    if name is None or (session is None and _has_session(MESSAGES[name])):  # type: ignore[arg-type]
        return None
    try:
        return name, session.decode() if session is not None else None
    except UnicodeDecodeError as exc:
        raise ProtocolError(f"session is not UTF-8: {exc}") from None


@functools.cache
def _fields(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of the fields, without the session; a field at its default is not sent."""
    fields = []
    for field in dataclasses.fields(cls):
        if field.name == "session":
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields.append((field.name, default))
    return tuple(fields)


@functools.cache
def _has_session(cls: Any) -> bool:
    return any(field.name == "session" for field in dataclasses.fields(cls))


def _parse(frame: bytes | str) -> dict[str, Any]:
    try:
        data = orjson.loads(frame)
    except (orjson.JSONDecodeError, RecursionError) as exc:
        raise ProtocolError(f"frame is not JSON: {exc}") from None
    if not isinstance(data, dict):
        raise ProtocolError(f"frame must be an object, got {shown(data)}")
    return data


def _class_of(data: dict[str, Any]) -> type[Message]:
    name = data.get("type")
    if not isinstance(name, str) or name not in MESSAGES:
        raise ProtocolError(f"type must be one of {', '.join(MESSAGES)}; got {shown(name)}")
    return MESSAGES[name]
