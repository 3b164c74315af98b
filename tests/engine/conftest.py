"""Tiny checkpoints, written once per test run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.checkpoint import Checkpoint
from engine.hf import CausalLM
from engine.tiny import tiny_checkpoint

ARCHITECTURES = ("llama", "qwen2")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny checkpoint of an architecture."""
    made: dict[str, Path] = {}

    def make(arch: str) -> Path:
        if arch not in made:
            made[arch] = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / arch, seed=7, arch=arch)
        return made[arch]

    return make


@pytest.fixture(scope="session")
def load_tiny(tiny: Callable[[str], Path]) -> Callable[[str], CausalLM]:
    """The loaded model of a tiny checkpoint."""
    loaded: dict[str, CausalLM] = {}

    def load(arch: str) -> CausalLM:
        if arch not in loaded:
            loaded[arch] = Checkpoint(str(tiny(arch))).load()
        return loaded[arch]

    return load


@pytest.fixture(params=ARCHITECTURES)
def lm(request: pytest.FixtureRequest, load_tiny: Callable[[str], CausalLM]) -> CausalLM:
    """The tests that take this run for each architecture."""
    return load_tiny(request.param)
