"""The whole pipeline as operating-system processes on loopback, with tiny random-weight checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.bytes import EOS, ByteTokenizer
from engine.executor import ModelExecutor
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import LogitsFn
from engine.tiny import tiny_checkpoint
from node_draft.node import DraftNode
from node_draft.scheduler import DraftScheduler
from node_verify.node import VerifyNode
from node_verify.scheduler import VerifyScheduler
from relay.api import Gateway
from relay.client import Delta, Finished, StreamClient
from relay.config import RelayConfig
from relay.credentials import Credentials
from relay.server import RelayServer
from scripts.processes import Part, Parts
from speculation.growth import parse_growth
from speculation.selection import BestFirst
from wire.aio.dialer import keep_linked
from wire.aio.trace import TraceWriter
from wire.messages import PROTOCOL_VERSION, Hello, ModelIdentity

SECRET = "correct horse battery staple".replace(" ", "-")


@dataclass
class Pipeline:
    """Running processes and how to ask them."""

    parts: Parts
    by_name: dict[str, Part]

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.by_name['relay'].port}"

    def client(self) -> StreamClient:
        return StreamClient(self.url, secret=SECRET)

    async def ask(self, client: StreamClient, **request: Any) -> tuple[list[int], str, Finished]:
        """Tokens, text and closing record of one request."""
        tokens: list[int] = []
        text = ""
        async for event in client.stream(**request):
            match event:
                case Delta():
                    tokens += event.tokens
                    text += event.text
                case Finished():
                    return tokens, text, event
        raise AssertionError("the stream ended without Finished")


StartPipeline = Callable[..., AbstractAsyncContextManager[Pipeline]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny target and a tiny drafter with the same tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        "target": tiny_checkpoint(folder / "target", seed=7, arch="llama"),
        "drafter": tiny_checkpoint(folder / "drafter", seed=8, arch="llama"),
    }


@pytest.fixture
def start_pipeline(tmp_path: Path) -> StartPipeline:
    """Start relay, link emulators and nodes; all are gone at the end."""

    @asynccontextmanager
    async def start(
        *,
        target: Path,
        drafter: Path | None,
        rtt_ms: float = 0.0,
        growth: str = "chain:2+14",
        verify_flags: tuple[str, ...] = (),
        draft_flags: tuple[str, ...] = (),
        emulator_flags: tuple[str, ...] = (),
        relay_flags: tuple[str, ...] = (),
    ) -> AsyncIterator[Pipeline]:
        parts = Parts(tmp_path, SECRET)
        try:
            relay = await parts.start("relay", ["-m", "relay", "--port", "0", *relay_flags])
            by_name = {"relay": relay}

            async def node(role: str, model: Path, *flags: str) -> None:
                port = relay.port
                if rtt_ms or emulator_flags:
                    link = await parts.start(
                        f"link-{role}",
                        ["scripts/link_emulator.py", "--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{relay.port}",
                         "--delay-ms", str(rtt_ms / 4), *emulator_flags],
                    )  # fmt: skip
                    by_name[f"link-{role}"] = link
                    port = link.port
                command = ["-m", f"node_{role}", "--relay", f"ws://127.0.0.1:{port}", "--model", str(model),
                           "--max-length", "256", "--trace", str(tmp_path / f"{role}.jsonl"), *flags]  # fmt: skip
                by_name[role] = await parts.start(role, command)

            nodes = [node("verify", target, *verify_flags)]
            if drafter is not None:
                nodes.append(node("draft", drafter, "--growth", growth, *draft_flags))
            await asyncio.gather(*nodes)
            yield Pipeline(parts, by_name)
        finally:
            codes = await parts.stop()
        assert set(codes.values()) <= {0}, codes

    return start


ANSWER = "a green apple pie, with cream"
MARK = b": "
"""What prompts end with here: the answer's tokens are counted from there."""


def says(text: str, *, after: str = "", sharpness: float = 40.0) -> LogitsFn:
    """A byte-level target that answers every prompt ending in MARK with `text`, then ends.

    Args:
        after: text that follows the end token, if the answer goes on past it.
    """
    ids = [*text.encode(), EOS, *after.encode()]

    def logits(prefix: tuple[int, ...]) -> list[float]:
        start = bytes(token if token < EOS else 0 for token in prefix).rindex(MARK) + len(MARK)
        row = [0.0] * (EOS + 1)
        place = len(prefix) - start
        row[ids[place] if place < len(ids) else EOS] = sharpness
        return row

    return logits


