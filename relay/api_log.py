"""What the HTTP server logs by itself.

It has a traceback for each request that is no HTTP, with what was sent in it: anybody who reaches the port could fill a
disk, and a secret in a malformed header would be in the log. Such a request is a line of ours, with neither.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from wire.aio.quiet import RateLimited

log = logging.getLogger(__name__)
HTTP_LOG = logging.getLogger("relay.api_log.server")
"""For aiohttp to log to."""
REFUSED = RateLimited(log, logging.WARNING)
"""Requests without a good secret, by peer."""


class _ClientFaults(logging.Filter):
    """Replaces the records that are about what a client sent."""

    def __init__(self) -> None:
        super().__init__()
        self._warn = RateLimited(log, logging.WARNING)

    def filter(self, record: logging.LogRecord) -> bool:
        exc = record.exc_info[1] if record.exc_info else None
        if not isinstance(exc, (HttpProcessingError, web.RequestPayloadError)):
            return True
        peer = str(record.args[0]) if isinstance(record.args, tuple) and record.args else "somewhere"
        self._warn(peer, "< a request from %s could not be read: %s", peer, type(exc).__name__)
        return False


HTTP_LOG.addFilter(_ClientFaults())
