"""What the verify node does next. Pure: messages and results in, actions out, time an argument.

A session's life:

    OPENING    its prompt is being tokenized
    WAITING    for a free slot
    PREFILL    all but the last prompt token go through the target, in chunks between other sessions' passes
    RUNNING    pass after pass: the pending token and the best live candidates; at least one token commits
    (ended)    forgotten; whatever still arrives for it is stale

One piece of work serves many sessions: a pass all that are ready for one, as far as there are rows, a piece of prefill
as many prompts as a chunk has room for. Whose turn it is, is decided in `speculation/batching.py`.

Every pass commits what the target itself decides, so no message, and no lack of one, can change the text. With
`patience_s` = 0 the node never waits: where there are no candidates it decodes plainly.

The cache rule: between passes a session's slot holds its committed tokens except the last, the pending one, which is
row 0 of the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from node_verify.drafting import acceptance, missing_acceptance, prefix_parts, take_candidates
from node_verify.line import WaitingLine
from node_verify.planning import lacks_candidates, plan_pass, plan_prefill
from node_verify.requests import Request
from node_verify.session import Action, CloseSlot, OpenSlot, Prefill, Send, Session, SessionEnded, State, Verify, Work
from node_verify.text import AnswerText, ended_by
from speculation.batching import Turns
from speculation.costs import PassCosts
from speculation.gate import Gate
from speculation.local import NUM_TOPS, LocalDrafter, Recycled
from speculation.passes import VerifyResult
from speculation.rates import score_key, score_rates
from speculation.selection import Estimates, SelectionPolicy
from speculation.tree import Tree
from wire.errors import in_words
from wire.messages import (
    MAX_ERROR_CHARS,
    Cancel,
    Candidates,
    Done,
    Error,
    Message,
    Paired,
    PeerGone,
    Resync,
    TextDelta,
    Waiting,
)


class VerifyScheduler:
    """Decides for all sessions of one verify node.

    Args:
        selection: ranks what a session could have scored.
        patience_s: how long a paired session without candidates waits before it decodes plainly; 0 to never wait. With
            patience, sessions take turns with all their candidates where not all fit in a pass.
        num_slots, max_rows: of the runner; max_rows is that of a pass, all sessions together.
        max_waiting: sessions that may wait for a slot; more are refused.
        vocab_size: ids at or above it are malformed in candidates.
        prefill_chunk: most prompt tokens of one piece of prefill, all sessions together.
        local: what the drafter beside the target does, (recycle, match suffixes).
        costs: of a pass by rows, to choose how many pay; None to fill every pass.
        calibrate: rate candidates by how often their kind was right, not by the drafter's word.
        gated: switch a far drafter off while it does not pay.
    """

    def __init__(
        self,
        *,
        selection: SelectionPolicy,
        patience_s: float,
        num_slots: int,
        max_rows: int,
        vocab_size: int,
        max_waiting: int = 64,
        prefill_chunk: int = 128,
        local: tuple[bool, bool] = (False, False),
        costs: PassCosts | None = None,
        calibrate: bool = True,
        gated: bool = True,
    ) -> None:
        self.selection = selection
        self.patience_s = patience_s
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.prefill_chunk = prefill_chunk
        self.costs = costs
        self.calibrate = calibrate
        self.gated = gated
        self.gates: dict[str, Gate] = {}
        self.local = local
        self.sessions: dict[str, Session] = {}
        self.num_stale_messages = 0
        self._line = WaitingLine(num_slots, max_waiting)
        self._turns = Turns(prefill_chunk)
        self._running: list[tuple[Session, Work]] = []
        self.running_since = 0.0

    def on_opening(self, session_id: str, now: float) -> list[Action]:
        """A request has arrived and is being tokenized; pairing and cancelling may come before it is ready."""
        if session_id in self.sessions:
            return [Send(Error(session=session_id, code="bad_session", message=f"session {session_id} exists already"))]
        refusal = self._line.refusal()
        if refusal:
            return [Send(Error(session=session_id, code="overloaded", message=refusal))]
        self._line.expect(session_id)
        self.sessions[session_id] = Session(id=session_id, opened_at=now)
        return []

    def on_request(self, session_id: str, request: Request, text: AnswerText, now: float) -> list[Action]:
        """The prompt is tokenized and the request found good."""
        session = self.sessions.get(session_id)
        if session is None:
            return []
        session.request = request
        session.text = text
        session.state = State.WAITING
        session.tree = Tree(list(request.known_ids))
        reason = ended_by(request, text)
        if reason:
            # All of it was committed elsewhere; what is missing is the word that it is over.
            return self._end(session, reason, now)
        session.estimates = self._estimates(request)
        self._line.join(session_id)
        return [*prefix_parts(session), *self._admit(now)]

    def on_refused(self, session_id: str, code: str, message: str) -> list[Action]:
        """The request was found bad."""
        return self._fail(session_id, code, message)

    def on_message(self, message: Message, now: float) -> list[Action]:
        """Handle whatever the relay delivers for a session that exists; the rest is stale."""
        session = self.sessions.get(getattr(message, "session", None) or "")
        if session is None:
            self.num_stale_messages += 1
            return []
        match message:
            case Candidates():
                return [*take_candidates(session, message, vocab_size=self.vocab_size, now=now)]
            case Paired():
                return self._on_paired(session, message, now)
            case Resync():
                return [*missing_acceptance(session, message, wanted=self._wanted(session))]
            case Cancel():
                return self._end(session, "cancelled", now, announce=message.reason != "client gone")
            case PeerGone() | Error():
                # The draft node is gone, or gives up on this session; the target goes on alone.
                session.drafting = False
                return []
        self.num_stale_messages += 1
        return []

    def next_work(self, now: float) -> Sequence[Work]:
        """What the model should run now: a piece of prefill or a pass, in parts that each belong to another session.

        Nothing while it is busy or no session is ready (then see `next_timer`).
        """
        if self._running:
            return ()
        pass_first = self._turns.pass_is_next
        work: Sequence[Work] = self._next_pass(now) if pass_first else self._next_prefill()
        work = work or (self._next_prefill() if pass_first else self._next_pass(now))
        self._running = [(self.sessions[part.session], part) for part in work]
        self.running_since = now
        return work

    def next_timer(self) -> float | None:
        """When `next_work` should be asked again although nothing has happened."""
        if self._running or self.patience_s <= 0:
            return None
        waiting = [s.idle_since for s in self.sessions.values() if s.state is State.RUNNING]
        return min(waiting) + self.patience_s if waiting else None

    def on_work_done(
        self, results: Sequence[VerifyResult | Exception | None], now: float, hop_rtt_s: float = 0.0
    ) -> list[Action]:
        """Take the results of what `next_work` gave out, one for each part (None for a prefill)."""
        running, self._running = self._running, []
        if not running or len(results) != len(running):
            raise ValueError(f"{len(running)} parts of work are running, {len(results)} results came")
        if self.costs is not None and any(isinstance(result, VerifyResult) for result in results):
            num_rows = sum(len(work.request.tokens) for _, work in running if isinstance(work, Verify))
            self.costs.observe(num_rows, now - self.running_since)
        actions: list[Action] = []
        for (session, work), result in zip(running, results, strict=True):
            actions += self._on_part_done(session, work, result, now, hop_rtt_s)
        return actions

    def _on_part_done(
        self, session: Session, work: Work, result: VerifyResult | Exception | None, now: float, hop_rtt_s: float
    ) -> list[Action]:
        # By identity: another session of this name may have come meanwhile, to the same slot.
        if self.sessions.get(session.id) is not session:
            return []
        if isinstance(result, Exception):
            return self._fail(session.id, "target_failed", in_words(result))
        if isinstance(work, Prefill):
            session.num_prefilled = work.end
            self._settle_prefill(session, now)
            return []
        if result is None:
            raise ValueError("a verify pass has a result")
        return self._commit(session, work, result, now, hop_rtt_s)

    def _next_prefill(self) -> list[Prefill]:
        chunks = plan_prefill(self._turns, self.sessions)
        if chunks:
            self._turns.on_prefill(chunk.session for chunk in chunks)
        return chunks

    def _next_pass(self, now: float) -> list[Verify]:
        running = [self.sessions[name] for name in self._turns.running]
        ready = [each for each in running if now >= each.idle_since + self.patience_s or not self._is_waited_for(each)]
        parts = plan_pass(
            ready, self.selection, max_rows=self.max_rows, costs=self.costs, whole=self.patience_s > 0,
            num_tops=NUM_TOPS if self.local[0] else 0,
        )  # fmt: skip
        if parts:
            self._turns.on_pass(part.session for part in parts)
        return parts

    def _is_waited_for(self, session: Session) -> bool:
        """Whether candidates are on their way that a session with patience would wait for."""
        return lacks_candidates(session) and self._wanted(session)

    def _on_paired(self, session: Session, message: Paired, now: float) -> list[Action]:
        if message.epoch <= session.epoch:
            self.num_stale_messages += 1
            return []
        session.epoch = message.epoch
        session.draft = message.draft
        session.drafting = True
        if self.gated:
            self.gates.setdefault(message.draft, Gate()).on_paired()
        session.idle_since = now
        session.frames.clear()
        session.orphan_frame = -1
        if session.tree is not None:
            # Node ids start anew with the epoch.
            session.tree = Tree(session.tree.committed)
            session.estimates.far = score_rates() if self.calibrate else None
        return [*prefix_parts(session)]

    def _admit(self, now: float) -> list[Action]:
        """Give free slots to waiting sessions, first come first served, and tell the others where they stand."""
        actions: list[Action] = []
        for session_id, slot in self._line.admit():
            session = self.sessions[session_id]
            request = session.request
            assert request is not None
            session.slot = slot
            session.started_at = now
            actions.append(
                OpenSlot(session.slot, request.sampling, request.known_ids, len(request.prompt_ids), request.stop_ids)
            )
            self._settle_prefill(session, now)
        return actions + [Send(Waiting(session=name, place=place)) for name, place in self._line.news()]

    def _settle_prefill(self, session: Session, now: float) -> None:
        if session.num_to_prefill > 0:
            session.state = State.PREFILL
            self._turns.reading.join(session.id)
            return
        session.state = State.RUNNING
        session.idle_since = now
        self._turns.reading.leave(session.id)
        self._turns.running.join(session.id)

    def _estimates(self, request: Request) -> Estimates:
        recycle, suffix = self.local
        local = None
        if request.speculate and (recycle or suffix):
            local = LocalDrafter(request.known_ids, recycled=Recycled() if recycle else None, suffix=suffix)
        return Estimates(far=score_rates() if self.calibrate else None, local=local, costs=self.costs)

    def _wanted(self, session: Session) -> bool:
        gate = self.gates.get(session.draft)
        return gate is None or gate.wanted

    def _learn(self, session: Session, sources: list[str], judged: tuple[tuple[float, bool], ...], now: float) -> None:
        """Take from a finished pass what it says about candidates and the far drafter."""
        rates = session.estimates.far
        if rates is not None:
            for logprob, hit in judged:
                rates.observe(score_key(logprob), hit)
        gate = self.gates.get(session.draft)
        if gate is not None and session.drafting:
            gate.on_pass(
                num_tokens=len(sources), num_far=sources.count("draft"), seconds=now - self.running_since,
                candidates=bool(session.frames),
            )  # fmt: skip

    def _commit(
        self, session: Session, work: Verify, result: VerifyResult, now: float, hop_rtt_s: float
    ) -> list[Action]:
        request, tree, text = session.request, session.tree, session.text
        assert request is not None
        assert tree is not None
        assert text is not None
        push = text.push(result.tokens)
        tokens = result.tokens[: push.num_tokens]
        accepted_rows = result.rows[: len(tokens)]
        sources = [work.sources[row - 1] for row in accepted_rows]
        sources += ["plain"] * (len(tokens) - len(accepted_rows))
        start = tree.length
        judged = tree.commit(tokens).judged
        if session.estimates.local is not None:
            session.estimates.local.commit(tokens, result.tops)
        self._learn(session, sources, judged, now)
        stopped = push.stopped or tokens[-1] in request.stop_ids
        finished = stopped or tree.length >= request.limit
        session.compute_s += result.compute_s
        session.overhead_s += max(0.0, now - self.running_since - result.compute_s)
        session.idle_since = now
        if session.first_token_at is None:
            session.first_token_at = now
        session.stats.on_pass(
            proposed_depth=work.depth,
            num_accepted=len(accepted_rows),
            num_rows=len(work.request.tokens),
            cut=len(tokens) < len(result.tokens) or len(accepted_rows) == len(tokens),
            sources=sources,
        )
        actions: list[Action] = []
        if session.drafting and request.speculate and not finished:
            message = acceptance(
                session,
                start=start,
                tokens=tokens,
                num_accepted=sources.count("draft"),
                wanted=self._wanted(session),
                result=result,
                began_at=self.running_since,
                now=now,
                hop_rtt_s=hop_rtt_s,
            )
            actions.append(Send(message))
        shown = push.text + (text.finish() if finished else "")
        delta = TextDelta(
            session=session.id,
            start=start - len(request.prompt_ids),
            tokens=tuple(tokens),
            text=shown,
            sources=tuple(sources),
            logprobs=result.logprobs[: len(tokens)] if result.logprobs is not None else None,
        )
        actions.append(Send(delta))
        if finished:
            actions += self._end(session, "stop" if stopped or text.stopped else "length", now)
        return actions

    def _end(self, session: Session, reason: str, now: float, *, announce: bool = True) -> list[Action]:
        """End a session with a `Done`; its tokens stand."""
        request = session.request
        num_prompt = len(request.prompt_ids) if request else 0
        num_answer = session.tree.length - num_prompt if session.tree is not None else 0
        report = session.report(now)
        actions = self._forget(session, now)
        if announce:
            done = Done(
                session=session.id,
                finish_reason=reason,
                prompt_tokens=num_prompt,
                completion_tokens=num_answer,
                report=report,
            )
            actions.insert(0, Send(done))
        return [*actions, SessionEnded(session.id, reason, report)]

    def _fail(self, session_id: str, code: str, message: str) -> list[Action]:
        session = self.sessions.get(session_id)
        if session is None:
            return []
        error = Error(session=session_id, code=code, message=message[:MAX_ERROR_CHARS])
        return [Send(error), *self._forget(session, session.idle_since)]

    def _forget(self, session: Session, now: float) -> list[Action]:
        del self.sessions[session.id]
        self._turns.leave(session.id)
        self._line.leave(session.id)
        if session.slot < 0:
            return self._admit(now)
        self._line.free(session.slot)
        return [CloseSlot(session.slot), *self._admit(now)]
