"""What only a CUDA device can show of captured passes; `scripts/gpu_check.sh` runs these."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.capturer import CudaCapturer, Uncaptured
from engine.checkpoint import Checkpoint
from engine.hf import CausalLM
from engine.model import CachedModel, NewRows
from engine.prepare import ready_model
from engine.selfcheck import self_check

pytestmark = pytest.mark.gpu
VOCAB = 320
SIZES = {"num_slots": 2, "max_length": 160, "max_tree_rows": 8, "first_segment": 64}


@pytest.fixture(params=["llama", "qwen2"])
def cuda_lm(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> CausalLM:
    torch.backends.cuda.matmul.allow_tf32 = False
    return Checkpoint(str(tiny(request.param))).load(device="cuda")


def test_replays_give_the_logits_of_passes_that_run_as_they_come(cuda_lm: CausalLM) -> None:
    captured = CachedModel(cuda_lm, capturer=CudaCapturer(cuda_lm.device), **SIZES)
    plain = CachedModel(cuda_lm, capturer=Uncaptured(), **SIZES)
    captured.warm_up()
    self_check(captured)
    self_check(plain)
    assert captured.num_captures > 0
    counts = []
    rng = random.Random(3)
    for _ in range(120):
        slot = rng.randrange(2)
        rows = captured.rows[slot]
        for other in range(2):
            captured.cache.fill(other, captured.rows[other].used, captured.cache.capacity, math.nan)
        if rows.used > 120:
            for model in (captured, plain):
                model.clear(slot)
        linear, num_tree = rng.randint(1, 8), rng.randint(0, 6)
        start = rows.length + linear
        parents = [rng.choice([start - 1, *range(start, start + i)]) for i in range(num_tree)]
        tokens = [rng.randrange(VOCAB) for _ in range(linear + num_tree)]
        one, two = (m.forward(slot, tokens, num_committed=linear, parents=parents) for m in (captured, plain))
        held = one.clone()
        scale = two.abs().max().item()
        assert (one - two).abs().max().item() <= 1e-4 * scale
        path = [start] if parents and rng.random() < 0.7 else []
        for model in (captured, plain):
            model.keep(slot, path)
        captured.forward(slot, [3], num_committed=1)
        plain.forward(slot, [3], num_committed=1)
        assert torch.equal(one, held)
        counts.append(captured.num_captures)
    # Both lengths have been needed by then; nothing is captured after.
    assert counts[-1] == max(counts) == counts[len(counts) // 2]


def test_slots_that_share_a_replay_get_the_logits_of_their_own(cuda_lm: CausalLM) -> None:
    sizes = SIZES | {"num_slots": 4}
    captured = CachedModel(cuda_lm, capturer=CudaCapturer(cuda_lm.device), **sizes)
    alone = CachedModel(cuda_lm, capturer=Uncaptured(), **sizes)
    captured.warm_up()
    num_captures = captured.num_captures
    rng = random.Random(3)
    for _ in range(12):
        batch = []
        for slot in rng.sample(range(4), rng.randint(2, 4)):
            tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))]
            batch.append(NewRows(slot=slot, tokens=tokens, num_committed=len(tokens)))
        for new, shared in zip(batch, captured.forward_batch(batch), strict=True):
            expected = alone.forward(new.slot, new.tokens, num_committed=new.num_committed)
            assert isinstance(shared, torch.Tensor)
            assert (shared - expected).abs().max().item() <= 1e-4 * expected.abs().max().item()
    assert captured.num_captures == num_captures


def test_logits_on_the_gpu_are_those_of_the_cpu(cuda_lm: CausalLM, load_tiny: Callable[[str], CausalLM]) -> None:
    arch = cuda_lm.model.config.model_type
    on_gpu = ready_model(
        cuda_lm, num_slots=1, max_length=160, max_tree_rows=8, capture=True, check=True
    )  # fmt: skip
    assert on_gpu.num_captures > 0
    on_cpu = CachedModel(load_tiny(arch), num_slots=1, max_length=160, max_tree_rows=8)
    for model in (on_gpu, on_cpu):
        model.forward(0, list(range(10, 60)), num_committed=50, num_logits=1)
    tree = {"parents": [49, 50, 50, 52, 49]}
    one, two = (model.forward(0, [1, 2, 3, 4, 5], **tree).cpu() for model in (on_gpu, on_cpu))
    assert (one - two).abs().max().item() <= 1e-3 * two.abs().max().item()
    assert one.argmax(-1).tolist() == two.argmax(-1).tolist()


def test_a_token_takes_a_handful_of_launches(cuda_lm: CausalLM) -> None:
    model = CachedModel(cuda_lm, capturer=CudaCapturer(cuda_lm.device), **SIZES)
    model.warm_up()
    model.forward(0, [1, 2, 3], num_committed=3)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(5):
            model.forward(0, [5], parents=[2])
            model.rewind(0, 1)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or ()]
    assert sum(name == "cudaGraphLaunch" for name in names) == 5
    assert sum(name.startswith("cudaLaunchKernel") for name in names) <= 5 * 4
