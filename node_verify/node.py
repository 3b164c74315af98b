"""The verify node's shell: performs what the scheduler decides, over the relay link and the model's thread.

Two tasks: one keeps the link up and hands frames to the scheduler, one feeds the model. The model never runs on the
event loop. When the link is lost the relay has already told the clients; sessions end here and new ones may come
over the next link.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from engine.executor import ModelExecutor
from engine.runner import TargetRunner
from engine.slots import one_by_one, together
from node_verify.drafting import refuse_drafter
from node_verify.requests import Request, RequestRefused, check_ids, make_request
from node_verify.scheduler import VerifyScheduler
from node_verify.session import (
    Action,
    CloseSlot,
    OpenSlot,
    Prefill,
    Send,
    Session,
    SessionEnded,
    Verify,
    Work,
    work_slot,
)
from node_verify.text import AnswerText, DecodeStream, answer_text, spelled
from speculation.passes import VerifyResult
from wire.aio.shell import NodeShell, SlotCall
from wire.aio.trace import TraceWriter
from wire.codec import session_of
from wire.errors import MAX_REASON_CHARS, ProtocolError, in_words
from wire.messages import Cancel, ChatMessage, Error, OpenSession, TextDelta, Tokenize, Tokenized
from wire.metrics import Family, counter, gauge, labelled

log = logging.getLogger(__name__)
AVERAGES = ("acceptance_rate", "mean_acceptance_length", "acceptance_at_", "round_")
"""Names in a session's report that do not add up."""


class Tokenizer(Protocol):
    """What the node needs of a tokenizer; `engine/tokenizer.py` supplies it."""

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def special_id(self, text: str) -> int | None: ...

    def decode_stream(self, prompt_ids: list[int]) -> DecodeStream: ...


