"""The verify scheduler alone: admission, turns, cancelling, pairing, and what a pass is made of."""

from __future__ import annotations

from typing import Any

from node_verify.requests import make_request
from node_verify.scheduler import VerifyScheduler
from node_verify.session import CloseSlot, OpenSlot, Prefill, Send, SessionEnded, Verify
from node_verify.text import AnswerText
from speculation.passes import VerifyResult
from speculation.selection import BestFirst
from wire.messages import (
    MAX_TOKENS_PER_FRAME,
    Acceptance,
    Cancel,
    Candidates,
    Done,
    Error,
    OpenSession,
    Paired,
    PeerGone,
    Prefix,
    Resync,
    TextDelta,
    Waiting,
)


class Letters:
    """A decode stream of one letter a token."""

    def push(self, token: int) -> str:
        return chr(97 + token % 26)

    def flush(self) -> str:
        return ""


def scheduler(**limits: Any) -> VerifyScheduler:
    base = {"selection": BestFirst(8), "patience_s": 0.0, "num_slots": 1, "max_rows": 8, "vocab_size": 100}
    return VerifyScheduler(**(base | limits))


def open_session(verify: VerifyScheduler, session: str = "s", *, now: float = 0.0, **request: Any) -> list[Any]:
    message = OpenSession(**({"session": session, "prompt_ids": (1,), "max_tokens": 10} | request))
    assert verify.on_opening(session, now) == []
    made = make_request(
        message, prompt_ids=list(message.prompt_ids or ()), context_length=1000, vocab_size=100, stop_ids=(99,)
    )
    return list(verify.on_request(session, made, AnswerText(Letters(), made.stop), now))


def next_pass(verify: VerifyScheduler, now: float = 0.0) -> Verify:
    """The next work, which is to be a pass for one session."""
    (work,) = verify.next_work(now)
    assert isinstance(work, Verify)
    return work


def run_pass(verify: VerifyScheduler, *tokens: int, rows: tuple[int, ...] = (), now: float = 0.0) -> list[Any]:
    next_pass(verify, now)
    return list(verify.on_work_done([VerifyResult(tokens=tokens, rows=rows, compute_s=0.0)], now))


def messages(actions: list[Any]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, Send)]


def pair(verify: VerifyScheduler, epoch: int = 1, session: str = "s") -> list[Any]:
    return messages(list(verify.on_message(Paired(session=session, epoch=epoch, draft="d"), 0.0)))


def offer(first: int, parents: tuple[int, ...], tokens: tuple[int, ...], **fields: Any) -> Candidates:
    base: dict[str, Any] = {"session": "s", "epoch": 1, "frame": first, "first_node": first}
    return Candidates(**(base | fields), parents=parents, tokens=tokens, scores=(8,) * len(tokens))


def test_a_session_waits_for_a_slot_and_gets_it_when_one_is_free() -> None:
    verify = scheduler()
    assert isinstance(open_session(verify, "first")[0], OpenSlot)
    assert messages(open_session(verify, "second")) == [Waiting(session="second", place=1)]
    actions = list(verify.on_message(Cancel(session="first"), 1.0))
    kinds = [type(action) for action in actions]
    assert kinds == [Send, CloseSlot, OpenSlot, SessionEnded]
    assert verify.next_work(1.0)


def test_the_waiting_line_is_bounded() -> None:
    verify = scheduler(max_waiting=1)
    open_session(verify, "runs")
    open_session(verify, "waits")
    (error,) = messages(list(verify.on_opening("too many", 0.0)))
    assert isinstance(error, Error)
    assert error.code == "overloaded"
    assert "limit is 1" in error.message


def test_a_stop_string_that_only_the_end_shows_is_the_reason_too() -> None:
    """The last token ends in half a character, so its text comes when there is no more to wait for."""

    class Late(Letters):
        def push(self, token: int) -> str:
            return "" if token == 25 else super().push(token)

        def flush(self) -> str:
            return "z"

    verify = scheduler()
    message = OpenSession(session="s", prompt_ids=(1,), max_tokens=3, stop=("bz",))
    assert verify.on_opening("s", 0.0) == []
    made = make_request(message, prompt_ids=[1], context_length=1000, vocab_size=100, stop_ids=())
    verify.on_request("s", made, AnswerText(Late(), made.stop), 0.0)
    delta, done = messages(run_pass(verify, 0, 1, 25))
    assert (delta.text, done.finish_reason, done.completion_tokens) == ("a", "stop", 3)


def test_a_session_name_cannot_be_taken_twice() -> None:
    verify = scheduler()
    open_session(verify)
    (error,) = messages(list(verify.on_opening("s", 0.0)))
    assert error.code == "bad_session"
    assert "s" in verify.sessions


