"""Answers go on, token for token, when clients, nodes and the relay itself go and come back.

Real nodes with scripted models, a real relay, and a real client, over loopback sockets in one process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.bytes import ByteTokenizer
from engine.executor import ModelExecutor
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import agreeing, hash_logits, reference
from node_draft.node import DraftNode
from node_draft.scheduler import DraftScheduler
from node_verify.node import VerifyNode
from node_verify.scheduler import VerifyScheduler
from relay.client import Delta, Finished, StreamClient
from relay.errors import RequestFailed
from speculation.growth import parse_growth
from speculation.selection import BestFirst
from tests.relay.bad_link import BadLink
from wire.aio.dialer import Backoff, keep_linked
from wire.aio.shell import NodeShell
from wire.aio.trace import TraceWriter
from wire.errors import LinkLost
from wire.messages import PROTOCOL_VERSION, Hello, ModelIdentity
from wire.metrics import render
from wire.sampling import Sampling

BOUND_S = 30.0
VOCAB_SIZE = 128
TARGET = hash_logits(VOCAB_SIZE, 3)
MODEL = ModelIdentity(name="m", revision="1", tokenizer="ab" * 32, vocab_size=VOCAB_SIZE, context_length=512)
PROMPT = (72, 105)
UNHURRIED_S = 0.01
"""A pass that leaves a drafter on a busy machine the time to follow."""
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=5, repetition_penalty=1.1, frequency_penalty=0.2)]


def quick() -> Backoff:
    return Backoff(first_s=0.05, most_s=0.2)


StartRelay = Callable[..., Awaitable[Any]]


@dataclass
class Running:
    """A node under test. `kill` cuts its socket and leaves no task behind."""

    node: NodeShell
    executor: ModelExecutor
    tasks: list[asyncio.Task[None]]

    async def kill(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self.node.link is not None:
            self.node.link.abort()
        for task in self.tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
        await self.executor.close()

    @property
    def num_sessions(self) -> int:
        return len(self.node.scheduler.sessions)  # type: ignore[attr-defined]


@dataclass
class Nodes:
    """Starts nodes against one relay address."""

    url: str
    secret: str
    running: list[Running] = field(default_factory=list)

    async def _start(self, node: Any, executor: ModelExecutor, role: str, name: str) -> Running:
        hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=name, capacity=4, model=MODEL)
        up = asyncio.Event()
        link = keep_linked(
            node, url=self.url, secret=self.secret, hello=hello, ssl_context=None, on_first_link=up.set,
            rng=random.Random(1),
        )  # fmt: skip
        running = Running(node, executor, [asyncio.create_task(link), asyncio.create_task(node.feed_model())])
        self.running.append(running)
        await asyncio.wait_for(up.wait(), BOUND_S)
        return running

    async def verify(self, name: str = "verify", *, pass_s: float = 0.002) -> Running:
        target = ScriptedTarget(
            TARGET, num_slots=4, max_length=512, max_rows=8, vocab_size=VOCAB_SIZE, delay_s=lambda rows: pass_s
        )
        executor = ModelExecutor("target")
        node = VerifyNode(
            scheduler=VerifyScheduler(
                selection=BestFirst(8), patience_s=0.0, num_slots=4, max_rows=8, vocab_size=VOCAB_SIZE
            ),
            runner=target, executor=executor, tokenizer=ByteTokenizer(), context_length=512,
            vocab_size=VOCAB_SIZE, stop_ids=(), trace=TraceWriter(None),
        )  # fmt: skip
        return await self._start(node, executor, "verify", name)

    async def draft(self, name: str = "draft") -> Running:
        drafter = ScriptedDrafter(agreeing(TARGET, 0.8, 1), num_slots=4, max_length=512, max_rows=64,
                                  vocab_size=VOCAB_SIZE)  # fmt: skip
        executor = ModelExecutor("drafter")
        scheduler = DraftScheduler(growth=parse_growth("chain:2+8"), num_slots=4, max_length=512, max_rows=64)
        node = DraftNode(scheduler=scheduler, runner=drafter, executor=executor, trace=TraceWriter(None))
        return await self._start(node, executor, "draft", name)


@pytest.fixture
async def nodes(relay: Any) -> AsyncIterator[Nodes]:
    nodes = Nodes(relay.url, relay.secret)
    yield nodes
    for running in nodes.running:
        await running.kill()


@pytest.fixture
async def client(relay: Any) -> AsyncIterator[StreamClient]:
    async with StreamClient(relay.url, secret=relay.secret, backoff=quick(), rng=random.Random(2)) as client:
        yield client


class Listener:
    """Reads one answer; `reached(n)` waits until so many tokens have come."""

    def __init__(self, client: StreamClient, sampling: Sampling, num_tokens: int = 120, **request: Any) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.sources: list[str] = []
        self.finished: Finished | None = None
        self._more = asyncio.Condition()
        self.task = asyncio.create_task(self._read(client, sampling, num_tokens, request))

    async def _read(self, client: StreamClient, sampling: Sampling, num_tokens: int, request: dict[str, Any]) -> None:
        stream = client.stream(prompt_ids=PROMPT, sampling=sampling, max_tokens=num_tokens, **request)
        async for event in stream:
            if isinstance(event, Delta):
                assert event.start == len(self.tokens)
                self.tokens += event.tokens
                self.text += event.text
                self.sources += event.sources
            else:
                self.finished = event
            async with self._more:
                self._more.notify_all()

    async def reached(self, num_tokens: int) -> None:
        async with self._more:
            await asyncio.wait_for(self._more.wait_for(lambda: len(self.tokens) >= num_tokens), BOUND_S)

    async def whole(self, sampling: Sampling, num_tokens: int = 120) -> None:
        """The answer ends, and is the target's own."""
        await asyncio.wait_for(self.task, BOUND_S)
        expected = reference(TARGET, sampling, PROMPT, num_tokens)
        assert tuple(self.tokens) == expected
        assert self.text == bytes(expected).decode()
        assert self.finished is not None
        assert (self.finished.finish_reason, self.finished.completion_tokens) == ("length", num_tokens)
        assert self.finished.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("replacement", ["is there", "comes later"])
