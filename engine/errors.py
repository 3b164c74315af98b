"""The error tree of the engine.

EngineError
├── CheckpointError    a model that cannot be loaded or served; the message says what to do
├── CacheError         a cache operation out of bounds; nothing was changed
├── NumericalError     the target's logits are not numbers; the session cannot go on
└── EngineDead         the thread that owns the model has died
"""

from __future__ import annotations

import torch

_DEVICE_ERRORS: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()


class EngineError(Exception):
    """Anything that went wrong around a model."""


class CheckpointError(EngineError):
    """A model that cannot be loaded or served here."""


class CacheError(EngineError):
    """A cache operation out of bounds; the cache is unchanged."""


class NumericalError(EngineError):
    """The target's logits are not numbers."""


class EngineDead(EngineError):
    """The thread that owns the model has died."""


def is_of_all(exc: Exception) -> bool:
    """Whether a failure concerns all sessions, not only the one whose work met it: nothing can be computed any more.

    After an error of its kernels a device refuses everything until the process ends.
    """
    return isinstance(exc, (EngineDead, *_DEVICE_ERRORS)) or str(exc).startswith("CUDA error")
