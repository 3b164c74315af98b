"""C079: a model is ready when its first request finds all that the hundredth does."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.capturer import TapeCapturer, Uncaptured
from engine.errors import CheckpointError
from engine.hf import CausalLM
from engine.model import CachedModel
from engine.prepare import choose_capturer, ready_model
from engine.target import HFTarget
from speculation.passes import Sampling, VerifyPass, VerifyResult

SIZES: dict[str, Any] = {"num_slots": 2, "max_length": 160, "max_tree_rows": 8}


def ask(target: HFTarget, num_prompt: int) -> None:
    prompt = list(range(4, 4 + num_prompt))
    target.open(0, sampling=Sampling(), tokens=prompt, num_prompt=num_prompt, stop_ids=())
    target.prefill(0, 0, num_prompt - 1)
    tokens = list(prompt)
    for _ in range(3):
        request = VerifyPass(slot=0, start=len(tokens), tokens=(tokens[-1], 7, 8), parents=(-1, 0, 0), max_tokens=5)
        (result,) = target.verify([request])
        assert isinstance(result, VerifyResult)
        tokens += result.tokens
    target.close(0)


def test_c079_the_first_request_captures_allocates_and_compiles_nothing(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturer = TapeCapturer()
    monkeypatch.setattr("engine.prepare.choose_capturer", lambda lm, capture: capturer)
    model = ready_model(CausalLM(lm.model, lean=False), capture=True, check=True, **SIZES)
    target = HFTarget(model, vocab_size=320)
    ready = (capturer.num_captures, model.num_captures, model.addresses())
    assert capturer.num_captures > 10
    replays = []
    for num_prompt in (40, 40, 150):
        before = capturer.num_replays
        ask(target, num_prompt)
        replays.append(capturer.num_replays - before)
        assert (capturer.num_captures, model.num_captures, model.addresses()) == ready
    # The second request does the same work as the first.
    assert replays[0] == replays[1]


def test_c079_warming_up_runs_every_number_of_rows_that_a_pass_may_be_rounded_to(
    lm: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = CachedModel.forward

    def forward(self: CachedModel, slot: int, tokens: Any, **options: Any) -> torch.Tensor:
        sizes.append(len(tokens))
        return original(self, slot, tokens, **options)

    monkeypatch.setattr(CachedModel, "forward", forward)
    model = ready_model(lm, capture=True, check=False, **SIZES)
    assert set(sizes) == {1, 2, 4, 8, 128}
    assert all(rows.used == 0 for rows in model.rows)


def test_a_model_that_fails_the_self_check_is_never_ready(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cache.KVCache.move", lambda self, slot, moves: None)
    with pytest.raises(CheckpointError, match="self-check"):
        ready_model(lm, capture=True, check=True, **SIZES)
    assert ready_model(lm, capture=True, check=False, **SIZES).num_captures == 0


class _Placed:
    """A model whose layers lie where it is said."""

    def __init__(self, lm: CausalLM, *devices: str) -> None:
        self.layers = [replace(lm.layers[0], device=torch.device(device)) for device in devices]
        self.device = torch.device(devices[0])


def test_passes_are_captured_on_one_gpu_only(lm: CausalLM, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_capturer(lm, capture=True) is None
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_capturer(_Placed(lm, "cuda:0", "cuda:0"), capture=False), Uncaptured)  # type: ignore[arg-type]
        assert not caplog.text
        assert isinstance(choose_capturer(_Placed(lm, "cuda:0", "cuda:1"), capture=True), Uncaptured)  # type: ignore[arg-type]
    assert "layers lie on 2 devices" in caplog.text
