"""What all tests share: no test of ours may block an event loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster

SHELLS = ["wire", "relay", "node_draft", "node_verify", "speculation"]
"""Whose calls are watched. Not the engine's: torch and transformers read files whenever they like, in their thread."""


@functools.cache
def watcher() -> BlockBuster:
    return BlockBuster(SHELLS)


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """In coroutine tests, a blocking call from one of our shells on the event loop raises `BlockingError`."""
    if not inspect.iscoroutinefunction(getattr(request, "function", None)):
        yield
        return
    watcher().activate()
    try:
        yield
    finally:
        watcher().deactivate()
