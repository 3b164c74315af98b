"""What the virtual chaos is made of: nodes of scripted models, and what stands between them and their links."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.bytes import ByteTokenizer
from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import agreeing, hash_logits
from engine.scripted_logits import reference as reference_of
from node_draft.node import DraftNode
from node_draft.scheduler import DraftScheduler
from node_verify.node import VerifyNode
from node_verify.scheduler import VerifyScheduler
from relay.client import StreamClient
from scripts.chaos_answers import Expected, Question
from scripts.virtual_loop import VirtualExecutor
from speculation.growth import parse_growth
from speculation.passes import DraftResult, DraftStep, VerifyPass, VerifyResult
from speculation.selection import BestFirst
from wire.aio.link import Link
from wire.aio.trace import TraceWriter
from wire.codec import peek
from wire.messages import Acceptance, Candidates, ModelIdentity, Prefix, Resync

VOCAB_SIZE = 128
MAX_LENGTH = 512
STOP = 0
PASS_S, STEP_S = 0.03, 0.004
"""Of the target and of the drafter, in the mean."""
PASS_ROWS, STEP_ROWS = 32, 64
TARGET = hash_logits(VOCAB_SIZE, 3)
MODEL = ModelIdentity(name="m", revision="1", tokenizer="ab" * 32, vocab_size=VOCAB_SIZE, context_length=MAX_LENGTH)
DRAFTING = {Candidates.type, Acceptance.type, Prefix.type, Resync.type}
"""Types that may be lost, doubled and overtaken: they name positions, and an answer does without them. A prefix may be
lost, but not come late: it opens a session at the draft node, and the word that it is over must come behind it."""


@dataclass(frozen=True, kw_only=True)
class Unreliability:
    """Shares of the messages about candidates that are lost, doubled and overtaken."""

    loss: float = 0.01
    doubling: float = 0.02
    overtaking: float = 0.05


def verify_node(rng: random.Random, num_slots: int) -> VerifyNode:
    """A node of the scripted target."""
    return VerifyNode(
        scheduler=VerifyScheduler(
            selection=BestFirst(PASS_ROWS), patience_s=0.0, num_slots=num_slots, max_rows=PASS_ROWS,
            vocab_size=VOCAB_SIZE, local=(True, True),
        ),
        runner=VirtualTarget(
            TARGET, num_slots=num_slots, max_length=MAX_LENGTH, max_rows=PASS_ROWS, vocab_size=VOCAB_SIZE
        ),
        executor=VirtualExecutor(lambda: PASS_S * rng.uniform(0.7, 1.5)), tokenizer=ByteTokenizer(),
        context_length=MAX_LENGTH, vocab_size=VOCAB_SIZE, stop_ids=(STOP,), trace=TraceWriter(None),
    )  # fmt: skip


def draft_node(rng: random.Random, num_slots: int) -> DraftNode:
    """A node of a scripted drafter, which is right four times in five."""
    return DraftNode(
        scheduler=DraftScheduler(
            growth=parse_growth("chain:2+8"), num_slots=num_slots, max_length=MAX_LENGTH, max_rows=STEP_ROWS
        ),
        runner=VirtualDrafter(
            agreeing(TARGET, 0.8, 1), num_slots=num_slots, max_length=MAX_LENGTH, max_rows=STEP_ROWS,
            vocab_size=VOCAB_SIZE,
        ),
        executor=VirtualExecutor(lambda: STEP_S * rng.uniform(0.7, 1.5)), trace=TraceWriter(None),
    )  # fmt: skip


def reference(question: Question) -> Expected:
    """The target alone."""
    limit = min(question.num_tokens, MAX_LENGTH - len(question.prompt))
    tokens = reference_of(TARGET, question.sampling, question.prompt, limit, (STOP,))
    stopped = tokens[-1] == STOP
    return Expected(tokens, ByteTokenizer().decode(tokens), "stop" if stopped else "length")


class VirtualTarget(ScriptedTarget):
    """One that does not tell how long it took in real time, which is another in each run."""

    def verify(self, batch: Sequence[VerifyPass]) -> list[VerifyResult | Exception]:
        """See `TargetRunner.verify`."""
        results = super().verify(batch)
        return [each if isinstance(each, Exception) else replace(each, compute_s=PASS_S) for each in results]


class VirtualDrafter(ScriptedDrafter):
    """The same of the drafter."""

    def step(self, batch: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        """See `DraftRunner.step`."""
        results = super().step(batch)
        return [each if isinstance(each, Exception) else replace(each, compute_s=STEP_S) for each in results]


class Unreliable:
    """Stands between a node and its link: loses, doubles and delays messages about candidates."""

    def __init__(
        self, node: VerifyNode | DraftNode, rng: random.Random, shares: Unreliability, counts: Counter[str]
    ) -> None:
        self.node = node
        self.rng = rng
        self.shares = shares
        self.counts = counts

    def on_link(self, link: Link) -> None:
        """See `LinkUser`."""
        self.node.on_link(link)

    def on_link_lost(self) -> None:
        """See `LinkUser`."""
        self.node.on_link_lost()

    def on_frame(self, frame: bytes, now: float) -> None:
        """See `LinkUser`."""
        shares, loop = self.shares, asyncio.get_running_loop()
        if peek(frame)[0] not in DRAFTING:
            self.node.on_frame(frame, now)
            return
        fate = self.rng.random()
        if fate < shares.loss:
            self.counts["lost"] += 1
        elif peek(frame)[0] == Prefix.type:
            self.node.on_frame(frame, now)
        elif fate < shares.loss + shares.doubling:
            self.counts["doubled"] += 1
            self.node.on_frame(frame, now)
            loop.call_later(self.rng.uniform(0.0, 0.5), lambda: self.node.on_frame(frame, loop.time()))
        elif fate < shares.loss + shares.doubling + shares.overtaking:
            self.counts["overtaken"] += 1
            loop.call_later(self.rng.uniform(0.0, 0.3), lambda: self.node.on_frame(frame, loop.time()))
        else:
            self.counts["in order"] += 1
            self.node.on_frame(frame, now)


class Doubling(StreamClient):
    """A client that hears one frame in fifty twice."""

    def _on_frame(self, kind: str, session: str | None, frame: bytes, now: float) -> None:
        super()._on_frame(kind, session, frame, now)
        if self._rng.random() < 0.02:
            super()._on_frame(kind, session, frame, now)
