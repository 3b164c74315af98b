"""The pipeline under a virtual clock: the real schedulers and the real router, with modelled times.

Nothing here decides anything about tokens or schedules; it only moves time, by `Times`. The models are any runners that
take no time themselves (`engine/scripted.py`, `engine/replay.py`). `scripts/simulate.py` is the command.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.runner import DraftRunner, TargetRunner
from node_draft import session as draft
from node_draft.scheduler import DraftScheduler
from node_verify import session as verify
from node_verify.requests import make_request
from node_verify.scheduler import VerifyScheduler
from node_verify.text import AnswerText
from relay.router import ClosePeer, Forward, Router
from relay.router import Send as RouterSend
from speculation.costs import PassCosts
from speculation.growth import GrowthPolicy
from speculation.passes import DraftResult, VerifyResult
from speculation.selection import SelectionPolicy
from wire.codec import decode, encode
from wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Done,
    Error,
    Hello,
    Message,
    ModelIdentity,
    OpenSession,
    TextDelta,
    TokenLogprob,
    Waiting,
)

SETTLE_S = 1e-6
"""Given to frames that take no time, before a device that both models share is given its next work."""
Fault = Callable[[str, Message], Sequence[float]]
"""Given the leg ("draft>relay", "relay>verify", ...) and a message: the extra delays of its copies, none if lost."""


def no_fault(leg: str, message: Message) -> Sequence[float]:
    """Every frame arrives once, in time."""
    return (0.0,)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Modelled durations, in seconds.

    A pass of the target takes `verify_s`, and `verify_row_s` for each row beyond the `free_rows` first; a step of the
    drafter `draft_s`, and `draft_row_s` for each row beyond the first. The overheads come on top of each.
    """

    rtt_s: float = 0.086
    verify_s: float = 0.034
    verify_row_s: float = 0.0
    free_rows: int = 1
    verify_overhead_s: float = 0.0
    draft_s: float = 0.003
    draft_row_s: float = 0.0
    draft_overhead_s: float = 0.0
    prefill_token_s: float = 0.0
    draft_prefill_token_s: float = 0.0

    def verify_pass_s(self, num_rows: int) -> float:
        """The model's time of a pass."""
        return self.verify_s + self.verify_row_s * max(0, num_rows - self.free_rows)


@dataclass
class Busy:
    """One stretch of work of a model for one session, which others may share: "verify", "draft" or "prefill"."""

    kind: str
    session: str
    start_s: float
    end_s: float
    position: int
    """For verify the committed length it began with; for draft the position of the tokens it proposes."""


@dataclass
class Answer:
    """What the client of one session has received."""

    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    opened_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    done: Done | None = None

    @property
    def tokens_per_s(self) -> float:
        """From the request to the last token."""
        return len(self.tokens) / (self.token_times[-1] - self.opened_at)


class ByteStream:
    """A decode stream that shows each id as one character."""

    def push(self, token: int) -> str:
        return chr(0x100 + token)

    def flush(self) -> str:
        return ""