@dataclass
class InProcess:
    """A relay with its gateway, one verify and one draft node, in this very process on loopback."""

    server: RelayServer
    gateway: Gateway
    verify: VerifyNode
    draft: DraftNode | None
    target: ScriptedTarget

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.server.port}"

    def open_slots(self) -> tuple[int, int]:
        """Sessions that hold a cache slot or wait for one, at the verify and at the draft node."""
        drafting = 0
        if self.draft is not None:
            drafting = len(self.draft.scheduler.sessions) + self.draft.runner._slots.num_open  # type: ignore[attr-defined]
        return len(self.verify.scheduler.sessions) + self.target._slots.num_open, drafting

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that happens in this process."""
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110  # what is waited for is not ours to instrument
                await asyncio.sleep(0.001)


@pytest.fixture
async def in_process() -> AsyncIterator[Callable[..., Awaitable[InProcess]]]:
    """Starts a pipeline of scripted models with a gateway; it is drained at the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(
            target: LogitsFn,
            *,
            drafter: LogitsFn | None = None,
            growth: str = "chain:4",
            num_slots: int = 4,
            max_length: int = 512,
            pass_s: float = 0.0,
            stop_ids: tuple[int, ...] = (EOS,),
            admin_secret: str = SECRET,
            spare: bool = False,
        ) -> InProcess:
            server = RelayServer(RelayConfig(secret=SECRET, port=0, grace_s=0.2, takeover_wait_s=0.0))
            await server.start()
            stop = asyncio.Event()
            serving = asyncio.create_task(server.serve(stop))
            if admin_secret != SECRET:
                server.access.credentials = Credentials.from_toml(
                    f'[[credential]]\nname = "all"\nroles = ["node", "client"]\nsecrets = ["{SECRET}"]\n'
                    f'[[credential]]\nname = "admin"\nroles = ["admin"]\nsecrets = ["{admin_secret}"]\n'
                )
            gateway = Gateway(server)
            await gateway.start("127.0.0.1", 0)

            async def end() -> None:
                stop.set()
                await serving
                await gateway.close()

            stack.push_async_callback(end)
            tokenizer = ByteTokenizer()
            delay_s = (lambda rows: pass_s) if pass_s else None

            def verify_node() -> tuple[VerifyNode, ScriptedTarget]:
                scripted = ScriptedTarget(
                    target, num_slots=num_slots, max_length=max_length, max_rows=8, vocab_size=257, delay_s=delay_s
                )
                node = VerifyNode(
                    scheduler=VerifyScheduler(
                        selection=BestFirst(8), patience_s=0.0, num_slots=num_slots, max_rows=8, vocab_size=257
                    ),
                    runner=scripted, executor=ModelExecutor("target"), tokenizer=tokenizer,
                    context_length=max_length, vocab_size=257, stop_ids=stop_ids, trace=TraceWriter(None),
                )  # fmt: skip
                return node, scripted

            verify, scripted = verify_node()
            draft = None
            if drafter is not None:
                draft = DraftNode(
                    scheduler=DraftScheduler(
                        growth=parse_growth(growth), num_slots=num_slots, max_length=max_length, max_rows=64
                    ),
                    runner=ScriptedDrafter(
                        drafter, num_slots=num_slots, max_length=max_length, max_rows=64, vocab_size=257
                    ),
                    executor=ModelExecutor("drafter"), trace=TraceWriter(None),
                )  # fmt: skip

            async def run(node: VerifyNode | DraftNode, role: str, name: str = "") -> None:
                model = ModelIdentity(
                    name=f"scripted-{role}", revision="1", tokenizer=tokenizer.fingerprint, vocab_size=257,
                    context_length=max_length, stop_ids=stop_ids,
                )  # fmt: skip
                hello = Hello(
                    protocol=PROTOCOL_VERSION, role=role, name=name or role, region=f"{role}-land", capacity=num_slots,
                    model=model,
                )  # fmt: skip
                linked = asyncio.Event()
                linking = keep_linked(
                    node, url=f"ws://127.0.0.1:{server.port}", secret=SECRET, hello=hello, ssl_context=None,
                    on_first_link=linked.set,
                )  # fmt: skip
                tasks = [asyncio.create_task(linking), asyncio.create_task(node.feed_model())]

                async def end() -> None:
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)
                    await node.executor.close()

                stack.push_async_callback(end)
                await linked.wait()

            await run(verify, "verify")
            if spare:
                await run(verify_node()[0], "verify", "spare")
            if draft is not None:
                await run(draft, "draft")
            return InProcess(server, gateway, verify, draft, scripted)

        yield start