class VerifyNode(NodeShell):
    """Runs one target model for the sessions that the relay sends.

    Args:
        context_length, vocab_size, stop_ids: of the model; they bound requests.
    """

    def __init__(
        self,
        *,
        scheduler: VerifyScheduler,
        runner: TargetRunner,
        executor: ModelExecutor,
        tokenizer: Tokenizer,
        context_length: int,
        vocab_size: int,
        stop_ids: tuple[int, ...],
        trace: TraceWriter,
    ) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.runner = runner
        self.executor = executor
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids
        self.trace = trace
        self._ended: Counter[str] = Counter()
        self._opening: set[asyncio.Task[None]] = set()

    def on_link_lost(self) -> None:
        """The relay told the clients; their sessions end here too."""
        self.link = None
        now = self.now()
        # The relay may send a session again over the next link, before its prompt is tokenized for this one.
        for task in self._opening:
            task.cancel()
        for session_id in list(self.scheduler.sessions):
            cancel = Cancel(session=session_id, reason="client gone")
            self._perform(self.scheduler.on_message(cancel, now))

    def on_frame(self, frame: bytes, now: float) -> None:
        """Handle one frame from the relay."""
        message = self.read(frame)
        if message is None:
            session = self.scheduler.sessions.get(session_of(frame) or "")
            if session is not None:
                # Of what the relay does not read, only the draft node's frames reach us.
                self._perform([*refuse_drafter(session, "a frame cannot be read")])
            return
        if isinstance(message, OpenSession):
            if message.session in self.scheduler.sessions:
                # Names are unique at the relay, so this is the same request, which may come twice.
                self.scheduler.num_stale_messages += 1
                return
            if self.draining:
                self.send(Error(session=message.session, code="draining", message="the verify node is draining"))
                return
            actions = self.scheduler.on_opening(message.session, now)
            self._perform(actions)
            if not actions:
                task = asyncio.create_task(
                    self._open(message, self.scheduler.sessions[message.session]), name=f"open {message.session}"
                )
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
        elif isinstance(message, Tokenize):
            task = asyncio.create_task(self._tokenize(message), name=f"tokenize {message.session}")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._perform(self.scheduler.on_message(message, now))

    async def feed_model(self) -> None:
        """Give the model work as long as there is any; raises `EngineDead` if its thread dies.

        What a piece of work brought is told while the model is at the next one already.
        """
        to_tell: list[Action] = []
        while True:
            works = self.scheduler.next_work(self.now())
            calls = self.take_slot_calls()
            done = self.executor.submit(self._run, calls, works) if works or calls else None
            self._tell(to_tell)
            to_tell = []
            if done is not None:
                results = await self.executor.answer(done)
                if works:
                    now = self.now()
                    hop_rtt_s = (self.link.rtt_s or 0.0) if self.link else 0.0
                    if self.trace.enabled:
                        self._trace_pass(works, results, now)
                    to_tell = self.scheduler.on_work_done(results, now, hop_rtt_s)
                    self._call_for(to_tell)
                continue
            self.wake.clear()
            try:
                async with asyncio.timeout_at(self.scheduler.next_timer()):
                    await self.wake.wait()
            except TimeoutError:
                continue

    def families(self) -> list[Family]:
        """The metrics: what all sessions that have ended did, by the names of `SessionStats.report`."""
        totals = {name: value for name, value in self._ended.items() if not name.startswith(AVERAGES)}
        drafted, rounds = self._ended["drafted"], self._ended["rounds"]
        accepted = self._ended["accepted"]
        return [
            *super().families(),
            labelled("counter", "foredraft_verify_total", "Counts and seconds of all ended sessions.", "what", totals),
            gauge("foredraft_acceptance_rate", "Accepted of drafted places.", accepted / drafted if drafted else 0.0),
            gauge(
                "foredraft_mean_acceptance_length", "1 + accepted over rounds.", 1 + accepted / rounds if rounds else 1
            ),
            counter(
                "foredraft_stale_messages_total", "Messages that came too late.", self.scheduler.num_stale_messages
            ),
        ]

    def _run(self, calls: list[SlotCall], works: Sequence[Work]) -> list[VerifyResult | Exception | None]:
        """In the model's thread: open and free slots, then do the work. A failure is its session's, if it can be."""
        self.call_all(calls)
        failures = [self.failure(work_slot(work)) for work in works]
        sound = [work for work, failure in zip(works, failures, strict=True) if failure is None]
        done: list[VerifyResult | Exception | None] = []
        done += one_by_one([work for work in sound if isinstance(work, Prefill)], self._prefill)
        done += together([work.request for work in sound if isinstance(work, Verify)], self.runner.verify)
        rest = iter(done)
        return [failure or next(rest) for failure in failures]

    def _prefill(self, chunk: Prefill) -> None:
        self.runner.prefill(chunk.slot, chunk.start, chunk.end)

    async def _open(self, message: OpenSession, session: Session) -> None:
        """Tokenize off the loop, then tell the scheduler, if the session is still there."""
        refused = partial(self.scheduler.on_refused, message.session)
        outcome: Callable[[], list[Action]]
        try:
            prompt_ids = await asyncio.to_thread(self._encode, message)
            request = make_request(
                message,
                prompt_ids=prompt_ids,
                context_length=min(self.context_length, self.runner.max_length),
                vocab_size=self.vocab_size,
                stop_ids=self.stop_ids,
                # A special token is hidden from the text, so a stop string that spells one is looked for among the ids.
                asked_stop_ids=[i for text in message.stop if (i := self.tokenizer.special_id(text)) is not None],
            )
            text = await asyncio.to_thread(self._answer_text, request)
        except RequestRefused as exc:
            outcome = partial(refused, exc.code, str(exc))
        except Exception as exc:
            log.exception("session %s: the request could not be read", message.session)
            outcome = partial(refused, "bad_request", in_words(exc))
        else:
            outcome = partial(self.scheduler.on_request, message.session, request, text, self.now())
        # It may have been cancelled meanwhile, and another one of its name opened.
        if self.scheduler.sessions.get(message.session) is session:
            self._perform(outcome())

    async def _tokenize(self, message: Tokenize) -> None:
        """Answer with ids and text; no slot and no model is needed for it."""
        try:
            tokens = await asyncio.to_thread(self._encode, message)
            check_ids("tokens", tokens, self.vocab_size)
            text = await asyncio.to_thread(self.tokenizer.decode, tokens)
            length = min(self.context_length, self.runner.max_length)
            self.send(Tokenized(session=message.session, tokens=tuple(tokens), text=text, context_length=length))
        except RequestRefused as exc:
            self.send(Error(session=message.session, code=exc.code, message=str(exc)))
        except ProtocolError as exc:
            # Many ids or much text: asked for in parts, they can be had.
            self.send(Error(session=message.session, code="bad_request", message=f"too much for one answer: {exc}"))
        except Exception as exc:
            log.exception("session %s: could not be tokenized", message.session)
            self.send(Error(session=message.session, code="bad_request", message=in_words(exc)))

    def _encode(self, message: OpenSession | Tokenize) -> list[int]:
        if message.prompt_ids is not None:
            return list(message.prompt_ids)
        if message.prompt is not None:
            return self.tokenizer.encode(message.prompt)
        turns: tuple[ChatMessage, ...] = message.messages or ()
        try:
            return self.tokenizer.encode_chat([{"role": turn.role, "content": turn.content} for turn in turns])
        except ValueError as exc:
            # No template, or one that refuses them and may quote them at length.
            raise RequestRefused("bad_request", str(exc)[:MAX_REASON_CHARS]) from exc

    def _answer_text(self, request: Request) -> AnswerText:
        return answer_text(request, self.tokenizer.decode_stream(list(request.prompt_ids)))

    def _perform(self, actions: list[Action]) -> None:
        self._call_for(actions)
        self._tell(actions)

    def _call_for(self, actions: list[Action]) -> None:
        """Have slots opened and freed before the model's next work."""
        for action in actions:
            match action:
                case OpenSlot(slot, sampling, tokens, num_prompt, stop_ids):
                    call = partial(
                        self.runner.open,
                        slot,
                        sampling=sampling,
                        tokens=tokens,
                        num_prompt=num_prompt,
                        stop_ids=stop_ids,
                    )
                    self.call_before_next_work(slot, call)
                case CloseSlot(slot):
                    self.call_before_next_work(slot, partial(self.runner.close, slot))

    def _tell(self, actions: list[Action]) -> None:
        """Send what is to be sent, and note which sessions have ended."""
        for action in actions:
            match action:
                case Send():
                    message = action.message
                    if isinstance(message, TextDelta) and message.logprobs is not None:
                        message = replace(message, logprobs=spelled(message, self.tokenizer.token_bytes))
                    self.send(message)
                case SessionEnded(session, reason, report):
                    log.info("session %s ended: %s", session, reason)
                    self._ended.update({"sessions": 1} | report)
                    self.trace.write("session_ended", self.now(), session=session, reason=reason, report=report)
        self.settle(len(self.scheduler.sessions))

    def _trace_pass(
        self, works: Sequence[Work], results: Sequence[VerifyResult | Exception | None], now: float
    ) -> None:
        """A record for each session of the pass; `pass_rows` are those of all of them."""
        pass_rows = sum(len(work.request.tokens) for work in works if isinstance(work, Verify))
        for work, result in zip(works, results, strict=True):
            if isinstance(work, Verify) and isinstance(result, VerifyResult):
                self.trace.write(
                    "verify", now, session=work.session, start=work.request.start, num_rows=len(work.request.tokens),
                    num_tokens=len(result.tokens), num_accepted=len(result.rows), compute_s=result.compute_s,
                    overhead_s=result.overhead_s, began=self.scheduler.running_since, pass_rows=pass_rows,
                    pass_sessions=len(works),
                )  # fmt: skip
