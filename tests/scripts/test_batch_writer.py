"""What the batched writer writes is what the model says one text at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.tiny import tiny_checkpoint
from scripts.batch_writer import TOP_LOGITS, BatchWriter, Job

PREFIX = [1, 7, 9]
PROMPTS = [[*PREFIX, *rest] for rest in ([40], [5, 6, 8, 200], [90, 17], [33, 33, 33, 33, 33, 4], [250, 3], [], [61])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("writer") / "model", seed=8, layers=3)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def writer(model: Any, *, batch: int = 3, stop: int = -1, seed: int = 0) -> BatchWriter:
    generator = torch.Generator().manual_seed(seed)
    return BatchWriter(model, batch=batch, capacity=32, prefix=PREFIX, stop=stop, generator=generator)


@torch.inference_mode()
def plain(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Greedy text without a cache, its log-probabilities and last states."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    out = model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    first = len(prompt) - 1
    return tokens[len(prompt) :], out.logits[0, first:].log_softmax(-1), out.hidden_states[-1][0, first:]


def test_greedy_text_logits_and_states_are_the_models(model: Any) -> None:
    # More jobs than slots, of unequal length: slots are moved and taken again.
    jobs = [Job(prompt, 0.0, 4 + 3 * i) for i, prompt in enumerate(PROMPTS)]
    for job, written in zip(jobs, writer(model).write(jobs), strict=True):
        tokens, logprobs, states = plain(model, job.prompt, job.max_new)
        assert written.tokens == tokens
        best, ids = logprobs.topk(TOP_LOGITS)
        assert torch.equal(written.top_ids.long()[:, :4], ids[:, :4])
        assert torch.allclose(written.top_logprobs.float(), best, atol=5e-3)
        assert torch.allclose(written.states.float(), states, atol=5e-3, rtol=1e-3)


def test_a_stop_id_ends_a_text_and_is_part_of_it(model: Any) -> None:
    tokens, _, _ = plain(model, PROMPTS[1], 8)
    stop = tokens[3]
    (written,) = writer(model, stop=stop).write([Job(PROMPTS[1], 0.0, 8)])
    assert written.tokens == tokens[: tokens.index(stop) + 1]
    assert len(written.top_ids) == len(written.tokens)


def test_samples_follow_the_seed(model: Any) -> None:
    jobs = [Job(prompt, 5.0, 10) for prompt in PROMPTS]
    first, again, other = ([w.tokens for w in writer(model, seed=s).write(jobs)] for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_prompts_that_do_not_fit_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"at most 32, got 4 \+ 29"):
        writer(model).write([Job(PROMPTS[0], 0.0, 29)])
    with pytest.raises(ValueError, match="common prefix"):
        writer(model).write([Job([2, 7, 9, 4], 0.0, 4)])
