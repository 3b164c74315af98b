"""From a target to a drafter that the engine loads: gathering, training, resuming."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from engine.checkpoint import Checkpoint
from engine.distilled import load_distilled
from engine.model import CachedModel
from engine.tiny import tiny_checkpoint
from scripts import drafter_data, train_drafter

Paths = tuple[Path, Path]


def call(module: object, *arguments: object) -> None:
    """Run a script's main with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", *map(str, arguments)])
        module.main()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """A random target of four layers, and two shards of what it wrote."""
    root = tmp_path_factory.mktemp("pipeline")
    target = tiny_checkpoint(root / "target", seed=5, layers=4)
    call(drafter_data, *gather_arguments(target, root / "data"), "--shards", 2)
    return target, root / "data"


def gather_arguments(target: Path, out: Path) -> list[object]:
    return [
        "--model", target, "--out", out, "--texts", 12, "--batch", 5, "--max-prompt", 6, "--max-answer", 8,
        "--capacity", 400, "--dtype", "float32", "--states",
    ]  # fmt: skip


def train_arguments(gathered: Paths, out: Path) -> list[object]:
    target, data = gathered
    return [
        "--target", target, "--data", data, "--out", out, "--frozen", 1, "--layers", 2, "--vocab", 40, "--batch", 4,
        "--max-length", 400,
    ]  # fmt: skip


def test_gathering_goes_on_after_the_last_shard_and_follows_the_seed(gathered: Paths, tmp_path: Path) -> None:
    target, data = gathered
    call(drafter_data, *gather_arguments(target, tmp_path), "--shards", 1)
    first = tmp_path / "shard-0000-00000.npz"
    before = first.stat().st_mtime_ns
    call(drafter_data, *gather_arguments(target, tmp_path), "--shards", 2)
    assert first.stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shard-0000-00000.npz", "shard-0000-00001.npz"]
    for path in tmp_path.iterdir():
        with np.load(path) as again, np.load(data / path.name) as shard:
            assert again.files == shard.files
            assert all(np.array_equal(again[name], shard[name]) for name in shard.files)


def test_a_prompt_that_the_target_wrote_is_dropped_where_it_is_a_held_out_one(gathered: Paths) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gathered[0])
    texts = ["Why do dogs bark?", "Write a Python function that implements binary search.<|im_end|>"]
    turns = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert drafter_data.without_heldout(turns, tokenizer) == turns[:1]


def test_a_resumed_training_ends_where_one_without_a_break_does(gathered: Paths, tmp_path: Path) -> None:
    call(train_drafter, *train_arguments(gathered, tmp_path / "whole"), "--epochs", 2)

    class Break(Exception):
        pass

    # Broken off after the first epoch, by an exception where its figures would be taken in the second.
    real, calls = train_drafter.hit_rates, 0

    def breaks(*arguments: object) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Break
        return real(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_drafter, "hit_rates", breaks)
        with pytest.raises(Break):
            call(train_drafter, *train_arguments(gathered, tmp_path / "broken"), "--epochs", 2)
    call(train_drafter, *train_arguments(gathered, tmp_path / "broken"), "--epochs", 2)
    whole, broken = (load_file(tmp_path / name / "drafter.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_the_engine_loads_what_was_trained(gathered: Paths, tmp_path: Path) -> None:
    call(train_drafter, *train_arguments(gathered, tmp_path), "--epochs", 1, "--lr", 3e-3)
    about = json.loads((tmp_path / "drafter.json").read_text())
    assert about["vocab"] == 40
    lm = load_distilled(tmp_path, Checkpoint(str(gathered[0]), max_length=64), dtype="float32", device="cpu")
    logits = CachedModel(lm, num_slots=1, max_length=64, max_tree_rows=8).forward(0, [5, 9, 100], num_committed=3)
    assert torch.isfinite(logits).sum(1).tolist() == [40, 40, 40]
