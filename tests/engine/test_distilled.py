"""A distilled drafter is the target's first layers, the trained ones and a reduced head, and fits one target only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint import Checkpoint
from engine.distilled import load_distilled
from engine.drafter import HFDrafter
from engine.errors import CheckpointError
from engine.model import CachedModel
from engine.selfcheck import self_check
from engine.tiny import tiny_checkpoint
from speculation.passes import DraftStep, Sampling

IDS = torch.tensor([0, 3, 4, 10, 11, 12, 50, 51, 200, 319])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Four random layers."""
    return Checkpoint(str(tiny_checkpoint(tmp_path_factory.mktemp("distilled") / "target", seed=5, layers=4)))


@pytest.fixture
def write(target: Checkpoint, tmp_path: Path) -> Callable[..., Path]:
    """Write a drafter whose two trained layers are the target's second and third, so that we know its logits."""

    def make(**changes: object) -> Path:
        base = target.load().model.base_model
        tensors = {"norm.weight": base.norm.weight.half(), "ids": IDS.int()}
        for i in (0, 1):
            for name, value in base.layers[1 + i].state_dict().items():
                tensors[f"layers.{i}.{name}"] = value.half()
        tensors |= {k: v for k, v in changes.items() if isinstance(v, torch.Tensor)}
        about = {"target": "target", "target_weights": target.identity().weights,
                 "frozen_layers": 1, "trained_layers": 2}  # fmt: skip
        about |= {k: v for k, v in changes.items() if not isinstance(v, torch.Tensor)}
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "drafter.safetensors")
        (tmp_path / "drafter.json").write_text(json.dumps(about))
        return tmp_path

    return make


def test_logits_are_the_grafted_models_on_the_ids_and_nothing_elsewhere(
    target: Checkpoint, write: Callable[..., Path]
) -> None:
    tokens = [5, 9, 100, 7]
    drafter = CachedModel(
        load_distilled(write(), target, dtype="float32", device="cpu"), num_slots=1, max_length=64, max_tree_rows=8
    )
    logits = drafter.forward(0, tokens, num_committed=4)
    plain = CachedModel(target.load(num_layers=3), num_slots=1, max_length=64, max_tree_rows=8)
    expected = plain.forward(0, tokens, num_committed=4)
    assert logits.shape == expected.shape
    # The trained tensors went through float16.
    assert torch.allclose(logits[:, IDS], expected[:, IDS], atol=0.05, rtol=0.02)
    elsewhere = torch.ones(logits.shape[1], dtype=torch.bool)
    elsewhere[IDS] = False
    assert torch.isneginf(logits[:, elsewhere]).all()


def test_int8_weights_change_logits_by_little(target: Checkpoint, write: Callable[..., Path]) -> None:
    results = []
    for dtype in ("float32", "int8"):
        lm = load_distilled(write(), target, dtype=dtype, device="cpu")
        model = CachedModel(lm, num_slots=1, max_length=64, max_tree_rows=8)
        self_check(model)
        results.append(torch.cat([model.forward(0, [5, 9, 100], num_committed=3), model.forward(0, [7], parents=[2])]))
    full, quantized = (logits[:, IDS] for logits in results)
    assert (full - quantized).abs().max() < 0.1 * full.abs().max()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_candidates_are_target_ids_of_the_reduced_head(
    target: Checkpoint, write: Callable[..., Path], temperature: float
) -> None:
    lm = load_distilled(write(), target, dtype="float32", device="cpu")
    runner = HFDrafter(CachedModel(lm, num_slots=1, max_length=64, max_tree_rows=8), vocab_size=320)
    runner.open(0, sampling=Sampling(temperature=temperature, seed=3), num_prompt=3)
    step = DraftStep(
        slot=0, accepted=(), keep=frozenset(), commit_start=0, commit=(5, 6, 7), nodes=(), expand_root=True,
        num_children=16,
    )  # fmt: skip
    (result,) = runner.step([step])
    assert not isinstance(result, Exception)
    children = result.children[-1]
    assert 1 <= len(children) <= len(IDS)
    assert {child.token for child in children} <= set(IDS.tolist())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"target_weights": "0" * 64}, "was distilled for target with weights 000000000000"),
        ({"layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}, "has no place"),
        ({"layers.7.mlp.up_proj.weight": torch.zeros(3, 3)}, "has no place"),
        ({"trained_layers": 9}, "layers must be in 1..4"),
        ({"frozen_layers": "many"}, "not a distilled drafter"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    target: Checkpoint, write: Callable[..., Path], changes: dict[str, object], word: str
) -> None:
    with pytest.raises(CheckpointError, match=word):
        load_distilled(write(**changes), target, dtype="float32", device="cpu")


def test_a_folder_without_a_drafter_is_refused(target: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"drafter\.json is missing"):
        load_distilled(tmp_path, target, dtype="float32", device="cpu")
