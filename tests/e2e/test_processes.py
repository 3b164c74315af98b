"""Real sockets, real processes, real (if tiny) models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from relay.client import Delta
from wire.sampling import Sampling

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PROMPTS = ["The quick brown fox", "def add(a, b):", "Once upon a time there was", "42", "ünïcode 🙂 text", "a"]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.0, top_p=0.9, seed=5, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
]


@pytest.mark.parametrize(
    ("drafter", "rtt_ms", "growth", "flags"),
    [
        ("target", 0.0, "chain:4", ()),
        ("target", 30.0, "chain:2+14", ()),
        ("drafter", 200.0, "chain:1", ("--jitter-ms", "10")),
        ("drafter", 0.0, "chain:8", ()),
    ],
)
async def test_streamed_tokens_equal_those_of_the_target_alone(
    start_pipeline: Any,
    checkpoints: dict[str, Path],
    drafter: str,
    rtt_ms: float,
    growth: str,
    flags: tuple[str, ...],
) -> None:
    async with (
        start_pipeline(
            target=checkpoints["target"],
            drafter=checkpoints[drafter],
            rtt_ms=rtt_ms,
            growth=growth,
            emulator_flags=flags,
        ) as pipeline,
        pipeline.client() as client,
    ):

        async def both(prompt: str, sampling: Sampling) -> None:
            request = {"prompt": prompt, "sampling": sampling, "max_tokens": 32}
            drafted, alone = [await pipeline.ask(client, **request, speculate=on) for on in (True, False)]
            assert drafted[:2] == alone[:2]
            assert drafted[2].finish_reason == alone[2].finish_reason
            assert alone[2].report["candidates_received"] == 0

        # Two at a time: sessions share the nodes.
        for i in range(0, len(PROMPTS), 2):
            await asyncio.gather(*[both(prompt, s) for prompt in PROMPTS[i : i + 2] for s in SAMPLINGS[:2]])
        await both(PROMPTS[0], SAMPLINGS[2])


async def test_rounds_overlap_and_are_traced(start_pipeline: Any, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The trace shows a frame being drafted while an earlier one was on its way or being verified."""
    async with (
        # A tiny target alone would outrun any link, so it waits for its drafts here.
        start_pipeline(
            target=checkpoints["target"],
            drafter=checkpoints["target"],
            rtt_ms=40.0,
            verify_flags=("--patience-ms", "1000"),
        ) as pipeline,
        pipeline.client() as client,
    ):
        _, _, finished = await pipeline.ask(client, prompt=PROMPTS[0], max_tokens=120)
        assert finished.report["tokens_draft"] > 0
    events = [json.loads(line) for line in (tmp_path / "draft.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    steps = [event for event in events if event["event"] == "draft"]
    assert rounds
    overlapped = [
        step for step in steps for r in rounds if r["sent_at"] < step["began"] and step["now"] < r["received_at"]
    ]
    assert len(overlapped) > len(rounds)


async def test_cancelling_a_stream_frees_both_nodes(start_pipeline: Any, checkpoints: dict[str, Path]) -> None:
    async with (
        start_pipeline(
            target=checkpoints["target"], drafter=checkpoints["target"], verify_flags=("--slots", "1"),
            draft_flags=("--slots", "1"),
        ) as pipeline,
        pipeline.client() as client,
    ):  # fmt: skip
        stream = client.stream(prompt="count", max_tokens=240, ignore_eos=True)
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()
        # With one slot the next request can only run if the first has given it up.
        async with asyncio.timeout(30):
            _, _, finished = await pipeline.ask(client, prompt="again", max_tokens=24)
        assert finished.completion_tokens <= 24
