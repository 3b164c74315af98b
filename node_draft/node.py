"""The draft node's shell: performs what the scheduler decides, over the relay link and the model's thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from engine.executor import ModelExecutor
from engine.runner import DraftRunner
from engine.slots import together
from node_draft.scheduler import DraftScheduler
from node_draft.session import Action, CloseSlot, FrameAnswered, OpenSlot, Send
from speculation.ledger import PARTS, Round
from speculation.passes import DraftResult, DraftStep
from wire.aio.shell import NodeShell, SlotCall
from wire.aio.trace import TraceWriter
from wire.messages import AppliedRound
from wire.metrics import Family, Histogram, histograms, labelled

log = logging.getLogger(__name__)


class DraftNode(NodeShell):
    """Runs one draft model for the sessions that the relay pairs it with."""

    def __init__(
        self, *, scheduler: DraftScheduler, runner: DraftRunner, executor: ModelExecutor, trace: TraceWriter
    ) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.runner = runner
        self.executor = executor
        self.trace = trace
        self._parts = {name: Histogram() for name in (*PARTS, "total")}

    def families(self) -> list[Family]:
        """The metrics: what was drafted, and where the time of the rounds went."""
        counts = asdict(self.scheduler.counters)
        return [
            *super().families(),
            labelled("counter", "foredraft_draft_total", "What the drafter did.", "what",
                     {name.removeprefix("num_"): count for name, count in counts.items()}),
            histograms("foredraft_round_seconds", "The ledger of the rounds, by part.", "part", self._parts),
        ]  # fmt: skip

    def on_link_lost(self) -> None:
        """The relay has unpaired us: whatever we drafted goes nowhere."""
        self.link = None
        for session_id in list(self.scheduler.sessions):
            self._perform(self.scheduler.on_release(session_id), self.now())

    def on_frame(self, frame: bytes, now: float) -> None:
        """Handle one frame from the relay."""
        message = self.read(frame)
        if message is None:
            return
        self._perform(self.scheduler.on_message(message, now), now)

    async def feed_model(self) -> None:
        """Give the model steps as long as there are any; raises `EngineDead` if its thread dies.

        What a step brought is sent while the model is at the next one already.
        """
        to_tell: list[Action] = []
        while True:
            parts, actions = self.scheduler.next_step(self.now())
            calls = self.take_slot_calls()
            began = self.now()
            done = self.executor.submit(self._run, calls, parts) if parts or calls else None
            self._tell([*to_tell, *actions], began)
            to_tell = []
            if done is not None:
                results = await self.executor.answer(done)
                if parts:
                    now = self.now()
                    self._trace_step(parts, results, began, now)
                    to_tell = self.scheduler.on_step_done(results, now)
                    self._call_for(to_tell)
                continue
            self.wake.clear()
            await self.wake.wait()

    def _run(self, calls: list[SlotCall], parts: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        """In the model's thread: open and free slots, then do the step. A failure is its session's, if it can be."""
        self.call_all(calls)
        failures = [self.failure(part.slot) for part in parts]
        sound = [part for part, failure in zip(parts, failures, strict=True) if failure is None]
        done = iter(together(sound, self.runner.step))
        return [failure or next(done) for failure in failures]

    def _perform(self, actions: list[Action], arrived_at: float) -> None:
        self._call_for(actions)
        self._tell(actions, arrived_at)

    def _call_for(self, actions: list[Action]) -> None:
        """Have slots opened and freed before the model's next step."""
        for action in actions:
            match action:
                case OpenSlot(slot, sampling, num_prompt):
                    call = partial(self.runner.open, slot, sampling=sampling, num_prompt=num_prompt)
                    self.call_before_next_work(slot, call)
                case CloseSlot(slot):
                    self.call_before_next_work(slot, partial(self.runner.close, slot))

    def _tell(self, actions: list[Action], arrived_at: float) -> None:
        """Send what is to be sent, and close the rounds that were answered."""
        for action in actions:
            match action:
                case Send():
                    self.send(action.message)
                case FrameAnswered():
                    self._trace_round(action, arrived_at)
        self.settle(len(self.scheduler.sessions))

    def _trace_step(
        self, parts: Sequence[DraftStep], results: Sequence[DraftResult | Exception], began: float, now: float
    ) -> None:
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, DraftResult) and self.trace.enabled:
                self.trace.write(
                    "draft", now, began=began, slot=part.slot, num_commit=len(part.commit),
                    num_nodes=len(part.nodes), compute_s=result.compute_s, overhead_s=result.overhead_s,
                    step_sessions=len(parts),
                )  # fmt: skip

    def _trace_round(self, answered: FrameAnswered, arrived_at: float) -> None:
        """Close a frame's round: the acceptance that answered it arrived at `arrived_at` and is applied now."""
        if self.link is None:
            return
        now = self.now()
        finished = Round(
            started_at=answered.started_at,
            sent_at=answered.sent_at,
            received_at=arrived_at,
            applied_at=now,
            draft_s=answered.draft_s,
            timing=answered.timing,
            relay_down_s=answered.acceptance.relay_s,
            draft_hop_rtt_s=self.link.rtt_s or 0.0,
            verify_hop_rtt_s=answered.acceptance.hop_rtt_s,
        )
        over = AppliedRound(
            frame=answered.timing.frame,
            relay_s=answered.acceptance.relay_s,
            apply_s=round(finished.applied_at - finished.received_at, 6),
            round_s=round(finished.total_s, 6),
        )
        self.scheduler.on_round_over(answered.session, answered.acceptance.epoch, over)
        self._parts["total"].observe(finished.total_s)
        for name, value in finished.parts_s().items():
            self._parts[name].observe(max(0.0, value))
        if self.trace.enabled:
            self.trace.write("round", now, session=answered.session, **asdict(finished))