def test_pairing_may_come_before_the_prompt_is_tokenized() -> None:
    verify = scheduler()
    verify.on_opening("s", 0.0)
    assert pair(verify) == []
    made = make_request(
        OpenSession(session="s", prompt_ids=(5, 6)), prompt_ids=[5, 6], context_length=50, vocab_size=100, stop_ids=()
    )
    sent = messages(list(verify.on_request("s", made, AnswerText(Letters(), ()), 0.0)))
    assert isinstance(sent[0], Prefix)
    assert (sent[0].tokens, sent[0].limit) == ((5, 6), 50)


def test_cancelling_while_the_prompt_is_tokenized_or_waits_leaves_nothing() -> None:
    verify = scheduler()
    verify.on_opening("s", 0.0)
    (done,) = messages(list(verify.on_message(Cancel(session="s"), 0.0)))
    assert isinstance(done, Done)
    assert (done.finish_reason, done.completion_tokens) == ("cancelled", 0)
    open_session(verify, "runs")
    open_session(verify, "waits")
    verify.on_message(Cancel(session="waits"), 0.0)
    verify.on_message(Cancel(session="runs"), 0.0)
    assert not verify.sessions
    assert not verify.next_work(0.0)


def test_a_cancel_during_a_pass_drops_its_result_and_the_slot_is_used_again() -> None:
    verify = scheduler()
    open_session(verify)
    next_pass(verify)
    verify.on_message(Cancel(session="s"), 0.0)
    open_session(verify, "next")
    assert not verify.next_work(0.0)  # the model is still at the old pass
    assert verify.on_work_done([VerifyResult(tokens=(7,), rows=())], 0.0) == []
    sent = messages(run_pass(verify, 8))
    assert isinstance(sent[0], TextDelta)
    assert (sent[0].session, sent[0].tokens) == ("next", (8,))


def test_a_client_that_is_gone_is_told_nothing() -> None:
    verify = scheduler()
    open_session(verify)
    assert messages(list(verify.on_message(Cancel(session="s", reason="client gone"), 0.0))) == []


def test_candidates_are_rows_of_the_next_pass_parents_first() -> None:
    verify = scheduler()
    open_session(verify)
    pair(verify)
    verify.on_message(offer(0, (-1, 0, -1), (10, 11, 20)), 0.0)
    work = next_pass(verify, 0.0)
    assert work.request.tokens[0] == 1
    assert dict(zip(work.request.tokens[1:], work.request.parents[1:], strict=True))[11] == work.request.tokens.index(
        10
    )
    assert (work.depth, work.request.start, work.request.max_tokens) == (2, 1, 10)
    row = work.request.tokens.index(10)
    sent = messages(list(verify.on_work_done([VerifyResult(tokens=(10, 50), rows=(row,))], 0.1)))
    accepted, delta = sent
    assert isinstance(accepted, Acceptance)
    assert (accepted.start, accepted.tokens, accepted.num_accepted) == (1, (10, 50), 1)
    assert [timing.frame for timing in accepted.rounds] == [0]
    assert delta.sources == ("draft", "plain")


def test_a_frame_that_came_during_a_pass_is_answered_by_the_next() -> None:
    verify = scheduler()
    open_session(verify)
    pair(verify)
    assert verify.next_work(1.0)
    verify.on_message(offer(0, (-1, 0), (10, 11)), 1.5)
    (first, _) = messages(list(verify.on_work_done([VerifyResult(tokens=(10,), rows=())], 2.0)))
    assert first.rounds == ()
    (second, _) = messages(run_pass(verify, 11, 12, rows=(1,), now=2.0))
    assert [(timing.frame, timing.queue_s) for timing in second.rounds] == [(0, 0.5)]


def test_with_patience_a_paired_session_waits_for_candidates_and_not_longer() -> None:
    verify = scheduler(patience_s=2.0)
    open_session(verify)
    assert verify.next_work(0.0)  # unpaired: nothing to wait for
    verify.on_work_done([VerifyResult(tokens=(5,), rows=())], 0.5)
    pair(verify)
    verify.sessions["s"].idle_since = 0.5
    assert not verify.next_work(1.0)
    assert verify.next_timer() == 2.5
    assert verify.next_work(2.5)


def test_no_candidates_are_scored_for_the_last_token() -> None:
    verify = scheduler()
    open_session(verify, max_tokens=1)
    pair(verify)
    verify.on_message(offer(0, (-1,), (10,)), 0.0)
    work = next_pass(verify, 0.0)
    assert work.request.tokens == (1,)


def test_c003_candidates_deeper_than_the_budget_are_not_scored() -> None:
    verify = scheduler()
    open_session(verify, max_tokens=3)
    pair(verify)
    verify.on_message(offer(0, (-1, 0, 1, 2, 3), (10, 11, 12, 13, 14)), 0.0)
    work = next_pass(verify, 0.0)
    assert work.request.tokens == (1, 10, 11)


