"""C080: a line of log that comes too often is counted instead."""

from __future__ import annotations

import logging

import pytest

from wire.aio.quiet import INTERVAL_S, MAX_BURST, MAX_KEYS, RateLimited


def test_c080_a_flood_is_a_few_lines_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    warn = RateLimited(logging.getLogger("test"), logging.WARNING, clock=lambda: now)
    for _ in range(1_000_000):
        warn("10.0.0.1", "peer at %s refused", "10.0.0.1")
    warn("10.0.0.2", "peer at %s refused", "10.0.0.2")
    assert [r.getMessage() for r in caplog.records] == ["peer at 10.0.0.1 refused"] * MAX_BURST + [
        "peer at 10.0.0.2 refused"
    ]
    now = INTERVAL_S
    warn("10.0.0.1", "peer at %s refused", "10.0.0.1")
    assert caplog.records[-1].getMessage() == (
        f"peer at 10.0.0.1 refused (and {1_000_000 - MAX_BURST} times more in the last minute)"
    )


def test_c080_what_is_remembered_is_bounded() -> None:
    warn = RateLimited(logging.getLogger("test"), logging.DEBUG)
    for i in range(3 * MAX_KEYS):
        warn(str(i), "x")
    assert len(warn._seen) == MAX_KEYS