async def test_c040_a_verify_node_that_dies_is_replaced_and_the_text_is_the_same(
    nodes: Nodes, client: StreamClient, sampling: Sampling, replacement: str
) -> None:
    first = await nodes.verify("first", pass_s=UNHURRIED_S)
    await nodes.draft()
    answer = Listener(client, sampling)
    await answer.reached(20)
    second = await nodes.verify("second", pass_s=UNHURRIED_S) if replacement == "is there" else None
    await first.kill()
    second = second or await nodes.verify("second", pass_s=UNHURRIED_S)
    await answer.reached(70)
    assert second.num_sessions == 1
    await answer.whole(sampling)
    assert "draft" in answer.sources[70:], "the draft node follows"


async def test_c040_without_a_replacement_the_error_is_explicit_and_the_text_so_far_stays(
    nodes: Nodes, client: StreamClient, relay: Any
) -> None:
    relay.server.router.takeover_wait_s = 0.1
    first = await nodes.verify()
    answer = Listener(client, SAMPLINGS[0])
    await answer.reached(20)
    await first.kill()
    with pytest.raises(RequestFailed, match=r"no other node took over within 0\.1 s") as failed:
        await asyncio.wait_for(answer.task, BOUND_S)
    assert failed.value.code == "verify_lost"
    assert tuple(answer.tokens) == reference(TARGET, SAMPLINGS[0], PROMPT, 120)[: len(answer.tokens)]
    with pytest.raises(RequestFailed) as failed:
        await asyncio.wait_for(Listener(client, SAMPLINGS[0]).task, BOUND_S)
    assert failed.value.code == "no_verify_node", "new requests fail fast"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
