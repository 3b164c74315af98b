"""Speculation side by side: both models on one device, as a server would do it that has no second region.

A round: the drafter takes its steps for all sessions (one call a step), then the target verifies all of them in one
pass, as far as its rows go; the others are in the next. Nothing runs beside anything else, so a round of γ candidates
takes γ steps and a pass. There is no relay and no wire: schedulers and runners are those of the nodes, and frames are
handed over as objects, so what is measured is the two models and little else. That flatters this server, if anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import count

from engine.replay import Recording
from engine.runner import DraftRunner, TargetRunner
from node_draft import session as draft
from node_draft.scheduler import DraftScheduler
from node_verify import session as verify
from node_verify.requests import make_request
from node_verify.scheduler import VerifyScheduler
from node_verify.text import AnswerText
from scripts.capacity_load import Answered
from scripts.simulation import ByteStream
from speculation.growth import parse_growth
from speculation.passes import VerifyResult
from speculation.selection import BestFirst
from wire.messages import Done, Error, Message, OpenSession, Paired, TextDelta

PATIENCE_S = 3600.0


class ColocatedServer:
    """Answers recorded prompts; `run` returns when all of them are answered.

    Args:
        gamma: candidates of a round, drafted one after the other.
        max_rows: of a pass, all sessions together.
    """

    def __init__(
        self, target: TargetRunner, drafter: DraftRunner, *, gamma: int, max_rows: int, vocab_size: int = 1 << 20
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.verify = VerifyScheduler(
            selection=BestFirst(max_rows), patience_s=PATIENCE_S, num_slots=target.num_slots, max_rows=max_rows,
            vocab_size=vocab_size, gated=False,
        )  # fmt: skip
        self.draft = DraftScheduler(
            growth=parse_growth(f"chain:{gamma}"), num_slots=drafter.num_slots, max_length=drafter.max_length,
            max_rows=drafter.max_rows, max_ahead=drafter.max_ahead,
        )  # fmt: skip
        self._users: dict[str, list[Recording]] = {}
        self._answers: dict[str, list[Answered]] = {}
        self._user_of: dict[str, str] = {}
        self._free: list[str] = []
        self._names = count()

    def run(self, users: Sequence[Sequence[Recording]], num_tokens: int) -> list[list[Answered]]:
        """Have each user ask one prompt after the other; what each was answered."""
        for number, recordings in enumerate(users):
            user = f"user {number}"
            self._users[user] = list(recordings)
            self._answers[user] = []
        self._free = list(self._users)
        while self._free or self.verify.sessions:
            while self._free:
                self._ask_next(self._free.pop(0), num_tokens)
            if self.verify.sessions:
                self._round()
        return list(self._answers.values())

    def _round(self) -> None:
        """All the drafts that there are to be made, then one pass."""
        while True:
            parts, actions = self.draft.next_step(_now())
            self._from_draft(actions)
            if not parts:
                break
            self._from_draft(self.draft.on_step_done(self.drafter.step(parts), _now()))
        # Whoever still has no candidates will not get any: nothing is under way.
        works = self.verify.next_work(_now()) or self.verify.next_work(_now() + PATIENCE_S)
        results: list[VerifyResult | Exception | None] = []
        for work in works:
            if isinstance(work, verify.Prefill):
                self.target.prefill(work.slot, work.start, work.end)
                results.append(None)
        passes = [work.request for work in works if isinstance(work, verify.Verify)]
        results += self.target.verify(passes) if passes else []
        self._from_verify(self.verify.on_work_done(results, _now()))

    def _ask_next(self, user: str, num_tokens: int) -> None:
        if not self._users[user]:
            return
        recording = self._users[user].pop(0)
        session = f"s{next(self._names)}"
        self._user_of[session] = user
        now = _now()
        self._answers[user].append(Answered(recording, now))
        message = OpenSession(session=session, prompt_ids=recording.prompt, max_tokens=num_tokens, ignore_eos=True)
        request = make_request(
            message, prompt_ids=recording.prompt, context_length=self.target.max_length, vocab_size=self.vocab_size,
            stop_ids=(),
        )  # fmt: skip
        self._from_verify(self.verify.on_opening(session, now))
        self._from_verify(self.verify.on_message(Paired(session=session, epoch=1, draft="beside"), now))
        self._from_verify(self.verify.on_request(session, request, AnswerText(ByteStream(), ()), now))

    def _from_verify(self, actions: Iterable[verify.Action]) -> None:
        for action in actions:
            match action:
                case verify.Send(message):
                    self._deliver(message)
                case verify.OpenSlot(slot, sampling, tokens, num_prompt, stop_ids):
                    self.target.open(slot, sampling=sampling, tokens=tokens, num_prompt=num_prompt, stop_ids=stop_ids)
                case verify.CloseSlot(slot):
                    self.target.close(slot)

    def _deliver(self, message: Message) -> None:
        match message:
            case TextDelta():
                self._answers[self._user_of[message.session]][-1].take(message.tokens, _now())
            case Done():
                self._from_draft(self.draft.on_release(message.session))
                self._free.append(self._user_of[message.session])
            case Error():
                raise RuntimeError(f"{message.code}: {message.message}")
            case _:
                self._from_draft(self.draft.on_message(message, _now()))

    def _from_draft(self, actions: Iterable[draft.Action]) -> None:
        for action in actions:
            match action:
                case draft.Send(message):
                    for answer in self.verify.on_message(message, _now()):
                        raise RuntimeError(f"candidates were answered at once: {answer}")
                case draft.OpenSlot(slot, sampling, num_prompt):
                    self.drafter.open(slot, sampling=sampling, num_prompt=num_prompt)
                case draft.CloseSlot(slot):
                    self.drafter.close(slot)


def _now() -> float:
    return time.perf_counter()
