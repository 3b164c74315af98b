"""What all tests share: GPU tests only where there is one, and an event loop that must not be blocked."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster


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
def no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail an async test whose event loop sleeps, reads a file or joins a thread."""
    if not inspect.iscoroutinefunction(request.function):
        yield
        return
    guard = BlockBuster(["wire", "relay", "node_draft", "node_verify"])
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()
