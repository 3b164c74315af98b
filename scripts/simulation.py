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
)

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
    """One stretch of work of a model: `kind` is "verify", "draft" or "prefill"."""

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
    """One relay, one verify node, one draft node (or none) and any number of clients, under a virtual clock."""

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
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._verify_timer: float | None = None
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
        total = sum(max(0.0, min(b.end_s, end_s) - max(b.start_s, start_s)) for b in self.busy if b.kind == kind)
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
            case Done():
                self.answers[message.session].finish_reason = message.finish_reason
                self.answers[message.session].done = message
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
        self._feed_verify()

    def _at_draft(self, message: Message) -> None:
        self._perform_draft(self.draft.on_message(message, self.now))
        self._feed_draft()

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
        work = self.verify.next_work(self.now)
        if work is None:
            timer = self.verify.next_timer()
            if timer is not None and timer != self._verify_timer:
                self._verify_timer = timer
                self.at(timer, self._feed_verify)
            return
        if isinstance(work, verify.Prefill):
            self.target.prefill(work.slot, work.start, work.end)
            result: VerifyResult | Exception | None = None
            cost_s = self.times.prefill_token_s * (work.end - work.start)
            after_s = 0.0
            self.busy.append(Busy("prefill", work.session, self.now, self.now + cost_s, work.start))
        else:
            result = self.target.verify([work.request])[0]
            cost_s = self.times.verify_pass_s(len(work.request.tokens))
            after_s = self.times.verify_overhead_s
            self.busy.append(Busy("verify", work.session, self.now, self.now + cost_s, work.request.start))
            if isinstance(result, VerifyResult):
                result = replace(result, compute_s=cost_s)
        self.at(self.now + cost_s + after_s, lambda: self._verify_done(result))

    def _verify_done(self, result: VerifyResult | Exception | None) -> None:
        self._perform_verify(self.verify.on_work_done(result, self.now, self.times.rtt_s / 2))
        self._feed_verify()

    def _feed_draft(self) -> None:
        step, actions = self.draft.next_step(self.now)
        self._perform_draft(actions)
        if step is None:
            return
        assert self.draft.running is not None
        assert self.drafter is not None
        session, _ = self.draft.running
        cost_s = self.times.draft_prefill_token_s * max(0, len(step.commit) - 2)
        if step.nodes or step.expand_root:
            cost_s += self.times.draft_s + self.times.draft_row_s * max(0, len(step.nodes) - 1)
        result = self.drafter.step([step])[0]
        position = self.draft.tip_position(session)
        self.busy.append(Busy("draft", session, self.now, self.now + cost_s, position))
        if isinstance(result, DraftResult):
            result = replace(result, compute_s=cost_s)
        self.at(self.now + cost_s + self.times.draft_overhead_s, lambda: self._draft_done(result))

    def _draft_done(self, result: DraftResult | Exception) -> None:
        self._perform_draft(self.draft.on_step_done(result, self.now))
        self._feed_draft()