async def test_c036_a_client_that_is_cut_off_again_and_again_gets_every_character_once(
    nodes: Nodes, client: StreamClient, relay: Any, sampling: Sampling
) -> None:
    await nodes.verify(pass_s=0.005)
    answer = Listener(client, sampling, 300)
    for _ in range(3):
        await answer.reached(len(answer.tokens) + 10)
        assert client._link is not None
        client._link.abort()
    await answer.whole(sampling, 300)
    assert relay.server.router.num_resumed == 3
    assert relay.server.router.num_opened == 1


async def test_c036_where_the_relay_has_moved_past_the_position_the_session_is_opened_anew(
    nodes: Nodes, client: StreamClient, relay: Any
) -> None:
    verify = await nodes.verify()
    answer = Listener(client, SAMPLINGS[1], 200)
    await answer.reached(20)
    (session,) = relay.server.router.sessions.values()
    session.kept.max_recent_bytes = 200
    assert client._link is not None
    client._link.abort()
    await answer.whole(SAMPLINGS[1], 200)
    assert relay.server.router.num_opened == 2
    assert relay.server.router.num_resumed == 0
    assert verify.num_sessions == 0


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
async def test_a_relay_that_restarts_loses_no_answer(start_relay: StartRelay, sampling: Sampling) -> None:
    relay = await start_relay()
    nodes = Nodes(relay.url, relay.secret)
    await nodes.verify()
    await nodes.draft()
    async with StreamClient(relay.url, secret=relay.secret, backoff=quick(), rng=random.Random(2)) as client:
        answers = [Listener(client, sampling, 200) for _ in range(3)]
        for answer in answers:
            await answer.reached(20)
        await relay.server.drain()
        again = await start_relay(port=relay.server.port)
        for answer in answers:
            await answer.whole(sampling, 200)
        assert again.server.router.num_opened == 3
    for running in nodes.running:
        await running.kill()


async def test_a_relay_that_stays_away_is_an_explicit_error(start_relay: StartRelay) -> None:
    relay = await start_relay()
    nodes = Nodes(relay.url, relay.secret)
    verify = await nodes.verify()
    async with StreamClient(relay.url, secret=relay.secret, recover_s=0.3) as client:
        answer = Listener(client, SAMPLINGS[0], 200)
        await answer.reached(20)
        await relay.server.drain()
        with pytest.raises(LinkLost, match=r"tried for 0\.3 s"):
            await asyncio.wait_for(answer.task, BOUND_S)
        assert len(answer.tokens) >= 20
        with pytest.raises(LinkLost):
            await asyncio.wait_for(Listener(client, SAMPLINGS[0]).task, BOUND_S)
    await verify.kill()


async def test_a_draft_node_that_dies_is_replaced_behind_the_committed_tokens(
    nodes: Nodes, client: StreamClient
) -> None:
    await nodes.verify(pass_s=0.004)
    first = await nodes.draft("first")
    answer = Listener(client, SAMPLINGS[1], 300)
    await answer.reached(40)
    await first.kill()
    await answer.reached(80)
    second = await nodes.draft("second")
    await answer.whole(SAMPLINGS[1], 300)
    assert "draft" in answer.sources[:60]
    assert "draft" in answer.sources[120:]
    assert second.num_sessions == 0


async def test_c068_a_draining_verify_node_finishes_short_answers_and_long_ones_move(
    nodes: Nodes, client: StreamClient, relay: Any
) -> None:
    first = await nodes.verify("first", pass_s=0.01)
    long = Listener(client, SAMPLINGS[1], 300)
    short = Listener(client, SAMPLINGS[0], 60)
    await long.reached(20)
    await short.reached(20)
    second = await nodes.verify("second")
    draining = asyncio.create_task(first.node.drain(120.0, "spot instance action: terminate"))
    await short.whole(SAMPLINGS[0], 60)
    assert relay.server.router.num_moved == 0
    # The time has come: the grace period is nearly over.
    (due,) = relay.server.router.deadlines
    relay.server.router.deadlines[due] = 0.0
    relay.server._rearm.set()
    await asyncio.wait_for(draining, BOUND_S)
    assert first.num_sessions == 0
    assert relay.server.router.num_moved == 1
    newcomer = Listener(client, SAMPLINGS[0], 10)
    await newcomer.whole(SAMPLINGS[0], 10)
    assert not first.num_sessions
    await long.whole(SAMPLINGS[1], 300)
    assert second.num_sessions == 0


