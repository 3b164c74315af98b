"""C025: what each kind of layer gets: served under the same memory contract, or refused at load with the reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.capturer import TapeCapturer
from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.selfcheck import self_check
from engine.tiny import tiny_checkpoint

WINDOW = 6
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SERVED: dict[str, dict[str, Any]] = {
    # Mixture of experts.
    "mixtral": {"num_local_experts": 4, **EXPERTS, "sliding_window": None},
    "qwen3_moe": {"num_experts": 4, **EXPERTS, "head_dim": 16},
    "olmoe": {"num_experts": 4, **EXPERTS},
    # A sliding window in all layers, and in some of them.
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    "gemma3_text": {"layers": 4, "head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "gemma2": {"layers": 2, "head_dim": 16, "sliding_window": WINDOW},
    # Attention sinks, experts, and a window in some layers.
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": WINDOW},
    # Query and key norms, another rotary embedding.
    "qwen3": {"head_dim": 16},
    "phi3": {},
}
REFUSED = {
    "jamba": "layers: their state cannot be rewound",
    "mamba": "linear_attention layers: their state cannot be rewound",
    "recurrent_gemma": "cannot be rewound",
    "qwen3_next": "linear_attention layers: their state cannot be rewound",
    "falcon_h1": "cannot be rewound",
    "bamba": "layers: their state cannot be rewound",
    "zamba": "cannot be rewound",
    "rwkv": r"keeps a recurrent state \(RwkvForCausalLM\), which cannot be rewound",
    "llama4_text": "chunked_attention layers of 32 tokens.*length to 32 or less",
}


@pytest.fixture(scope="module", params=sorted(SERVED))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("kinds") / request.param
    return Checkpoint(str(tiny_checkpoint(path, seed=5, arch=request.param, **SERVED[request.param])))


def models(checkpoint: Checkpoint) -> list[CachedModel]:
    """One that runs passes as they come and one that captures them, over the same weights."""
    lm = checkpoint.load()
    sizes: dict[str, Any] = {"num_slots": 2, "max_length": 64, "max_tree_rows": 8}
    captured = CachedModel(CausalLM(lm.model, lean=False), capturer=TapeCapturer(), first_segment=32, **sizes)
    captured.warm_up()
    return [CachedModel(lm, **sizes), captured]


def test_c025_served_kinds_give_the_logits_of_the_model_without_our_cache(checkpoint: Checkpoint) -> None:
    """Three windows long; a tree behind it, compacted; a rewind; NaN in all rows that are not in use."""
    prefix = [(7 * i) % 300 + 4 for i in range(3 * WINDOW)]
    tree, parents = [11, 12, 13, 14, 15], [-1, 0, 0, 2, 0]  # counted in the tree; -1 is the last of the prefix
    for model in models(checkpoint):
        reference = model.without_cache

        def assert_scored(logits: torch.Tensor, text: list[int], reference: Any = reference) -> None:
            expected = reference(text)
            assert (logits - expected).abs().max() <= 2e-5 * expected.abs().max()

        self_check(model)
        for slot in (1, 0):
            model.forward(slot, prefix[:10], num_committed=10, num_logits=1)
            model.cache.fill(slot, 10, 72, math.nan)
            logits = model.forward(slot, prefix[10:], num_committed=8, num_logits=1)
            assert_scored(logits[-1:], prefix)
            base = len(prefix)
            logits = model.forward(slot, tree, parents=[base + parent for parent in parents])
            assert_scored(logits[3:4], [*prefix, 11, 13, 14])
            assert_scored(logits[4:5], [*prefix, 11, 15])
            model.keep(slot, [base, base + 2, base + 3])
            model.cache.fill(slot, base + 3, 72, math.nan)
            text = [*prefix, 11, 13, 14]
            assert_scored(model.forward(slot, [20], num_committed=1), [*text, 20])
            model.rewind(slot, 2)
            model.cache.fill(slot, base + 2, 72, math.nan)
            assert_scored(model.forward(slot, [21, 22], num_committed=2)[-1:], [*text[:-1], 21, 22])


def test_c025_addresses_and_captures_stay_over_mixed_passes(checkpoint: Checkpoint) -> None:
    for model in models(checkpoint):
        model.forward(0, [1, 2, 3], num_committed=3)
        before = model.addresses(), model.num_captures
        for i in range(20):
            model.clear(i % 2)
            model.forward(i % 2, [5] * (i + 1), num_committed=i + 1, num_logits=1)
            model.forward(i % 2, [6, 7, 8], parents=[i, i + 1, i])
            model.keep(i % 2, [i + 1, i + 2])
        assert (model.addresses(), model.num_captures) == before


@pytest.mark.parametrize("arch", sorted(REFUSED))
def test_c025_what_cannot_be_rewound_is_refused_by_its_config_with_the_reason(tmp_path: Path, arch: str) -> None:
    fields = {"attention_chunk_size": 32} if arch == "llama4_text" else {}
    AutoConfig.for_model(arch, **fields).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=REFUSED[arch]) as caught:
        Checkpoint(str(tmp_path), max_length=64)
    assert tmp_path.name in str(caught.value)


def test_two_sets_of_rotary_factors_are_served_up_to_where_the_second_begins(tmp_path: Path) -> None:
    """Beyond, transformers takes one of them for a whole pass, by its last position."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    }  # fmt: skip
    path = str(tiny_checkpoint(
        tmp_path / "longrope", seed=5, arch="phi3", max_length=128, original_max_position_embeddings=32,
        rope_parameters=rope,
    ))  # fmt: skip
    with pytest.raises(CheckpointError, match=r"longrope.*Set the maximum length to 32 or less \(it is 128\)"):
        Checkpoint(path)
    checkpoint = Checkpoint(path, max_length=32)
    for model in models(checkpoint):
        prompt = list(range(5, 33))
        model.forward(0, prompt, num_committed=len(prompt), num_logits=1)
        row, *_ = model.forward(0, [7, 8, 9, 10], parents=[27, 28, 29, 30])
        expected = model.without_cache([*prompt, 7])
        assert expected is not None
        assert (row - expected[0]).abs().max() <= 2e-5 * expected.abs().max()
