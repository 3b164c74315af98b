"""The demo's own models over real processes: a handful of prompts, token for token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scripts.demo_model import ensure_demo_checkpoint
from wire.sampling import Sampling

PROMPTS = ["What is the capital of France?", "Write a haiku about rain.", "Repeat: one two three one two three one"]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_smollm2_streams_the_targets_own_tokens(start_pipeline: Any) -> None:
    checkpoint = await asyncio.to_thread(ensure_demo_checkpoint)
    async with (
        start_pipeline(
            target=checkpoint, drafter=checkpoint, rtt_ms=20.0, growth="chain:4+8", draft_flags=("--drafter", "ngram")
        ) as pipeline,
        pipeline.client() as client,
    ):
        for prompt in PROMPTS:
            for sampling in (Sampling(), Sampling(temperature=0.8, seed=11)):
                request = {"messages": [("user", prompt)], "sampling": sampling, "max_tokens": 24}
                drafted = await pipeline.ask(client, **request)
                alone = await pipeline.ask(client, **request, speculate=False)
                assert drafted[:2] == alone[:2]