async def test_a_cancel_during_an_outage_ends_the_stream(nodes: Nodes, client: StreamClient, relay: Any) -> None:
    verify = await nodes.verify()
    answer = Listener(client, SAMPLINGS[0], 400, session="mine")
    await answer.reached(20)
    assert client._link is not None
    client._link.abort()
    client.cancel("mine")
    await asyncio.wait_for(answer.task, BOUND_S)
    assert answer.finished is not None
    assert answer.finished.finish_reason == "cancelled"
    assert verify.num_sessions == 0
    assert not relay.server.router.sessions


async def test_nodes_show_what_they_did(nodes: Nodes, client: StreamClient) -> None:
    verify, draft = await nodes.verify(), await nodes.draft()
    answer = Listener(client, SAMPLINGS[0])
    await answer.whole(SAMPLINGS[0])
    assert answer.finished is not None
    pages = [render(running.node.families()) for running in (verify, draft)]
    verified, drafted = (dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#") for page in pages)
    report = answer.finished.report
    for name in ("rounds", "drafted", "accepted"):
        assert float(verified[f'foredraft_verify_total{{what="{name}"}}']) == report[name]
    assert float(verified["foredraft_acceptance_rate"]) == pytest.approx(report["acceptance_rate"])
    assert verified["foredraft_linked"] == drafted["foredraft_linked"] == "1"
    assert int(drafted['foredraft_draft_total{what="frames"}']) >= int(
        drafted['foredraft_round_seconds_count{part="total"}']
    )
    assert int(drafted['foredraft_round_seconds_count{part="verify compute"}']) > 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_every_message_may_come_twice_on_every_hop(relay: Any, sampling: Sampling) -> None:
    async with BadLink(relay.url, relay.secret, double=1.0) as bad:
        nodes = Nodes(bad.url, relay.secret)
        verify, draft = await nodes.verify(pass_s=UNHURRIED_S), await nodes.draft()
        async with StreamClient(bad.url, secret=relay.secret) as client:
            for _ in range(2):
                answers = [Listener(client, sampling, 60) for _ in range(2)]
                for answer in answers:
                    await answer.whole(sampling, 60)
        assert bad.num_doubled > 100
        async with asyncio.timeout(BOUND_S):
            while verify.num_sessions or draft.num_sessions:  # noqa: ASYNC110  # nothing to wait on
                await asyncio.sleep(0.01)
        for running in nodes.running:
            await running.kill()


@pytest.mark.parametrize("seed", range(3))
async def test_c038_drafts_and_acceptances_may_overtake_each_other(relay: Any, seed: int) -> None:
    kinds = ("candidates", "acceptance", "resync")
    async with BadLink(relay.url, relay.secret, double=0.3, overtake=0.4, kinds=kinds, seed=seed) as bad:
        nodes = Nodes(bad.url, relay.secret)
        verify, draft = await nodes.verify(pass_s=UNHURRIED_S), await nodes.draft()
        async with StreamClient(relay.url, secret=relay.secret) as client:
            await Listener(client, SAMPLINGS[1], 60).whole(SAMPLINGS[1], 60)
        assert bad.num_overtaken
        async with asyncio.timeout(BOUND_S):
            while verify.num_sessions or draft.num_sessions:  # noqa: ASYNC110  # nothing to wait on
                await asyncio.sleep(0.01)
        for running in nodes.running:
            await running.kill()
