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
from wire.fields import build, shown
from wire.messages import MAX_DURATION_S, MAX_FRAME_BYTES, MESSAGES, Message

_HEAD = re.compile(rb'\{"type":"([a-z_]{1,32})"(?:,"session":"([^"\\\x00-\x1f]{1,64})")?[,}]')
_RESIDENCE = b',"relay_s":'


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        FrameTooLarge: above MAX_FRAME_BYTES; nothing was sent.
    """
    data: dict[str, Any] = {"type": message.type}
    session = getattr(message, "session", None)
    if session is not None:
        data["session"] = session
    for name, default in _fields(type(message)):
        value = getattr(message, name)
        if value != default:
            data[name] = value
    frame = orjson.dumps(data)
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge(message.type, len(frame), MAX_FRAME_BYTES)
    return frame


def decode(frame: bytes | str) -> Message:
    """The message of a frame.

    Raises:
        ProtocolError: for anything that `encode` would not have written; FrameTooLarge above MAX_FRAME_BYTES.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge("frame", len(frame), MAX_FRAME_BYTES)
    data = _parse(frame)
    cls = _class_of(data)
    del data["type"]
    return build(cls, data, cls.type)


def peek(frame: bytes) -> tuple[str, str | None]:
    """Type and session of a frame, from its beginning alone where it is in canonical form.

    Raises:
        ProtocolError: it has no known type, or a session that is no string.
    """
    head = _HEAD.match(frame)
    if head is not None:
        name = head[1].decode()
        if name in MESSAGES and (head[2] is not None or not _has_session(MESSAGES[name])):
            try:
                return name, head[2].decode() if head[2] is not None else None
            except UnicodeDecodeError as exc:
                raise ProtocolError(f"session is not UTF-8: {exc}") from None
    data = _parse(frame)
    cls = _class_of(data)
    session = data.get("session")
    if session is not None and not isinstance(session, str):
        raise ProtocolError(f"session must be a string, got {shown(session)}")
    return cls.type, session


def append_residence(frame: bytes, relay_s: float) -> bytes:
    """The frame with `relay_s` as its last field; one that carries the field already is returned as it is."""
    if not frame.endswith(b"}") or _RESIDENCE in frame:
        return frame
    return b'%b,"relay_s":%.6f}' % (frame[:-1], min(max(relay_s, 0.0), MAX_DURATION_S))


def digest_ids(ids: Sequence[int]) -> str:
    """SHA-256 over the ids as little-endian 4-byte integers, in hex."""
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()


@functools.cache
def _fields(cls: type[Message]) -> tuple[tuple[str, Any], ...]:
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
def _has_session(cls: type[Message]) -> bool:
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