def test_node_ids_of_a_new_epoch_have_nothing_to_do_with_those_of_the_old() -> None:
    verify = scheduler()
    open_session(verify)
    pair(verify, epoch=1)
    verify.on_message(offer(0, (-1, 0), (10, 11)), 0.0)
    pair(verify, epoch=2)
    verify.on_message(offer(0, (-1, 0), (20, 21), epoch=2), 0.0)
    work = next_pass(verify, 0.0)
    assert work.request.tokens == (1, 20, 21)


def test_without_its_drafter_a_session_decodes_on() -> None:
    verify = scheduler(patience_s=5.0)
    open_session(verify)
    pair(verify)
    assert not verify.next_work(0.1)
    verify.on_message(PeerGone(session="s", role="draft"), 0.2)
    sent = messages(run_pass(verify, 9, now=0.2))
    assert [type(message) for message in sent] == [TextDelta]


def test_a_resync_is_answered_with_everything_since() -> None:
    verify = scheduler()
    open_session(verify)
    pair(verify)
    for token in (4, 5, 6):
        run_pass(verify, token)
    (answer,) = messages(list(verify.on_message(Resync(session="s", epoch=1, length=2), 0.0)))
    assert (answer.start, answer.tokens) == (2, (5, 6))
    assert verify.on_message(Resync(session="s", epoch=1, length=4), 0.0) == []
    assert verify.on_message(Resync(session="s", epoch=9, length=1), 0.0) == []


def test_a_failed_pass_ends_its_session_and_the_next_goes_on() -> None:
    verify = scheduler(num_slots=2)
    open_session(verify, "bad")
    open_session(verify, "good")
    works = verify.next_work(0.0)
    assert [work.session for work in works] == ["bad", "good"]
    results = [ValueError("NaN logits"), VerifyResult(tokens=(3,), rows=())]
    error, delta = messages(list(verify.on_work_done(results, 0.0)))
    assert (error.session, error.code) == ("bad", "target_failed")
    assert "NaN logits" in error.message
    assert (delta.session, delta.tokens) == ("good", (3,))
    assert run_pass(verify, 4)


def test_a_long_prompt_is_prefilled_in_chunks_and_sessions_take_turns() -> None:
    verify = scheduler(num_slots=2, prefill_chunk=100)
    open_session(verify, "long", prompt_ids=(1,) * 251)
    open_session(verify, "short")
    seen = []
    for _ in range(5):
        (work,) = verify.next_work(0.0)
        if isinstance(work, Prefill):
            seen.append((work.start, work.end))
            verify.on_work_done([None], 0.0)
        else:
            seen.append(work.session)
            verify.on_work_done([VerifyResult(tokens=(5,), rows=())], 0.0)
    assert seen == [(0, 100), "short", (100, 200), "short", (200, 250)]


def test_one_pass_serves_all_sessions_and_the_best_candidates_of_all_get_its_rows() -> None:
    verify = scheduler(num_slots=3, max_rows=6, selection=BestFirst(6))
    for session in ("a", "b", "c"):
        open_session(verify, session, prompt_ids=(ord(session),))
        pair(verify, session=session)
    verify.on_message(Candidates(
        session="a", epoch=1, frame=0, first_node=0, parents=(-1, 0), tokens=(10, 11), scores=(40, 1)
    ), 0.0)  # fmt: skip
    verify.on_message(Candidates(
        session="c", epoch=1, frame=0, first_node=0, parents=(-1, 0, 1), tokens=(20, 21, 22), scores=(1, 1, 1)
    ), 0.0)  # fmt: skip
    works = verify.next_work(0.0)
    # Each session's pending token, then the three paths that are far more probable than any of a's.
    assert [(work.session, work.request.tokens) for work in works if isinstance(work, Verify)] == [
        ("a", (97,)), ("b", (98,)), ("c", (99, 20, 21, 22)),
    ]  # fmt: skip
    results = [
        VerifyResult(tokens=(1,), rows=()),
        VerifyResult(tokens=(2,), rows=()),
        VerifyResult(tokens=(20, 5), rows=(1,)),
    ]
    deltas = [m for m in messages(list(verify.on_work_done(results, 0.1))) if isinstance(m, TextDelta)]
    assert [(delta.session, delta.tokens, delta.sources) for delta in deltas] == [
        ("a", (1,), ("plain",)), ("b", (2,), ("plain",)), ("c", (20, 5), ("draft", "plain")),
    ]  # fmt: skip


def test_more_sessions_than_rows_take_turns() -> None:
    verify = scheduler(num_slots=5, max_rows=2)
    for number in range(5):
        open_session(verify, f"s{number}")
    seen = []
    for _ in range(5):
        works = verify.next_work(0.0)
        seen.append([work.session for work in works])
        verify.on_work_done([VerifyResult(tokens=(5,), rows=())] * len(works), 0.0)
    assert seen == [["s0", "s1"], ["s2", "s3"], ["s4", "s0"], ["s1", "s2"], ["s3", "s4"]]


