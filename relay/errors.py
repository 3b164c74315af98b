"""The error tree of the relay and its client.

WireError                 see `wire/errors.py`
├── RequestFailed         one request failed, the link and the other requests go on
└── LinkLost, Refused ... the link itself
"""

from __future__ import annotations

from wire.errors import WireError


class RequestFailed(WireError):
    """One request failed.

    Args:
        code: for programs: "no_verify_node", "verify_lost", "bad_request", "bad_session", "gap", ...
        message: for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
