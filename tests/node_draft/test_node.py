"""The draft node's shell: a failure of the runner ends the session it belongs to, or the whole node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from engine.errors import CacheError, EngineDead
from engine.executor import ModelExecutor
from engine.scripted import ScriptedDrafter
from engine.scripted_logits import hash_logits
from node_draft.node import DraftNode
from node_draft.scheduler import DraftScheduler
from speculation.growth import parse_growth
from speculation.passes import DraftResult, DraftStep, Sampling
from wire.aio.trace import TraceWriter
from wire.codec import digest_ids, encode
from wire.messages import Candidates, Error, Message, Prefix

VOCAB = 64


class FailingDrafter(ScriptedDrafter):
    """Fails where it is told to, for prompts of 13 tokens."""

    def __init__(self, failing: str, exc: BaseException) -> None:
        super().__init__(hash_logits(VOCAB, 1), num_slots=2, max_length=64, max_rows=16, vocab_size=VOCAB)
        self.failing = failing
        self.exc = exc
        self.cursed: set[int] = set()

    def open(self, slot: int, *, sampling: Sampling, num_prompt: int) -> None:
        self.cursed.discard(slot)
        if num_prompt == 13:
            self.cursed.add(slot)
            if self.failing == "open":
                raise self.exc
        super().open(slot, sampling=sampling, num_prompt=num_prompt)

    def step(self, batch: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        if self.failing == "step" and any(step.slot in self.cursed for step in batch):
            raise self.exc
        return super().step(batch)


class FakeLink:
    """Hands on what is sent."""

    rtt_s = 0.0

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, message: Message) -> None:
        self.sent.put_nowait(message)


def begin(failing: str, exc: BaseException) -> tuple[DraftNode, FakeLink]:
    node = DraftNode(
        scheduler=DraftScheduler(growth=parse_growth("chain:2"), num_slots=2, max_length=64, max_rows=16),
        runner=FailingDrafter(failing, exc),
        executor=ModelExecutor("drafter"),
        trace=TraceWriter(None),
    )
    link = FakeLink()
    node.on_link(link)  # type: ignore[arg-type]
    return node, link


def send_prefix(node: DraftNode, session: str, num_prompt: int) -> None:
    tokens = tuple(range(num_prompt))
    message = Prefix(
        session=session, epoch=1, start=0, tokens=tokens, total=num_prompt, digest=digest_ids(tokens), limit=60,
        prompt_tokens=num_prompt,
    )  # fmt: skip
    node.on_frame(encode(message), node.now())


async def next_of(link: FakeLink) -> Any:
    return await asyncio.wait_for(link.sent.get(), 20)


@pytest.mark.parametrize("failing", ["open", "step"])
@pytest.mark.parametrize("exc", [CacheError("cursed"), ValueError("a bug of ours")], ids=["cache", "bug"])
async def test_a_runner_that_fails_ends_that_session_alone(failing: str, exc: Exception) -> None:
    node, link = begin(failing, exc)
    task = asyncio.create_task(node.feed_model())
    try:
        send_prefix(node, "bad", 13)
        told = await next_of(link)
        assert isinstance(told, Error)
        assert (told.session, told.code) == ("bad", "draft_failed")
        assert str(exc) in told.message
        for number in range(3):
            send_prefix(node, f"good {number}", 5)
            offered = await next_of(link)
            assert isinstance(offered, Candidates)
            assert offered.session == f"good {number}"
            assert len(offered.tokens) == 2
            node._perform(node.scheduler.on_release(offered.session), node.now())
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await node.executor.close()


@pytest.mark.parametrize("exc", [EngineDead("the device is lost"), SystemExit(3)], ids=["dead", "thread"])
async def test_c079_what_is_lost_for_all_sessions_ends_the_node(exc: BaseException) -> None:
    node, _ = begin("step", exc)
    send_prefix(node, "bad", 13)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(node.feed_model(), 20)
    await node.executor.close()


async def test_what_a_library_says_may_be_longer_than_what_a_peer_may_be_told() -> None:
    node, link = begin("step", RuntimeError("a compiler's listing " * 1000))
    task = asyncio.create_task(node.feed_model())
    send_prefix(node, "bad", 13)
    told = await next_of(link)
    assert (told.session, told.code) == ("bad", "draft_failed")
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await node.executor.close()
