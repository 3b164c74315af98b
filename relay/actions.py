"""What the router has the shell do, and the reasons it gives for what it drops."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from wire.messages import Message


class DropReason(Enum):
    """Why a frame went no further, or a peer had to go."""

    MALFORMED = "malformed"
    WRONG_ROLE = "wrong_role"
    FORBIDDEN = "forbidden"
    BAD_REQUEST = "bad_request"
    UNKNOWN_SESSION = "unknown_session"
    NOT_PAIRED = "not_paired"
    NO_DRAFT_NODE = "no_draft_node"
    NO_VERIFY_NODE = "no_verify_node"
    VERIFY_LOST = "verify_lost"
    CLIENT_AWAY = "client_away"
    RESUME_GONE = "resume_gone"
    NOT_KEPT = "not_kept"
    OVERLOADED = "overloaded"
    REPEATED = "repeated"
    DRAINING = "draining"
    UNKNOWN_PEER = "unknown_peer"
    NO_PROBE_PEER = "no_probe_peer"
    SLOW_CONSUMER = "slow_consumer"
    NOT_ABOUT_A_SESSION = "not_about_a_session"


@dataclass(frozen=True, slots=True)
class Send:
    """Send the relay's own message."""

    peer: str
    message: Message


class Forward(NamedTuple):
    """Pass a frame on as it came. A tuple, because one is made for nearly every frame."""

    peer: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """Tell the peer why (an Error with this code) and close its link; the router has forgotten it already."""

    peer: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session is over, for the log and the trace."""

    session: str
    reason: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class SessionMoved:
    """A session has another verify node now, for the log and the trace; `num_tokens` were committed before."""

    session: str
    verify: str
    num_tokens: int


Action = Send | Forward | ClosePeer | SessionEnded | SessionMoved
