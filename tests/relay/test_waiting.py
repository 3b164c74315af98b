"""All slots taken: requests wait in line, hear their place in it, and are served in the order in which they came.

A real node with a scripted model, a real relay and real clients, over loopback sockets in one process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.bytes import ByteTokenizer
from engine.executor import ModelExecutor
from engine.scripted import ScriptedTarget
from engine.scripted_logits import hash_logits, reference
from node_verify.node import VerifyNode
from node_verify.scheduler import VerifyScheduler
from relay.client import Delta, StreamClient
from relay.errors import RequestFailed
from speculation.selection import BestFirst
from wire.aio.dialer import keep_linked
from wire.aio.trace import TraceWriter
from wire.messages import PROTOCOL_VERSION, Hello, ModelIdentity
from wire.sampling import Sampling

BOUND_S = 30.0
VOCAB_SIZE = 128
TARGET = hash_logits(VOCAB_SIZE, 3)
MODEL = ModelIdentity(name="m", revision="1", tokenizer="ab" * 32, vocab_size=VOCAB_SIZE, context_length=4096)
PROMPT = (72, 105)


@pytest.fixture
async def verify(relay: Any) -> AsyncIterator[VerifyNode]:
    """One slot, and three places in the line."""
    executor = ModelExecutor("target")
    node = VerifyNode(
        scheduler=VerifyScheduler(
            selection=BestFirst(4), patience_s=0.0, num_slots=1, max_rows=4, vocab_size=VOCAB_SIZE, max_waiting=3
        ),
        runner=ScriptedTarget(
            TARGET, num_slots=1, max_length=4096, max_rows=4, vocab_size=VOCAB_SIZE, delay_s=lambda rows: 0.001
        ),
        executor=executor, tokenizer=ByteTokenizer(), context_length=4096, vocab_size=VOCAB_SIZE, stop_ids=(),
        trace=TraceWriter(None),
    )  # fmt: skip
    hello = Hello(protocol=PROTOCOL_VERSION, role="verify", name="verify", capacity=1, model=MODEL)
    up = asyncio.Event()
    linking = keep_linked(
        node, url=relay.url, secret=relay.secret, hello=hello, ssl_context=None, on_first_link=up.set,
        rng=random.Random(1),
    )  # fmt: skip
    tasks = [asyncio.create_task(linking), asyncio.create_task(node.feed_model())]
    await asyncio.wait_for(up.wait(), BOUND_S)
    yield node
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await executor.close()


class Asked:
    """One request under way: what it was told, and what came."""

    def __init__(self, client: StreamClient, session: str, num_tokens: int = 12) -> None:
        self.client, self.session = client, session
        self.num_tokens = num_tokens
        self.told: asyncio.Queue[int] = asyncio.Queue()
        self.tokens: list[int] = []
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        stream = self.client.stream(
            prompt_ids=PROMPT, max_tokens=self.num_tokens, session=self.session, on_waiting=self.told.put_nowait
        )
        async for event in stream:
            if isinstance(event, Delta):
                self.began.set()
                self.tokens += event.tokens

    async def place(self) -> int:
        return await asyncio.wait_for(self.told.get(), BOUND_S)


async def test_who_waits_hears_its_place_and_each_is_served_in_turn(relay: Any, verify: VerifyNode) -> None:
    async with (
        StreamClient(relay.url, secret=relay.secret) as one,
        StreamClient(relay.url, secret=relay.secret) as other,
    ):
        runs = Asked(one, "runs", num_tokens=4000)
        await asyncio.wait_for(runs.began.wait(), BOUND_S)
        first = Asked(other, "first")
        assert await first.place() == 1
        second = Asked(one, "second")
        assert await second.place() == 2
        third = Asked(other, "third")
        assert await third.place() == 3

        # The line is full: told so, with the limit, and the others stay where they are.
        with pytest.raises(RequestFailed, match="3 sessions wait for a slot already, the limit is 3"):
            await asyncio.wait_for(Asked(one, "too many").task, BOUND_S)

        # One that gives up makes the one behind it move up, and nobody else.
        other.cancel("first")
        await asyncio.wait_for(first.task, BOUND_S)
        assert await second.place() == 1
        assert await third.place() == 2
        assert runs.told.empty()

        one.cancel("runs")
        await asyncio.wait_for(runs.task, BOUND_S)
        assert await third.place() == 1
        await asyncio.wait_for(second.task, BOUND_S)
        assert not third.began.is_set() or verify.scheduler.sessions.keys() <= {"third"}
        await asyncio.wait_for(third.task, BOUND_S)
        expected = list(reference(TARGET, Sampling(), PROMPT, 12))
        assert second.tokens == third.tokens == expected
        assert first.tokens == []
        assert second.told.empty()


async def test_a_client_that_is_gone_leaves_the_line(relay: Any, verify: VerifyNode) -> None:
    async with StreamClient(relay.url, secret=relay.secret) as stays:
        runs = Asked(stays, "runs", num_tokens=4000)
        await asyncio.wait_for(runs.began.wait(), BOUND_S)
        async with StreamClient(relay.url, secret=relay.secret, recover_s=0.0) as goes:
            gone = Asked(goes, "gone")
            assert await gone.place() == 1
            last = Asked(stays, "last")
            assert await last.place() == 2
        assert await last.place() == 1
        stays.cancel("runs")
        await asyncio.wait_for(last.task, BOUND_S)
        assert last.tokens == list(reference(TARGET, Sampling(), PROMPT, 12))
        await asyncio.wait_for(asyncio.gather(gone.task, return_exceptions=True), BOUND_S)
