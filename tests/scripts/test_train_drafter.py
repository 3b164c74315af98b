"""The parts of the training that are written by hand agree with what torch and transformers compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.tiny import tiny_checkpoint
from scripts.drafter_batches import frequent_tokens, make_batch, read_shards
from scripts.train_drafter import HeadLoss, frozen_states


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Two texts of 3 + 4 and 2 + 6 tokens."""
    rng = np.random.default_rng(0)
    path = tmp_path / "shard-0000-00000.npz"
    np.savez(
        path,
        ids=rng.integers(0, 300, 15, dtype=np.int32),
        lengths=np.array([[3, 4], [2, 6]], dtype=np.int32),
        top_ids=np.stack([rng.permutation(300)[:16] for _ in range(10)]).astype(np.int32),
        top_logprobs=np.log(np.full((10, 16), 1 / 16)).astype(np.float16),
        states=np.arange(10, dtype=np.float16)[:, None] * np.ones((1, 64), np.float16),
    )
    return path


def test_head_loss_and_its_gradient_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    states, head = torch.randn(600, 8, requires_grad=True), torch.randn(40, 8)
    ids, weights = torch.stack([torch.randperm(40)[:5] for _ in range(600)]), torch.rand(600, 5)
    loss = HeadLoss.apply(states, head, ids, weights)
    (loss * 3).backward()
    other = states.detach().clone().requires_grad_()
    expected = -(weights * (other @ head.T).log_softmax(-1).gather(1, ids)).sum(1).mean()
    (expected * 3).backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert states.grad is not None
    assert other.grad is not None
    assert torch.allclose(states.grad, other.grad, atol=1e-6)


def test_frozen_states_are_the_targets_hidden_states(tmp_path: Path, shard: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "target", seed=4, layers=4)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    data = read_shards([shard], 64)
    with torch.inference_mode():
        expected = [target(ids[None], output_hidden_states=True).hidden_states[2][0] for ids in data.ids]
    target.set_attn_implementation("causal")
    for states, wanted in zip(frozen_states(target, 2, data), expected, strict=True):
        assert torch.allclose(states.float(), wanted, atol=2e-2, rtol=2e-2)


def test_a_batch_has_the_positions_that_predict_answers(shard: Path) -> None:
    data = read_shards([shard], 7)  # the second text is cut by one token
    assert [len(ids) for ids in data.ids] == [7, 7]
    reduced = torch.full((300,), -1)
    kept = frequent_tokens(data, 20, 300, [7])
    reduced[kept] = torch.arange(20)
    assert 7 in kept
    batch = make_batch(data, [torch.zeros(7, 64), torch.zeros(7, 64)], [1, 0], reduced)
    # The token before an answer predicts its first token.
    assert batch.rows.tolist() == [1, 2, 3, 4, 5, 9, 10, 11, 12]
    assert batch.finals[:, 0].tolist() == [4, 5, 6, 7, 8, 0, 1, 2, 3]
    assert torch.equal(batch.top_ids, reduced[torch.cat([data.top_ids[1], data.top_ids[0]]).long()])
    assert torch.equal(batch.final_rows, batch.rows)