def test_with_patience_sessions_take_turns_with_all_their_candidates() -> None:
    verify = scheduler(num_slots=3, max_rows=4, patience_s=5.0)
    for session in ("a", "b", "c"):
        open_session(verify, session)
        pair(verify, session=session)
    assert not verify.next_work(0.0)
    for session in ("c", "a"):
        verify.on_message(offer(0, (-1, 0, 1), (10, 11, 12), session=session), 0.0)
    first = next_pass(verify)
    assert (first.session, first.request.tokens) == ("a", (1, 10, 11, 12))
    verify.on_work_done([VerifyResult(tokens=(7,), rows=())], 0.0)
    assert next_pass(verify).session == "c"  # b waits on, a too: its candidates were wrong


def test_sessions_in_line_are_told_their_place_whenever_it_changes() -> None:
    verify = scheduler()
    open_session(verify, "runs")
    for place, session in enumerate(("x", "y", "z"), 1):
        assert messages(open_session(verify, session)) == [Waiting(session=session, place=place)]
    told = messages(list(verify.on_message(Cancel(session="y", reason="client gone"), 0.0)))
    assert told == [Waiting(session="z", place=2)]
    told = messages(list(verify.on_message(Cancel(session="runs", reason="client gone"), 0.0)))
    assert told == [Waiting(session="z", place=1)]
    assert verify.sessions["x"].slot == 0
    assert messages(list(verify.on_message(Cancel(session="x", reason="client gone"), 0.0))) == []
    assert verify.sessions["z"].slot == 0


def test_a_burst_of_requests_whose_prompts_are_still_tokenized_cannot_outgrow_the_line() -> None:
    verify = scheduler(num_slots=2, max_waiting=3)
    refused = [bool(verify.on_opening(f"s{number}", 0.0)) for number in range(7)]
    assert refused == [False] * 5 + [True] * 2
    verify.on_message(Cancel(session="s0"), 0.0)
    assert verify.on_opening("again", 0.0) == []
    verify = scheduler(max_waiting=0)
    assert verify.on_opening("s", 0.0) == []
    (error,) = messages(list(verify.on_opening("t", 0.0)))
    assert "limit is 0" in error.message


def test_stale_messages_are_counted_and_nothing_else() -> None:
    verify = scheduler()
    assert verify.on_message(offer(0, (-1,), (3,)), 0.0) == []
    assert verify.num_stale_messages == 1
    open_session(verify)
    pair(verify, epoch=2)
    verify.on_message(offer(0, (-1,), (3,), epoch=1), 0.0)
    assert verify.sessions["s"].stats.num_stale == 1
    assert verify.on_message(Paired(session="s", epoch=2, draft="again"), 0.0) == []


def test_work_of_a_session_that_is_over_is_not_taken_for_its_successors_of_the_same_name() -> None:
    """Cancelled and opened anew while its pass runs: name and slot are the same, the answer is another's."""
    verify = scheduler()
    open_session(verify)
    next_pass(verify)
    verify.on_message(Cancel(session="s"), 0.0)
    open_session(verify, prompt_ids=(2, 3))
    assert verify.on_work_done([VerifyResult(tokens=(7,), rows=(), compute_s=0.0)], 0.0) == []
    (work,) = verify.next_work(0.0)
    assert work == Prefill("s", 0, 0, 1)
    verify.on_message(Cancel(session="s"), 0.0)
    open_session(verify, prompt_ids=(4, 5, 6))
    assert verify.on_work_done([None], 0.0) == []
    assert verify.next_work(0.0) == [Prefill("s", 0, 0, 2)]


def test_what_a_drafter_asks_for_fits_a_frame() -> None:
    verify = scheduler()
    made = make_request(
        OpenSession(session="s", prompt_ids=(1,), max_tokens=10), prompt_ids=[1] * (MAX_TOKENS_PER_FRAME + 2),
        context_length=100_000, vocab_size=100, stop_ids=(),
    )  # fmt: skip
    verify.on_opening("s", 0.0)
    verify.on_request("s", made, AnswerText(Letters(), ()), 0.0)
    pair(verify)
    (answer,) = messages(list(verify.on_message(Resync(session="s", epoch=1, length=0), 0.0)))
    assert (answer.start, len(answer.tokens)) == (0, MAX_TOKENS_PER_FRAME)


def test_the_message_of_a_failure_may_be_of_any_length() -> None:
    verify = scheduler()
    open_session(verify)
    next_pass(verify)
    (error,) = messages(list(verify.on_work_done([RuntimeError("x" * 100_000)], 0.0)))
    assert error.code == "target_failed"
    assert error.message.startswith("RuntimeError: xxx")