class Simulation:
    """One relay, one verify node, one draft node (or none) and any number of clients, under a virtual clock.

    Args:
        shared_device: both models run on one device, one after the other; for round trips of 0.
    """

    def __init__(
        self,
        *,
        target: TargetRunner,
        drafter: DraftRunner | None,
        times: Times,
        growth: GrowthPolicy,
        selection: SelectionPolicy,
        vocab_size: int,
        stop_ids: tuple[int, ...] = (),
        patience_s: float = 0.0,
        local: tuple[bool, bool] = (False, False),
        costs: PassCosts | None = None,
        gated: bool = True,
        fault: Fault = no_fault,
        shared_device: bool = False,
    ) -> None:
        self.now = 0.0
        self.times = times
        self.fault = fault
        self.target = target
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids
        self.verify = VerifyScheduler(
            selection=selection,
            patience_s=patience_s,
            num_slots=target.num_slots,
            max_rows=target.max_rows,
            vocab_size=vocab_size,
            local=local,
            costs=costs,
            gated=gated,
        )
        if drafter is not None:
            self.draft = DraftScheduler(
                growth=growth, num_slots=drafter.num_slots, max_length=drafter.max_length, max_rows=drafter.max_rows
            )
        self.router = Router()
        self.answers: dict[str, Answer] = {}
        self.busy: list[Busy] = []
        self.rounds: list[draft.FrameAnswered] = []
        self.num_frames = {"draft>relay": 0, "relay>verify": 0, "verify>relay": 0, "relay>draft": 0}
        self.on_done: Callable[[str], None] = lambda session: None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._verify_timer: float | None = None
        self.shared_device = shared_device and drafter is not None
        self._device_until = 0.0
        for role in ("verify", "draft", "client"):
            if role != "draft" or drafter is not None:
                self._join(role)

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do `what` at virtual time `when`."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), what))

    def open(self, request: OpenSession, *, at_s: float = 0.0) -> None:
        """A client sends a request at virtual time `at_s`."""
        self.answers[request.session] = Answer(opened_at=at_s)
        self.at(at_s, lambda: self._from_peer("client", request))

    def cancel(self, session: str, *, at_s: float) -> None:
        """The client cancels."""
        self.at(at_s, lambda: self._from_peer("client", Cancel(session=session)))

    def run(self, *, until_s: float = float("inf"), max_events: int = 5_000_000) -> None:
        """Run until nothing is left to happen, or until virtual time `until_s`."""
        for _ in range(max_events):
            if not self._events or self._events[0][0] > until_s:
                return
            self.now, _, what = heapq.heappop(self._events)
            what()
        raise RuntimeError(f"{max_events} events and no end: something makes no progress")

    def busy_share(self, kind: str, start_s: float, end_s: float) -> float:
        """Share of the time from start_s to end_s that the model of `kind` was at work."""
        # What several sessions share was done once.
        stretches = {(b.start_s, b.end_s) for b in self.busy if b.kind == kind}
        total = sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in stretches)
        return total / (end_s - start_s)

    def _join(self, role: str) -> None:
        model = None
        if role != "client":
            model = ModelIdentity(
                name=f"scripted-{role}",
                revision="1",
                tokenizer="bytes",
                vocab_size=self.vocab_size,
                context_length=self.target.max_length,
                stop_ids=self.stop_ids,
            )
        hello = Hello(protocol=PROTOCOL_VERSION, role=role, name=role, capacity=64, model=model)
        self._route(self.router.on_hello(role, hello, self.now))

    def _from_peer(self, peer: str, message: Message) -> None:
        """A message reaches the relay."""
        self._route(self.router.on_frame(peer, encode(message), self.now))

    def _route(self, actions: Sequence[object]) -> None:
        for action in actions:
            match action:
                case Forward(peer, frame):
                    self._travel(f"relay>{peer}", decode(frame), self._to_peer(peer))
                case RouterSend(peer, message):
                    self._travel(f"relay>{peer}", message, self._to_peer(peer))
                case ClosePeer(peer, _, reason):
                    raise RuntimeError(f"the relay closed {peer}: {reason}")

    def _to_peer(self, peer: str) -> Callable[[Message], None]:
        return {"verify": self._at_verify, "draft": self._at_draft, "client": self._at_client}[peer]

    def _travel(self, leg: str, message: Message, arrive: Callable[[Message], None]) -> None:
        """Half a round trip lies between the nodes, a quarter on each leg; clients sit beside the relay."""
        if leg in self.num_frames:
            self.num_frames[leg] += 1
        delay_s = 0.0 if "client" in leg else self.times.rtt_s / 4
        for extra_s in self.fault(leg, message):
            self.at(self.now + delay_s + extra_s, lambda: arrive(message))

    def _send(self, sender: str, message: Message) -> None:
        self._travel(f"{sender}>relay", message, lambda m: self._from_peer(sender, m))

    def _at_client(self, message: Message) -> None:
        match message:
            case TextDelta():
                answer = self.answers[message.session]
                if message.start != len(answer.tokens):
                    raise RuntimeError(f"delta at {message.start}, {len(answer.tokens)} tokens received")
                answer.tokens += message.tokens
                answer.sources += message.sources
                answer.text += message.text
                answer.logprobs += message.logprobs or ()
                answer.token_times += [self.now] * len(message.tokens)
            case Waiting():
                self.answers[message.session].places.append(message.place)
            case Done():
                self.answers[message.session].finish_reason = message.finish_reason
                self.answers[message.session].done = message
                self.on_done(message.session)
            case Error(session=str(session)):
                self.answers[session].error = f"{message.code}: {message.message}"

    def _at_verify(self, message: Message) -> None:
        if isinstance(message, OpenSession):
            self._perform_verify(self.verify.on_opening(message.session, self.now))
            request = make_request(
                message,
                prompt_ids=list(message.prompt_ids or ()),
                context_length=self.target.max_length,
                vocab_size=self.vocab_size,
                stop_ids=self.stop_ids,
            )
            text = AnswerText(ByteStream(), request.stop)
            self._perform_verify(self.verify.on_request(message.session, request, text, self.now))
        else:
            self._perform_verify(self.verify.on_message(message, self.now))
        self._feed_after(self._feed_verify)

    def _at_draft(self, message: Message) -> None:
        self._perform_draft(self.draft.on_message(message, self.now))
        self._feed_after(self._feed_draft)

    def _perform_verify(self, actions: Sequence[verify.Action]) -> None:
        for action in actions:
            match action:
                case verify.Send(message):
                    self._send("verify", message)
                case verify.OpenSlot(slot, sampling, tokens, num_prompt, stop_ids):
                    self.target.open(slot, sampling=sampling, tokens=tokens, num_prompt=num_prompt, stop_ids=stop_ids)
                case verify.CloseSlot(slot):
                    self.target.close(slot)

    def _perform_draft(self, actions: Sequence[draft.Action]) -> None:
        for action in actions:
            match action:
                case draft.Send(message):
                    self._send("draft", message)
                case draft.OpenSlot(slot, sampling, num_prompt):
                    assert self.drafter is not None
                    self.drafter.open(slot, sampling=sampling, num_prompt=num_prompt)
                case draft.CloseSlot(slot):
                    assert self.drafter is not None
                    self.drafter.close(slot)
                case draft.FrameAnswered():
                    self.rounds.append(action)

    def _feed_verify(self) -> None:
        if self._device_is_busy():
            return
        works = self.verify.next_work(self.now)
        if not works:
            timer = self.verify.next_timer()
            if timer is not None and timer != self._verify_timer:
                self._verify_timer = timer
                self.at(timer, self._feed_verify)
            return
        results: list[VerifyResult | Exception | None] = []
        passes = [work for work in works if isinstance(work, verify.Verify)]
        chunks = [work for work in works if isinstance(work, verify.Prefill)]
        for chunk in chunks:
            self.target.prefill(chunk.slot, chunk.start, chunk.end)
        results += [None] * len(chunks)
        cost_s = self.times.prefill_token_s * sum(chunk.end - chunk.start for chunk in chunks)
        after_s = 0.0
        if passes:
            cost_s = self.times.verify_pass_s(sum(len(each.request.tokens) for each in passes))
            after_s = self.times.verify_overhead_s
            results += [
                replace(result, compute_s=cost_s) if isinstance(result, VerifyResult) else result
                for result in self.target.verify([each.request for each in passes])
            ]
        end_s = self.now + cost_s
        self.busy += [Busy("prefill", chunk.session, self.now, end_s, chunk.start) for chunk in chunks]
        self.busy += [Busy("verify", each.session, self.now, end_s, each.request.start) for each in passes]
        self._device_until = end_s + after_s
        self.at(end_s + after_s, lambda: self._verify_done(results))

    def _verify_done(self, results: Sequence[VerifyResult | Exception | None]) -> None:
        self._perform_verify(self.verify.on_work_done(results, self.now, self.times.rtt_s / 2))
        self._feed_after(self._feed_verify)

    def _feed_draft(self) -> None:
        if self._device_is_busy():
            return
        parts, actions = self.draft.next_step(self.now)
        self._perform_draft(actions)
        if not parts:
            if self.shared_device:
                self.at(self.now + SETTLE_S, self._feed_verify)
            return
        assert self.drafter is not None
        num_rows = sum(len(part.nodes) + part.expand_root for part in parts)
        cost_s = self.times.draft_prefill_token_s * sum(max(0, len(part.commit) - 2) for part in parts)
        if num_rows:
            cost_s += self.times.draft_s + self.times.draft_row_s * (num_rows - 1)
        results = [
            replace(result, compute_s=cost_s) if isinstance(result, DraftResult) else result
            for result in self.drafter.step(parts)
        ]
        end_s = self.now + cost_s
        self.busy += [
            Busy("draft", session.id, self.now, end_s, session.tip_position) for session in self.draft.running
        ]
        self._device_until = end_s + self.times.draft_overhead_s
        self.at(end_s + self.times.draft_overhead_s, lambda: self._draft_done(results))

    def _draft_done(self, results: Sequence[DraftResult | Exception]) -> None:
        self._perform_draft(self.draft.on_step_done(results, self.now))
        self._feed_after(self._feed_draft)

    def _device_is_busy(self) -> bool:
        """Whether the one device that both models share is at work; where each has its own, its scheduler knows."""
        return self.shared_device and self.now < self._device_until

    def _feed_after(self, feed: Callable[[], None]) -> None:
        """Something has happened that a model may go on from. On a shared device drafts come first, and before them all
        frames that take no time: a server that does both drafts for all its sessions, then verifies for all."""
        if not self.shared_device:
            feed()
            return
        self.at(self.now + SETTLE_S, self._feed_draft)
