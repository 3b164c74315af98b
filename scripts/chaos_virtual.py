"""Everything goes wrong under a virtual clock: the real relay, nodes and clients, and a seed that says what and when.

The processes, links and models' times are virtual (`virtual_loop.py`); all that decides and all that speaks is the
program itself. Wires have delay and jitter, stall, are cut and fall silent; nodes are killed, drained and come back;
the relay is restarted and killed; and between relay and nodes, messages about candidates are lost, doubled and
overtaken, which no TCP does, and the protocol stands. A run is a function of its seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from node_draft.node import DraftNode
from node_verify.node import VerifyNode
from relay.client import StreamClient
from relay.config import RelayConfig
from relay.server import RelayServer
from scripts.chaos_answers import Question, Tally
from scripts.chaos_nodes import (
    MODEL,
    VOCAB_SIZE,
    Doubling,
    Unreliability,
    Unreliable,
    draft_node,
    reference,
    verify_node,
)
from scripts.virtual_loop import VirtualLoop
from scripts.virtual_net import Network, Transport
from wire.aio.dialer import keep_linked
from wire.errors import WireError
from wire.messages import PROTOCOL_VERSION, Hello

SECRET = "a-secret-of-the-chaos"
PORT = 8765
EVENTS = {
    "cut": 6.0, "stall": 4.0, "silence": 2.0, "kill verify": 2.0, "kill draft": 2.0, "drain verify": 1.0,
    "drain draft": 1.0, "kill client": 1.0, "restart relay": 0.5, "kill relay": 0.5,
}  # fmt: skip
"""What goes wrong, and how often beside the others."""
GIVE_UP_S = 600.0
"""Virtual time after the last question and event by which everything must have ended."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large and how bad a world is; times in virtual seconds.

    Attributes:
        num_sessions: in all; they come evenly over `arrive_s`.
        event_every_s: mean time between two things that go wrong; 0 for never.
    """

    num_sessions: int = 2000
    arrive_s: float = 300.0
    num_clients: int = 100
    num_verify: int = 6
    num_draft: int = 4
    num_slots: int = 32
    event_every_s: float = 1.0
    unreliability: Unreliability = field(default_factory=Unreliability)


@dataclass
class Running:
    """One process of a node."""

    name: str
    role: str
    node: VerifyNode | DraftNode


@dataclass
class World:
    """All processes, and what has happened."""

    loop: VirtualLoop
    rng: random.Random
    shape: Shape
    tally: Tally = field(default_factory=Tally)
    events: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)
    nodes: dict[str, Running] = field(default_factory=dict)
    clients: dict[str, StreamClient] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)
    died: list[str] = field(default_factory=list)
    log: Any = field(default_factory=hashlib.sha256)
    relay: RelayServer | None = None
    relay_name: str = ""
    stop_relay: asyncio.Event = field(default_factory=asyncio.Event)
    expected_ends: set[str] = field(default_factory=set)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def note(self, what: str) -> None:
        """Into the run's digest: two runs with one seed have the same."""
        self.log.update(f"{self.loop.time():.6f} {what}\n".encode())

    def start(self, name: str, main: Any) -> asyncio.Task[None]:
        """Start a process; one that ends of itself, unless it was to, is noted as dead."""

        def on_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and name not in self.expected_ends:
                self.died.append(f"{name} at {self.loop.time():.3f} s: {task.exception()!r}")

        task = self.loop.process(name, main)
        task.add_done_callback(on_end)
        return task

    async def kill(self, name: str) -> None:
        """End a process as SIGKILL does."""
        self.expected_ends.add(name)
        await self.loop.kill(name)

    async def start_relay(self) -> None:
        """Start it, on the port that it has always had."""
        self.add_totals()
        config = RelayConfig(secret=SECRET, port=PORT, grace_s=2.0, takeover_wait_s=20.0, log_level="error")
        self.relay_name = f"relay {next(self.numbers)}"
        self.stop_relay = stop = asyncio.Event()
        started = asyncio.Event()

        async def main() -> None:
            self.relay = RelayServer(config)
            await self.relay.start()
            started.set()
            await self.relay.serve(stop)

        task = self.start(self.relay_name, main)
        await asyncio.wait([task, asyncio.create_task(started.wait())], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task

    def add_totals(self) -> None:
        """Take over what the relay has counted that is going."""
        if self.relay is not None:
            router = self.relay.router
            self.totals.update({"opened": router.num_opened, "moved": router.num_moved, "resumed": router.num_resumed})
            self.totals.update({f"dropped: {reason.value}": count for reason, count in router.drops.items()})

    async def start_client(self) -> None:
        """Start a client; only one that the relay has let in is one."""
        name = f"client {next(self.numbers)}"
        rng = random.Random(self.rng.random())
        started = asyncio.Event()

        async def main() -> None:
            while not started.is_set():
                client = Doubling(f"ws://relay:{PORT}", secret=SECRET, name=name, rng=rng)
                try:
                    self.clients[name] = await client.__aenter__()
                except WireError:
                    await asyncio.sleep(1.0)
                else:
                    started.set()
            await asyncio.Event().wait()

        self.start(name, main)
        await started.wait()

    def start_node(self, role: str) -> None:
        """Start a node; it links when it can, and is started again when the relay turned it away, as systemd does."""
        name = f"{role} {next(self.numbers)}"
        rng = random.Random(self.rng.random())
        slots = self.shape.num_slots
        node = verify_node(rng, slots) if role == "verify" else draft_node(rng, slots)
        hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=name, capacity=slots, model=MODEL)
        user = Unreliable(node, rng, self.shape.unreliability, self.frames)

        async def link() -> None:
            while True:
                with suppress(WireError):
                    await keep_linked(
                        user, url=f"ws://relay:{PORT}", secret=SECRET, hello=hello, ssl_context=None, rng=rng
                    )
                await asyncio.sleep(1.0)

        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(link())
                tasks.create_task(node.feed_model())

        self.nodes[name] = Running(name, role, node)
        self.start(name, main)

    async def ask(self, number: int) -> None:
        """One question, by any client, at its time."""
        rng = random.Random(f"{self.rng.random()} {number}")
        await asyncio.sleep(number / self.shape.num_sessions * self.shape.arrive_s)
        question = Question.draw(f"s{number}", rng, vocab_size=VOCAB_SIZE, max_prompt=200)
        name, client = rng.choice(list(self.clients.items()))
        asking = self.loop.process(name, lambda: self.tally.ask(client, question, reference(question)))
        await asyncio.wait([asking])
        if not asking.cancelled() and asking.exception() is not None:
            self.tally.faults.append(f"{question}: its caller got {asking.exception()!r}")
        self.note(f"{question.name} ended")

    async def go_wrong(self) -> None:
        """One thing after the other goes wrong, for ever."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.shape.event_every_s))
            event = self.rng.choices(list(EVENTS), list(EVENTS.values()))[0]
            self.events[event] += 1
            self.note(event)
            await self.happen(event)

    async def happen(self, event: str) -> None:
        """One thing goes wrong."""
        what, _, role = event.partition(" ")
        match what, role:
            case "restart", _:
                self.expected_ends.add(self.relay_name)
                self.stop_relay.set()
                await asyncio.wait(self.loop.tasks_of(self.relay_name), timeout=10.0)
                await self.kill(self.relay_name)
                await self.start_relay()
            case "kill", "relay":
                await self.kill(self.relay_name)
                await asyncio.sleep(self.rng.uniform(0.0, 3.0))
                await self.start_relay()
            case "kill", "client":
                name = self.rng.choice(list(self.clients))
                del self.clients[name]
                await self.kill(name)
                await self.start_client()
            case "kill" | "drain", _:
                running = [each for each in self.nodes.values() if each.role == role and not each.node.draining]
                if running:
                    self.loop.create_task(self.replace(self.rng.choice(running), drain=what == "drain"))
            case _:
                self.break_wire(what)

    async def replace(self, running: Running, *, drain: bool) -> None:
        """A node goes, with a word or without; another comes after a while."""
        if drain:
            await running.node.drain(self.rng.uniform(0.5, 20.0), "chaos")
        await self.kill(running.name)
        del self.nodes[running.name]
        await asyncio.sleep(self.rng.uniform(0.1, 15.0))
        self.start_node(running.role)

    def break_wire(self, what: str) -> None:
        """Something happens to one of the links."""
        links = [client._link for client in self.clients.values()] + [each.node.link for each in self.nodes.values()]
        link = self.rng.choice(links)
        if link is None:
            return
        transport = link.websocket.transport
        assert isinstance(transport, Transport)
        match what:
            case "cut":
                transport.wire.cut()
            case "silence":
                transport.wire.die()
            case _:
                transport.wire.stall(self.loop.time() + self.rng.choice([0.2, 1.0, 4.0, 14.0]))

    async def run(self) -> None:
        """From the first start to the time when everything must have ended."""
        await self.start_relay()
        for role, num in (("verify", self.shape.num_verify), ("draft", self.shape.num_draft)):
            for _ in range(num):
                self.start_node(role)
        await asyncio.sleep(1.0)
        for _ in range(self.shape.num_clients):
            await self.start_client()
        asking = [asyncio.create_task(self.ask(number)) for number in range(self.shape.num_sessions)]
        wrong = asyncio.create_task(self.go_wrong()) if self.shape.event_every_s else None
        await asyncio.wait(asking, timeout=self.shape.arrive_s + GIVE_UP_S)
        if wrong is not None:
            wrong.cancel()
        # Nodes that went come back, links that are silent are found dead, what nobody came back for ends.
        await asyncio.sleep(120.0)
        assert self.relay is not None
        if not self.relay.router.peers:
            self.died.append(f"{self.relay_name} serves nobody")

    def figures(self) -> dict[str, Any]:
        """What came of it."""
        assert self.relay is not None
        router = self.relay.router
        left = {"sessions at the relay": len(router.sessions), "kept bytes at the relay": router.kept_bytes}
        for role in ("verify", "draft"):
            nodes = [each.node for each in self.nodes.values() if each.role == role]
            left[f"sessions at {role} nodes"] = sum(len(node.scheduler.sessions) for node in nodes)
        left["tasks of processes that ended"] = sum(len(self.loop.tasks_of(name)) for name in self.expected_ends)
        self.add_totals()
        return {
            "sessions": self.tally.num_asked, "ended": self.tally.num_ended, "outcomes": dict(self.tally.outcomes),
            "tokens": self.tally.num_tokens, "events": dict(self.events), "messages": dict(self.frames),
            "at the relays": dict(self.totals), "wrong": self.tally.faults[:5], "num_wrong": len(self.tally.faults),
            "died": self.died, "left": left, "virtual_s": round(self.loop.time(), 1),
            "digest": self.log.hexdigest()[:16],
        }  # fmt: skip


def run_world(seed: int, shape: Shape) -> dict[str, Any]:
    """One run; its figures."""
    rng = random.Random(seed)
    network = Network(
        random.Random(rng.random()),
        delay_s=lambda process: random.Random(f"{seed} {process}").uniform(0.002, 0.08),
        jitter_s=0.01,
    )
    loop = VirtualLoop(network)
    try:
        world = World(loop, rng, shape)
        loop.run_until_complete(world.run())
        figures = world.figures()
    finally:
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60))
        loop.close()
    return figures
