"""Everything goes wrong at once, for minutes, over real sockets: does every answer come out as if nothing had?

    python scripts/chaos.py [--seconds 120] [--seed 1] [--results docs/results/chaos.json]

One process: a relay, verify and draft nodes with scripted models, and clients that ask without pause, all linked over
loopback. Meanwhile, as the seed has it, verify and draft nodes are killed and come back, links are cut, nodes drain and
the relay restarts. An answer that finished must equal its reference token for token and character for character; one
that did not must have ended with an explicit error, and what came of it must be the beginning of its reference.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import resource
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.bytes import ByteTokenizer
from engine.executor import ModelExecutor
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import agreeing, hash_logits, reference
from node_draft.node import DraftNode
from node_draft.scheduler import DraftScheduler
from node_verify.node import VerifyNode
from node_verify.scheduler import VerifyScheduler
from relay.client import Delta, Finished, StreamClient
from relay.config import RelayConfig
from relay.errors import RequestFailed
from relay.server import RelayServer
from scripts.results import Goal, write_results
from speculation.growth import parse_growth
from speculation.selection import BestFirst
from wire.aio.dialer import keep_linked
from wire.aio.health import resident_bytes
from wire.aio.shell import NodeShell
from wire.aio.trace import TraceWriter
from wire.errors import WireError
from wire.messages import PROTOCOL_VERSION, Hello, ModelIdentity
from wire.sampling import Sampling

SECRET = "a-secret-of-the-chaos"
VOCAB_SIZE = 128
MAX_LENGTH = 512
SLOTS = 16
TARGET = hash_logits(VOCAB_SIZE, 3)
MODEL = ModelIdentity(name="m", revision="1", tokenizer="ab" * 32, vocab_size=VOCAB_SIZE, context_length=MAX_LENGTH)
EVENTS = ("kill verify", "kill draft", "cut client", "cut verify", "cut draft", "drain verify", "restart relay")
WEIGHTS = (2, 2, 6, 2, 2, 1, 1)


@dataclass
class Node:
    """A running node."""

    role: str
    shell: NodeShell
    executor: ModelExecutor
    tasks: list[asyncio.Task[None]]

    @property
    def num_sessions(self) -> int:
        """Sessions that are open at it."""
        assert isinstance(self.shell, VerifyNode | DraftNode)
        return len(self.shell.scheduler.sessions)

    async def kill(self) -> None:
        """Cut its socket and end its tasks, without a word to anybody."""
        for task in self.tasks:
            task.cancel()
        if self.shell.link is not None:
            self.shell.link.abort()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.executor.close()


@dataclass
class World:
    """All parts, and what has happened."""

    rng: random.Random
    pass_s: float
    port: int = 0
    nodes: list[Node] = field(default_factory=list)
    clients: list[StreamClient] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_tokens: int = 0
    dead: list[str] = field(default_factory=list)
    stop_relay: asyncio.Event = field(default_factory=asyncio.Event)
    relay: RelayServer | None = None
    serving: asyncio.Task[None] | None = None
    background: set[asyncio.Task[Any]] = field(default_factory=set)

    async def start_relay(self) -> None:
        """Start it, on the port that it had before if there was one."""
        config = RelayConfig(secret=SECRET, port=self.port, grace_s=0.05, takeover_wait_s=10.0, log_level="error")
        for attempt in range(50):
            self.relay = RelayServer(config)
            try:
                await self.relay.start()
                break
            except WireError:
                if attempt == 49:
                    raise
                await asyncio.sleep(0.1)
        assert self.relay is not None
        self.port = self.relay.port
        self.stop_relay = asyncio.Event()
        self.serving = asyncio.create_task(self.relay.serve(self.stop_relay))

    async def restart_relay(self) -> None:
        """End it as SIGTERM does, and start it anew after a moment."""
        assert self.serving is not None
        self.stop_relay.set()
        await self.serving
        await asyncio.sleep(self.rng.uniform(0.0, 0.5))
        await self.start_relay()

    def start_node(self, role: str) -> None:
        """Start a node; it links when it can."""
        executor = ModelExecutor(role)
        node: VerifyNode | DraftNode
        if role == "verify":
            node = VerifyNode(
                scheduler=VerifyScheduler(
                    selection=BestFirst(8), patience_s=0.0, num_slots=SLOTS, max_rows=8, vocab_size=VOCAB_SIZE
                ),
                runner=ScriptedTarget(
                    TARGET, num_slots=SLOTS, max_length=MAX_LENGTH, max_rows=8, vocab_size=VOCAB_SIZE,
                    delay_s=lambda rows: self.pass_s,
                ),
                executor=executor, tokenizer=ByteTokenizer(), context_length=MAX_LENGTH, vocab_size=VOCAB_SIZE,
                stop_ids=(), trace=TraceWriter(None),
            )  # fmt: skip
        else:
            drafter = ScriptedDrafter(
                agreeing(TARGET, 0.8, 1), num_slots=SLOTS, max_length=MAX_LENGTH, max_rows=64, vocab_size=VOCAB_SIZE
            )
            growth = parse_growth("chain:2+8")
            scheduler = DraftScheduler(growth=growth, num_slots=SLOTS, max_length=MAX_LENGTH, max_rows=64)
            node = DraftNode(scheduler=scheduler, runner=drafter, executor=executor, trace=TraceWriter(None))
        hello = Hello(
            protocol=PROTOCOL_VERSION, role=role, name=f"{role}-{self.rng.randrange(10**6)}", capacity=SLOTS,
            model=MODEL,
        )  # fmt: skip
        tasks = [asyncio.create_task(self._link(node, hello)), asyncio.create_task(node.feed_model())]
        tasks[1].add_done_callback(self._note_end)
        self.nodes.append(Node(role, node, executor, tasks))

    async def _link(self, node: VerifyNode | DraftNode, hello: Hello) -> None:
        url = f"ws://127.0.0.1:{self.port}"
        while True:
            # The first attempt is final for a node, which a script of systemd's would start again.
            with suppress(WireError):
                await keep_linked(node, url=url, secret=SECRET, hello=hello, ssl_context=None)
            await asyncio.sleep(0.2)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.dead.append(repr(task.exception()))

    async def ask(self, client: StreamClient) -> None:
        """One answer from beginning to end, and the verdict on it."""
        rng = self.rng
        prompt = tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 20)))
        sampling = Sampling(temperature=rng.choice([0.0, 0.9]), seed=rng.randrange(1000))
        num_tokens = rng.choice([20, 60, 200])
        tokens: list[int] = []
        text, ended = "", ""
        try:
            async for event in client.stream(prompt_ids=prompt, sampling=sampling, max_tokens=num_tokens):
                match event:
                    case Delta():
                        tokens += event.tokens
                        text += event.text
                    case Finished():
                        ended = "finished"
        except RequestFailed as exc:
            ended = f"error: {exc.code}"
        except WireError as exc:
            ended = f"error: {type(exc).__name__}"
        expected = await asyncio.to_thread(reference, TARGET, sampling, prompt, num_tokens)
        whole = len(expected) if ended == "finished" else len(tokens)
        if tuple(tokens) != expected[:whole] or text != bytes(tokens).decode() or not ended:
            self.faults.append(f"prompt {prompt}, {sampling}, {num_tokens} tokens: {ended}, got {tokens}")
        self.outcomes[ended] += 1
        self.num_tokens += len(tokens)

    async def keep_asking(self, client: StreamClient, until: float) -> None:
        """Ask without pause."""
        while time.monotonic() < until:
            await self.ask(client)
            if client._lost is not None:
                self.outcomes["clients lost"] += 1
                return

    def of(self, role: str) -> list[Node]:
        """Running nodes of a role."""
        return [node for node in self.nodes if node.role == role]

    async def happen(self) -> None:
        """One thing goes wrong."""
        event = self.rng.choices(EVENTS, WEIGHTS)[0]
        what, _, role = event.partition(" ")
        self.events[event] += 1
        if role == "relay":
            await self.restart_relay()
        elif role == "client":
            link = self.rng.choice(self.clients)._link
            if link is not None:
                link.abort()
        elif what == "cut":
            link = self.rng.choice(self.of(role)).shell.link
            if link is not None:
                link.abort()
        else:
            node = self.rng.choice(self.of(role))
            self.nodes.remove(node)
            if what == "drain":
                await node.shell.drain(self.rng.uniform(0.2, 1.0), "chaos")
            await node.kill()
            self._later(self.rng.uniform(0.1, 3.0), role)

    def _later(self, pause_s: float, role: str) -> None:
        async def start() -> None:
            await asyncio.sleep(pause_s)
            self.start_node(role)

        task = asyncio.create_task(start())
        self.background.add(task)
        task.add_done_callback(self.background.discard)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run; its figures."""
    world = World(random.Random(args.seed), args.pass_ms / 1e3)
    await world.start_relay()
    for role in ("verify", "verify", "verify", "draft", "draft", "draft"):
        world.start_node(role)
    for _ in range(400):
        if world.relay is not None and len(world.relay.router.peers) == 6:
            break
        await asyncio.sleep(0.05)
    began_mb = resident_bytes() / 1e6
    began = time.monotonic()
    until = began + args.seconds
    for _ in range(args.clients):
        client = StreamClient(f"ws://127.0.0.1:{world.port}", secret=SECRET, recover_s=30.0)
        world.clients.append(await client.__aenter__())
    asking = [
        asyncio.create_task(world.keep_asking(client, until))
        for client in world.clients
        for _ in range(args.sessions // args.clients)
    ]
    middle_mb = began_mb
    while time.monotonic() < until:
        await asyncio.sleep(world.rng.expovariate(args.faults_per_s))
        await world.happen()
        if time.monotonic() < began + args.seconds / 2:
            middle_mb = resident_bytes() / 1e6
    _, unfinished = await asyncio.wait(asking, timeout=90)
    for task in asking:
        if task.done() and task.exception() is not None:
            world.faults.append(f"a caller got {task.exception()!r}")
    for client in world.clients:
        await client.__aexit__(None, None, None)
    assert world.relay is not None
    await asyncio.sleep(1.0)
    left = {"sessions at the relay": len(world.relay.router.sessions), "kept bytes": world.relay.router.kept_bytes}
    for role in ("verify", "draft"):
        left[f"sessions at {role} nodes"] = sum(node.num_sessions for node in world.of(role))
    gc.collect()
    ended_mb = resident_bytes() / 1e6
    for node in list(world.nodes):
        await node.kill()
    for task in list(world.background):
        task.cancel()
    world.stop_relay.set()
    assert world.serving is not None
    await world.serving
    return {
        "outcomes": dict(world.outcomes), "events": dict(world.events), "tokens": world.num_tokens,
        "wrong answers": world.faults[:5], "num_wrong": len(world.faults), "hung": len(unfinished),
        "nodes that died of themselves": world.dead, "left": left,
        "resident_mb": {"start": round(began_mb, 1), "middle": round(middle_mb, 1), "end": round(ended_mb, 1)},
        "cpu_s": round(resource.getrusage(resource.RUSAGE_SELF).ru_utime, 1),
    }  # fmt: skip


def main() -> int:
    """The command; 1 if anything was lost, doubled, hung or died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="of what goes wrong; times are real, so it does not replay")
    parser.add_argument("--clients", type=int, default=10, help="clients, each with a link of its own")
    parser.add_argument("--sessions", type=int, default=30, help="answers under way at a time")
    parser.add_argument("--faults-per-s", type=float, default=1.0, help="how often something goes wrong")
    parser.add_argument("--pass-ms", type=float, default=2.0, help="what a pass of the target takes")
    parser.add_argument("--results", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    figures = asyncio.run(run(args))
    left = sum(figures["left"].values())
    growth_mb = round(figures["resident_mb"]["end"] - figures["resident_mb"]["middle"], 1)
    goals = [
        Goal("answers that differ from their reference", 0, figures["num_wrong"], figures["num_wrong"] == 0),
        Goal("answers without an end or an error", 0, figures["hung"], figures["hung"] == 0),
        Goal("nodes that died and were not killed", 0, len(figures["nodes that died of themselves"]),
             not figures["nodes that died of themselves"]),
        Goal("sessions and bytes left behind", 0, left, left == 0),
        Goal("growth of resident memory in the second half, MB", "< 20", growth_mb, growth_mb < 20),
    ]  # fmt: skip
    print(figures)
    for goal in goals:
        print(f"{'met ' if goal.met else 'MISS'} {goal.name}: {goal.measured} ({goal.goal})")
    if args.results:
        write_results(
            args.results,
            command="python " + " ".join(sys.argv),
            packages=["websockets", "orjson"],
            models={"target": "scripted", "drafter": "scripted, agrees to 0.8"},
            parameters={k: v for k, v in vars(args).items() if k != "results"},
            figures=figures,
            goals=goals,
        )
    return int(not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
