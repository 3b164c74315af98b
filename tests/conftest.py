"""What all tests share: GPU tests only where there is a GPU, no blocked event loop, no log of a test before."""

from __future__ import annotations

import functools
import inspect
import logging
import signal
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

# Deadlines of hypothesis are a wall clock's: on a busy machine they fail tests that prove nothing by it.
settings.register_profile("foredraft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("foredraft")

SHELLS = ["wire", "relay", "node_draft", "node_verify", "speculation"]
"""Whose calls are watched. Not the engine's: torch and transformers read files whenever they like, in their thread."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `gpu` tests on a machine without CUDA; torch is only asked if there are any."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        items[:] = [item for item in items if item not in on_gpu]
        config.hook.pytest_deselected(items=on_gpu)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that ran in the test's process logs to the standard error of that test, which is closed after it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in handlers:
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """SIGHUP is not ignored, in this process and those it starts, though the tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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
