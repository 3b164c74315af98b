"""Everything goes wrong for real: processes that are killed, stopped and restarted, over emulated links.

A relay, verify nodes and draft nodes run as they do in production, with a real (tiny) model; each node and the clients
reach the relay over a link emulator of their own. What the undisturbed target says to each question is asked first,
without speculation. Then clients ask without pause, and meanwhile nodes and the relay get SIGKILL or SIGTERM and come
back, links are cut (their emulator is killed), and links and nodes stand still (SIGSTOP) for a while.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.tiny import tiny_checkpoint
from relay.client import Delta, Finished, StreamClient
from scripts.chaos_answers import Expected, Question, Tally
from scripts.processes import Part, Parts, StartFailed
from wire.errors import WireError

SECRET = "a-secret-of-the-chaos"
VOCAB_SIZE = 320
MAX_LENGTH = 512
EVENTS = {
    "kill verify": 2.0, "kill draft": 2.0, "end verify": 1.0, "end draft": 1.0, "stop verify": 1.0, "stop draft": 1.0,
    "cut link": 5.0, "stop link": 4.0, "kill relay": 0.7, "end relay": 0.7,
}  # fmt: skip
"""What goes wrong, and how often beside the others: SIGKILL, SIGTERM, and SIGSTOP for a while."""
STANDSTILLS_S = (0.3, 1.0, 4.0, 15.0)
"""The longest is longer than a link's silence may be."""
RELAY_AWAY = ("no relay answers", "answered with HTTP 503", "turned us away")
"""What a node says that ends because the relay is not there, or is going."""
SETTLE_S = 30.0
"""After a start a process takes memory for a while: for its first sessions of each kind."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large and how bad the world is."""

    seconds: float = 300.0
    num_sessions: int = 100
    num_clients: int = 10
    num_questions: int = 100
    num_verify: int = 3
    num_draft: int = 2
    num_slots: int = 40
    event_every_s: float = 2.0
    delay_ms: float = 21.5


@dataclass
class Place:
    """A part that is started again whenever it ends, and its process of the moment."""

    name: str
    command: Sequence[str]
    part: Part | None = None
    since: float = 0.0
    expected: bool = False
    """Whether its end was our doing."""
    settled_mb: float = 0.0


