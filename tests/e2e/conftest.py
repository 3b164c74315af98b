"""The whole pipeline as operating-system processes on loopback, with tiny random-weight checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.tiny import tiny_checkpoint
from relay.client import Delta, Finished, StreamClient
from scripts.processes import Part, Parts

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
    ) -> AsyncIterator[Pipeline]:
        parts = Parts(tmp_path, SECRET)
        try:
            relay = await parts.start("relay", ["-m", "relay", "--port", "0"])
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
