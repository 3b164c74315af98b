"""C079: when a node says that it is ready, and what becomes of it when its model's thread dies."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import node_draft.__main__
import node_verify.__main__
from engine.errors import EngineError
from engine.executor import ModelExecutor
from engine.model import CachedModel
from engine.scripted import ScriptedTarget
from engine.scripted_logits import hash_logits
from engine.tiny import tiny_checkpoint
from node_draft.config import DraftConfig
from node_verify.config import VerifyConfig
from node_verify.node import VerifyNode
from node_verify.scheduler import VerifyScheduler
from relay.client import Delta, StreamClient
from relay.config import RelayConfig
from relay.server import RelayServer
from scripts.simulation import ByteStream
from speculation.passes import VerifyPass, VerifyResult
from speculation.selection import BestFirst
from wire.aio.process import EXIT_FAILURE, run_main, run_node
from wire.aio.trace import TraceWriter
from wire.errors import WireError
from wire.messages import ModelIdentity

VOCAB = 64
SECRET = "a-secret-of-the-tests"


@pytest.mark.parametrize("role", ["draft", "verify"])
def test_c079_a_node_dials_the_relay_only_after_weights_warm_up_and_self_check(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It registers, and tells whoever started it that it is ready, over the link that it dials last."""
    order: list[str] = []
    main: Any = {"draft": node_draft.__main__, "verify": node_verify.__main__}[role]
    monkeypatch.setenv("FOREDRAFT_SECRET", SECRET)
    path = tiny_checkpoint(tmp_path / "m", seed=1)
    argv = ["--relay", "ws://127.0.0.1:1", "--model", str(path), "--max-length", "128"]
    config = {"draft": DraftConfig, "verify": VerifyConfig}[role].read(argv)
    warm_up, prepare_check = CachedModel.warm_up, "engine.prepare.self_check"

    def warmed(self: CachedModel) -> None:
        warm_up(self)
        order.append("warm-up")

    async def linked(*args: object, **kwargs: object) -> None:
        order.append("link")

    monkeypatch.setattr(CachedModel, "warm_up", warmed)
    monkeypatch.setattr(prepare_check, lambda model: order.append("self-check"))
    monkeypatch.setattr(main, "run_node", linked)
    assert run_main(role, lambda: main.serve(config)) == 0
    assert order == ["warm-up", "self-check", "link"]


class DyingTarget(ScriptedTarget):
    """Its thread ends in the fifth pass."""

    def verify(self, batch: Sequence[VerifyPass]) -> list[VerifyResult | Exception]:
        if len(self.passes) == 4:
            raise SystemExit(3)
        return super().verify(batch)


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [1, 2, 3]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [1, 2, 3]

    def decode_stream(self, prompt_ids: list[int]) -> ByteStream:
        return ByteStream()


def test_c079_when_the_models_thread_dies_the_node_ends_and_the_relay_knows_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process fails, its link closes, the client that was streaming is told, and the relay has no such node."""
    peers: list[list[str]] = []
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("before the first link"))
    received: list[int] = []
    told: list[BaseException] = []

    async def main() -> int:
        relay = RelayServer(RelayConfig(secret=SECRET, port=0, grace_s=0.2))
        await relay.start()
        stop_relay = asyncio.Event()
        serving = asyncio.create_task(relay.serve(stop_relay))
        url = f"ws://127.0.0.1:{relay.port}"
        linked = asyncio.Event()
        node = VerifyNode(
            scheduler=VerifyScheduler(
                selection=BestFirst(4), patience_s=0.0, num_slots=1, max_rows=4, vocab_size=VOCAB
            ),
            runner=DyingTarget(hash_logits(VOCAB, 1), num_slots=1, max_length=256, max_rows=4, vocab_size=VOCAB),
            executor=ModelExecutor("target"),
            tokenizer=Tokenizer(),
            context_length=256,
            vocab_size=VOCAB,
            stop_ids=(),
            trace=TraceWriter(None),
        )  # fmt: skip
        model = ModelIdentity(name="t", revision="1", tokenizer="ab" * 32, vocab_size=VOCAB, context_length=256)
        on_link = node.on_link

        def noted(link: Any) -> None:
            on_link(link)
            linked.set()

        node.on_link = noted  # type: ignore[method-assign]
        argv = ["--relay", url, "--model", "t"]
        config = VerifyConfig.read(argv)

        async def ask() -> None:
            await linked.wait()
            peers.append([peer.hello.role for peer in relay.router.peers.values()])
            async with StreamClient(url, secret=SECRET) as client:
                try:
                    async for event in client.stream(prompt="a", max_tokens=50):
                        if isinstance(event, Delta):
                            received.extend(event.tokens)
                except WireError as exc:
                    told.append(exc)
                peers.append([peer.hello.role for peer in relay.router.peers.values()])

        asking = asyncio.create_task(ask())
        try:
            await run_node(node, asyncio.Event(), config=config, role="verify", model=model)
        finally:
            await asyncio.wait_for(asking, 20)
            stop_relay.set()
            await serving
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREDRAFT_SECRET", SECRET)
        assert run_main("verify", main, EngineError) == EXIT_FAILURE
    assert len(received) == 4
    assert frozen == ["before the first link"]
    assert len(told) == 1
    assert peers == [["verify"], ["client"]]
    out, err = capfd.readouterr()
    assert json.loads(out)["ready"] is True
    assert "foredraft-verify: the model's thread has died: SystemExit(3)" in err