@dataclass
class World:
    """All processes, and what has happened to them."""

    parts: Parts
    rng: random.Random
    shape: Shape
    places: dict[str, Place] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    died: list[str] = field(default_factory=list)
    keepers: list[asyncio.Task[None]] = field(default_factory=list)
    clients: list[StreamClient] = field(default_factory=list)
    lost_clients: list[str] = field(default_factory=list)
    ending: bool = False

    def of(self, role: str) -> list[Place]:
        """Places of a role that have a running process."""
        return [place for place in self.places.values() if place.name.startswith(role) and place.part is not None]

    async def keep(self, name: str, command: Sequence[str]) -> Place:
        """Start a part, and again whenever it has ended."""
        place = self.places[name] = Place(name, command)
        started = asyncio.Event()
        self.keepers.append(asyncio.create_task(self._keep(place, started), name=f"keep {name}"))
        await started.wait()
        return place

    async def _keep(self, place: Place, started: asyncio.Event) -> None:
        while not self.ending:
            try:
                part = await self.parts.start(f"{place.name}-{time.monotonic_ns()}", place.command)
            except StartFailed as exc:
                # A node whose relay is away just then ends with an error, and systemd starts it again.
                if not started.is_set() or not any(sign in str(exc) for sign in RELAY_AWAY):
                    self.died.append(f"{place.name}: {exc}")
                await asyncio.sleep(1.0)
                continue
            place.part, place.since, place.expected, place.settled_mb = part, time.monotonic(), False, 0.0
            started.set()
            code = await part.process.wait()
            place.part = None
            if not place.expected:
                tail = part.log.read_text(errors="replace")[-300:]
                self.died.append(f"{place.name} ended with {code} after {time.monotonic() - place.since:.1f} s: {tail}")
            await asyncio.sleep(self.rng.uniform(0.1, 3.0))

    async def start(self, target: Path, drafter: Path) -> None:
        """Start everything once."""
        command = ["-m", "relay", "--grace-s", "2", "--log-level", "warning", "--port"]
        relay = await self.keep("relay", [*command, "0"])
        assert relay.part is not None
        port = relay.part.port
        relay.command = [*command, str(port)]  # the same address next time
        roles = {"verify": self.shape.num_verify, "draft": self.shape.num_draft}
        names = [f"{role} {number}" for role, number in roles.items() for number in range(number)]
        for name in (*names, "clients"):
            delay_ms = 1.0 if name == "clients" else self.shape.delay_ms
            link = await self.keep(
                f"link of {name}",
                ["scripts/link_emulator.py", "--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{port}", "--delay-ms",
                 str(delay_ms), "--jitter-ms", "1"],
            )  # fmt: skip
            assert link.part is not None
            link.command = [word.replace(":0", f":{link.part.port}") for word in link.command]
        for name in names:
            role = name.split()[0]
            link = self.places[f"link of {name}"]
            assert link.part is not None
            # One drafter is always right, the others hardly ever.
            model = target if role == "verify" or name == "draft 0" else drafter
            flags = ["--max-waiting", "200"] if role == "verify" else ["--growth", "chain:2+8"]
            await self.keep(
                name,
                ["-m", f"node_{role}", "--relay", f"ws://127.0.0.1:{link.part.port}", "--model", str(model), "--name",
                 name, "--slots", str(self.shape.num_slots), "--max-length", str(MAX_LENGTH), "--grace-s", "5",
                 "--status-port", "0", "--log-level", "warning", *flags],
            )  # fmt: skip

    @property
    def url(self) -> str:
        """The relay's address for clients."""
        link = self.places["link of clients"].part
        assert link is not None
        return f"ws://127.0.0.1:{link.port}"

    async def references(self) -> list[tuple[Question, Expected]]:
        """Questions, and what the target alone says to them while nothing is wrong."""
        questions = [
            Question.draw(f"q{number}", self.rng, vocab_size=VOCAB_SIZE, max_prompt=100)
            for number in range(self.shape.num_questions)
        ]
        async with StreamClient(self.url, secret=SECRET) as client:
            expected = await asyncio.gather(*(self._alone(client, question) for question in questions))
        return list(zip(questions, expected, strict=True))

    async def _alone(self, client: StreamClient, question: Question) -> Expected:
        tokens: list[int] = []
        text = ""
        async for event in client.stream(
            prompt_ids=question.prompt, sampling=question.sampling, max_tokens=question.num_tokens, speculate=False
        ):
            match event:
                case Delta():
                    tokens += event.tokens
                    text += event.text
                case Finished():
                    return Expected(tuple(tokens), text, event.finish_reason)
        raise RuntimeError("a stream ended without its closing record")

    async def keep_asking(self, user: int, client: StreamClient, asked: list[Any], until: float) -> None:
        """One user, who asks one question after the other."""
        rng = random.Random(user)
        number = 0
        while time.monotonic() < until:
            question, expected = rng.choice(asked)
            number += 1
            await self.tally.ask(client, replace(question, name=f"{user}-{number}-{question.name}"), expected)
            if client._lost is not None:
                self.lost_clients.append(str(client._lost))
                return
            # Who is refused does not ask again at once.
            await asyncio.sleep(rng.uniform(0.0, 1.0))

    async def go_wrong(self) -> None:
        """One thing after the other goes wrong, for ever."""
        background: set[asyncio.Task[None]] = set()
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.shape.event_every_s))
            event = self.rng.choices(list(EVENTS), list(EVENTS.values()))[0]
            what, role = event.split()
            running = [place for place in self.of(role) if not place.expected]
            if not running or (role in ("verify", "draft") and len(running) < 2):
                continue  # the last of its kind may stay: what happens without one is told, and teaches little
            self.events[event] += 1
            place = self.rng.choice(running)
            task = asyncio.create_task(self.happen(what, place))
            background.add(task)
            task.add_done_callback(background.discard)

    async def happen(self, what: str, place: Place) -> None:
        """One thing goes wrong with one process."""
        part = place.part
        assert part is not None
        process = part.process
        with suppress(ProcessLookupError):
            match what:
                case "end":
                    place.expected = True
                    process.terminate()
                case "stop":
                    process.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(self.rng.choice(STANDSTILLS_S))
                    process.send_signal(signal.SIGCONT)
                case _:
                    place.expected = True
                    process.kill()

    def note_memory(self) -> None:
        """Take what a process has once it has settled as its level."""
        for place in self.places.values():
            if place.part is not None and not place.settled_mb and time.monotonic() - place.since > SETTLE_S:
                with suppress(OSError, StopIteration):
                    place.settled_mb = place.part.resident_mb()

    async def run(self) -> dict[str, Any]:
        """From the first question to the last answer; the figures."""
        shape = self.shape
        asked = await self.references()
        self.clients = [
            await StreamClient(self.url, secret=SECRET, recover_s=30.0).__aenter__() for _ in range(shape.num_clients)
        ]
        until = time.monotonic() + shape.seconds
        asking = [
            asyncio.create_task(self.keep_asking(user, self.clients[user % shape.num_clients], asked, until))
            for user in range(shape.num_sessions)
        ]
        wrong = asyncio.create_task(self.go_wrong())
        while time.monotonic() < until:
            await asyncio.sleep(1.0)
            self.note_memory()
        wrong.cancel()
        await asyncio.wait([wrong])
        for place in self.places.values():
            if place.part is not None:
                with suppress(ProcessLookupError):
                    place.part.process.send_signal(signal.SIGCONT)
        _, unfinished = await asyncio.wait(asking, timeout=120.0)
        for task in asking:
            if task.done() and task.exception() is not None:
                self.tally.faults.append(f"a user got {task.exception()!r}")
        for client in self.clients:
            with suppress(WireError):
                await client.__aexit__(None, None, None)
        # What nobody came back for is given up after the relay's keep time.
        await asyncio.sleep(35.0)
        left = await asyncio.to_thread(self.left)
        grown = {
            place.name: round(place.part.resident_mb() - place.settled_mb, 1)
            for place in self.places.values()
            if place.part is not None and place.settled_mb
        }
        return {
            "sessions": self.tally.num_asked, "outcomes": dict(self.tally.outcomes), "tokens": self.tally.num_tokens,
            "events": dict(self.events), "wrong": self.tally.faults[:5], "num_wrong": len(self.tally.faults),
            "hung": len(unfinished), "died": self.died, "clients that gave up": self.lost_clients, "left": left,
            "grown_mb": grown, "most_grown_mb": max(grown.values(), default=0.0),
        }  # fmt: skip

    def left(self) -> dict[str, float]:
        """Sessions that processes still count, by their own metrics."""
        counts: dict[str, float] = {}
        for place in self.places.values():
            if place.part is None or place.name.startswith("link"):
                continue
            port = place.part.ready.get("status_port", place.part.ready.get("port"))
            request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
            request.add_header("Authorization", f"Bearer {SECRET}")
            with urllib.request.urlopen(request, timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            line = next(line for line in lines if line.startswith("foredraft_sessions "))
            counts[place.name] = float(line.split()[1])
        return counts

    async def end(self) -> None:
        """End all processes."""
        self.ending = True
        for place in self.places.values():
            place.expected = True
        for keeper in self.keepers:
            keeper.cancel()
        await asyncio.gather(*self.keepers, return_exceptions=True)
        await self.parts.stop()


async def run_processes(seed: int, shape: Shape, folder: Path) -> dict[str, Any]:
    """One run; its figures. Logs stay in the folder."""
    target = tiny_checkpoint(folder / "target", seed=7, arch="llama")
    drafter = tiny_checkpoint(folder / "drafter", seed=8, arch="llama")
    world = World(Parts(folder, SECRET), random.Random(seed), shape)
    try:
        await world.start(target, drafter)
        figures = await world.run()
    finally:
        await world.end()
    (folder / "figures.json").write_text(json.dumps(figures, indent=1))
    return figures
