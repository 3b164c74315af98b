"""Our own forward computes what transformers' does, for the models it says it supports and for no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint import Checkpoint
from engine.hf import CausalLM
from engine.lean import supported
from engine.model import CachedModel
from engine.tiny import tiny_checkpoint

TREE = {"tokens": [7, 8, 9, 10, 11], "parents": [9, 10, 10, 11, 9]}


def both(path: Path, dtype: str) -> tuple[CachedModel, CachedModel]:
    """The same checkpoint over our forward and over transformers'."""
    models = []
    for lean in (True, False):
        loaded = Checkpoint(str(path)).load(dtype=dtype)
        lm = CausalLM(loaded.model, lean=lean) if not lean else loaded
        models.append(CachedModel(lm, num_slots=2, max_length=64, max_tree_rows=8))
    return models[0], models[1]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_equal_those_of_transformers(tmp_path: Path, arch: str, dtype: str, kv_heads: int) -> None:
    extra: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    if arch == "mistral":
        extra["sliding_window"] = None
    path = tiny_checkpoint(tmp_path / "model", seed=3, arch=arch, layers=3, **extra)
    ours, theirs = both(path, dtype)
    assert supported(Checkpoint(str(path)).load().model)
    results = []
    for model in (ours, theirs):
        model.forward(1, [1, 2, 3], num_committed=3)  # another slot's rows are not to be seen
        first = model.forward(0, list(range(20, 30)), num_committed=10)
        tree = model.forward(0, TREE["tokens"], parents=TREE["parents"])
        model.keep(0, [10, 11])
        after = model.forward(0, [12], num_committed=1)
        results.append(torch.cat([first, tree, after]))
    tolerance = 1e-4 if dtype == "float32" else 0.06
    assert (results[0] - results[1]).abs().max() <= tolerance * results[1].abs().max()


def test_joining_weights_does_not_double_them(tmp_path: Path) -> None:
    lm = Checkpoint(str(tiny_checkpoint(tmp_path / "model", seed=3))).load()
    attention = lm.model.base_model.layers[0].self_attn
    storages = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(storages) == 1


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("gpt2", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ],
)
def test_other_models_keep_transformers_forward(tmp_path: Path, arch: str, config: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {} if arch == "gpt2" else {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    small = {"vocab_size": 50, "num_hidden_layers": 1} | sizes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **small, **config))
    assert not supported(model)
