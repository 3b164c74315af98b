"""The draft scheduler alone: loading a prefix, slots, what is stale, what is sent again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from node_draft.scheduler import DraftScheduler
from node_draft.session import CloseSlot, FrameAnswered, OpenSlot, Send
from speculation.growth import parse_growth
from speculation.passes import Child, DraftResult, DraftStep
from speculation.tree import ROOT
from wire.codec import digest_ids
from wire.messages import (
    MAX_ROUNDS_PER_FRAME,
    Acceptance,
    AppliedRound,
    Candidates,
    Error,
    Prefix,
    Release,
    Resync,
    RoundTiming,
)


def scheduler(growth: str = "chain:2+6", **limits: int) -> DraftScheduler:
    return DraftScheduler(growth=parse_growth(growth), **({"num_slots": 2, "max_length": 100, "max_rows": 32} | limits))


def prefix(tokens: tuple[int, ...] = (1, 2, 3), session: str = "s", **fields: Any) -> Prefix:
    base: dict[str, Any] = {
        "session": session, "epoch": 1, "start": 0, "tokens": tokens, "total": len(tokens),
        "digest": digest_ids(tokens), "limit": 90, "prompt_tokens": len(tokens),
    }  # fmt: skip
    return Prefix(**(base | fields))


def acceptance(start: int, tokens: tuple[int, ...], **fields: Any) -> Acceptance:
    return Acceptance(**({"session": "s", "epoch": 1, "start": start, "tokens": tokens} | fields))


def step(draft: DraftScheduler, now: float = 0.0) -> tuple[DraftStep, list[Any]]:
    """The next step, which is to be for one session."""
    (planned,), actions = draft.next_step(now)
    return planned, list(actions)


def answer(draft: DraftScheduler, planned: DraftStep, token: int, now: float = 0.0) -> list[Any]:
    """Finish a step with one child of each row that was to be expanded."""
    parents = [row.node for row in planned.nodes] or ([ROOT] if planned.expand_root else [])
    children = {parent: (Child(token=token, logprob=-0.5),) for parent in parents}
    return list(draft.on_step_done([DraftResult(children=children, compute_s=0.001)], now))


def candidates(actions: list[Any]) -> list[Candidates]:
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Candidates)]


def test_parts_of_a_prefix_may_come_in_any_order_and_twice() -> None:
    tokens = tuple(range(10))
    whole = prefix(tokens)
    parts = [dataclasses.replace(whole, start=s, tokens=tokens[s : s + 4]) for s in (0, 4, 8)]
    draft = scheduler()
    assert draft.on_prefix(parts[2]) == [OpenSlot(0, whole.sampling, 10)]
    draft.on_prefix(parts[0])
    assert draft.next_step(0.0) == ([], [])
    draft.on_prefix(parts[0])
    draft.on_prefix(parts[1])
    planned, _ = step(draft)
    assert planned.commit == tokens
    assert planned.expand_root


def test_c019_a_prefix_that_does_not_match_its_digest_is_refused() -> None:
    draft = scheduler()
    actions = draft.on_prefix(prefix(digest=digest_ids((1, 2, 4))))
    errors = [a.message for a in actions if isinstance(a, Send)]
    assert isinstance(errors[0], Error)
    assert "digest" in errors[0].message
    assert not draft.sessions
    assert draft.on_prefix(prefix(session="other"))  # the slot is free again


@pytest.mark.parametrize(("limits", "word"), [({"num_slots": 1}, "slots"), ({"max_length": 3}, "cache holds 3")])
def test_what_does_not_fit_is_refused_with_the_limit(limits: dict[str, int], word: str) -> None:
    draft = scheduler(**limits)
    if "num_slots" in limits:
        draft.on_prefix(prefix(session="first"))
    (refused,) = draft.on_prefix(prefix())
    assert isinstance(refused, Send)
    assert isinstance(refused.message, Error)
    assert word in refused.message.message


def test_frames_name_committed_lengths_and_earlier_nodes() -> None:
    draft = scheduler("chain:2+2")
    draft.on_prefix(prefix())
    frames = []
    for token in (10, 11, 12, 13):
        planned, actions = step(draft)
        frames += candidates(actions + answer(draft, planned, token))
    assert [(f.frame, f.first_node, f.parents, f.tokens) for f in frames] == [
        (0, 0, (-3, 0), (10, 11)),
        (1, 2, (1, 2), (12, 13)),
    ]
    assert not draft.next_step(0.0)[0]  # four tokens ahead is all that chain:2+2 may be


def test_a_hit_moves_the_root_and_feeds_only_what_the_cache_lacks() -> None:
    draft = scheduler("chain:2")
    draft.on_prefix(prefix())
    for token in (10, 11):
        planned, _ = step(draft)
        answer(draft, planned, token)
    draft.on_acceptance(acceptance(3, (10, 11, 12), num_accepted=2), 0.0)
    planned, _ = step(draft)
    # Node 0 (token 10) was run to draft 11; 11 never was, and 12 is new: no hole is left (cases.md C020).
    assert planned.accepted == (0,)
    assert (planned.commit_start, planned.commit) == (4, (11, 12))
    assert planned.keep == frozenset()


def test_a_miss_rewinds_to_the_common_prefix() -> None:
    draft = scheduler("chain:2+6")
    draft.on_prefix(prefix())
    for token in (10, 11, 12):
        planned, _ = step(draft)
        answer(draft, planned, token)
    draft.on_acceptance(acceptance(3, (10, 99)), 0.0)
    planned, _ = step(draft)
    assert planned.accepted == (0,)
    assert planned.keep == frozenset()
    assert (planned.commit_start, planned.commit, planned.expand_root) == (4, (99,), True)


def test_children_of_a_node_that_died_during_the_step_are_dropped() -> None:
    draft = scheduler("chain:2+6")
    draft.on_prefix(prefix())
    planned, _ = step(draft)
    answer(draft, planned, 10)
    planned, _ = step(draft)  # runs node 0, token 10
    draft.on_acceptance(acceptance(3, (50,)), 0.0)
    assert answer(draft, planned, 11) == []
    assert draft.counters.num_wasted == 1
    planned, _ = step(draft)
    assert planned.commit == (50,)


@pytest.mark.parametrize("child", [50, 60])
def test_children_of_the_root_belong_where_the_root_was_when_the_step_began(child: int) -> None:
    """Meanwhile 50 was committed: a child 50 says nothing new, a child 60 is wrong, and neither follows the 50."""
    draft = scheduler("chain:2+6")
    draft.on_prefix(prefix())
    planned, _ = step(draft)
    draft.on_acceptance(acceptance(3, (50,)), 0.0)
    answer(draft, planned, child)
    tree = draft.sessions["s"].tree
    assert tree is not None
    assert not tree.nodes
    planned, _ = step(draft)
    assert (planned.commit_start, planned.commit, planned.expand_root) == (3, (50,), True)


def test_late_and_repeated_acceptances_do_nothing_and_a_gap_asks_once() -> None:
    draft = scheduler()
    draft.on_prefix(prefix())
    draft.on_acceptance(acceptance(3, (7, 8)), 0.0)
    tree = draft.sessions["s"].tree
    assert tree is not None
    for late in (acceptance(3, (7,)), acceptance(4, (8,)), acceptance(3, (7, 8))):
        assert draft.on_acceptance(late, 0.0) == []
    assert tree.committed == [1, 2, 3, 7, 8]
    asked = draft.on_acceptance(acceptance(7, (9,)), 0.0)
    assert asked == [Send(Resync(session="s", epoch=1, length=5))]
    assert draft.on_acceptance(acceptance(8, (9,)), 0.0) == []


def test_an_older_epoch_is_stale_and_a_newer_one_starts_anew() -> None:
    draft = scheduler()
    draft.on_prefix(prefix(epoch=2))
    assert draft.on_prefix(prefix(epoch=1)) == []
    assert draft.on_acceptance(acceptance(3, (7,)), 0.0) == []
    actions = draft.on_prefix(prefix(epoch=3))
    assert [type(a) for a in actions] == [CloseSlot, OpenSlot]


def test_a_release_during_a_step_frees_the_slot_and_drops_the_result() -> None:
    draft = scheduler(num_slots=1)
    draft.on_prefix(prefix())
    planned, _ = step(draft)
    assert draft.on_message(Release(session="s"), 0.0) == [CloseSlot(0)]
    assert answer(draft, planned, 10) == []
    assert draft.on_prefix(prefix(session="next"))


def test_an_answered_frame_closes_its_round_and_forgets_older_ones() -> None:
    draft = scheduler("chain:1+6")
    draft.on_prefix(prefix())
    for i, token in enumerate((10, 11, 12)):
        planned, _ = step(draft, now=float(i))
        answer(draft, planned, token, now=i + 0.5)
    timing = RoundTiming(frame=1, relay_s=0.0, queue_s=0.0, verify_s=0.03, overhead_s=0.0)
    (answered,) = draft.on_acceptance(acceptance(3, (10, 11), rounds=(timing,)), 9.0)
    assert isinstance(answered, FrameAnswered)
    assert (answered.started_at, answered.sent_at, answered.draft_s) == (1.0, 1.5, 0.001)
    assert list(draft.sessions["s"].in_flight) == [2]


def test_the_next_frame_tells_how_earlier_rounds_ended_and_tells_it_once() -> None:
    draft = scheduler("chain:1+6")
    draft.on_prefix(prefix())
    over = [AppliedRound(frame=i, relay_s=0.001, apply_s=0.002, round_s=0.1) for i in range(3)]
    planned, _ = step(draft)
    (first,) = candidates(answer(draft, planned, 10))
    draft.on_round_over("s", 1, over[0])
    draft.on_round_over("s", 1, over[1])
    draft.on_round_over("s", 2, over[2])  # of a pairing that is over
    draft.on_round_over("gone", 1, over[2])
    assert list(draft.sessions["s"].applied) == over[:2]
    planned, _ = step(draft)
    (second,) = candidates(answer(draft, planned, 11))
    planned, _ = step(draft)
    (third,) = candidates(answer(draft, planned, 12))
    assert [frame.applied for frame in (first, second, third)] == [(), (over[0], over[1]), ()]


def test_rounds_that_nobody_is_told_of_are_forgotten_oldest_first() -> None:
    draft = scheduler()
    draft.on_prefix(prefix())
    for i in range(3 * MAX_ROUNDS_PER_FRAME):
        draft.on_round_over("s", 1, AppliedRound(frame=i, relay_s=0.0, apply_s=0.0, round_s=0.0))
    assert [over.frame for over in draft.sessions["s"].applied] == list(
        range(2 * MAX_ROUNDS_PER_FRAME, 3 * MAX_ROUNDS_PER_FRAME)
    )


def test_a_failed_step_costs_its_session_the_drafter_and_nobody_else() -> None:
    draft = scheduler()
    draft.on_prefix(prefix())
    draft.on_prefix(prefix(session="other"))
    parts, _ = draft.next_step(0.0)
    assert [part.commit for part in parts] == [(1, 2, 3), (1, 2, 3)]
    children = {ROOT: (Child(token=10, logprob=-0.5),)}
    actions = draft.on_step_done([RuntimeError("out of memory"), DraftResult(children=children)], 0.0)
    assert isinstance(actions[0], CloseSlot)
    assert isinstance(actions[1], Send)
    assert isinstance(actions[1].message, Error)
    assert set(draft.sessions) == {"other"}
    assert [row.token for row in step(draft)[0].nodes] == [10]


def children_of(parts: list[DraftStep], token: int = 10) -> list[DraftResult]:
    """One child of each row that was to be expanded."""
    return [
        DraftResult(
            children={
                parent: (Child(token=token, logprob=-0.5),)
                for parent in ([row.node for row in part.nodes] or ([ROOT] if part.expand_root else []))
            }
        )
        for part in parts
    ]


def test_one_step_serves_all_sessions_that_want_to_grow() -> None:
    draft = scheduler("chain:1+6", num_slots=3)
    for name in ("a", "b", "c"):
        draft.on_prefix(prefix(session=name))
    draft.on_acceptance(acceptance(3, (7,), session="b", wanted=False), 0.0)
    for _ in range(3):
        parts, _ = draft.next_step(0.0)
        assert [part.slot for part in parts] == [0, 2]
        assert draft.next_step(0.0) == ([], [])  # the model is at it
        frames = candidates(list(draft.on_step_done(children_of(parts), 0.0)))
        assert [frame.session for frame in frames] == ["a", "c"]


def test_rows_that_are_too_few_for_all_go_round() -> None:
    draft = scheduler("chain:1+6", num_slots=5, max_rows=7)
    for number in range(5):
        draft.on_prefix(prefix(session=str(number)))
    slots = []
    for _ in range(4):
        parts, _ = draft.next_step(0.0)
        assert sum(len(part.commit) + len(part.nodes) for part in parts) <= 7
        slots.append([part.slot for part in parts])
        draft.on_step_done(children_of(parts), 0.0)
    # Three tokens of a prefix each: two whole ones and a beginning; who was left out comes first.
    assert slots[0] == [0, 1, 2]
    assert slots[1] == [3, 4, 0]
    assert {slot for step in slots[:2] for slot in step} == {0, 1, 2, 3, 4}


def test_a_full_chain_is_sent_although_others_grow_on() -> None:
    draft = scheduler("chain:3", num_slots=2)
    draft.on_prefix(prefix(session="short", limit=6))  # positions 3 and 4 are worth a candidate: two tokens, not three
    draft.on_prefix(prefix(session="long"))
    frames = []
    for _ in range(4):
        parts, actions = draft.next_step(0.0)
        frames += candidates(list(actions))
        if parts:
            frames += candidates(list(draft.on_step_done(children_of(parts), 0.0)))
    assert [(frame.session, len(frame.tokens)) for frame in frames] == [("short", 2), ("long", 3)]


def test_a_long_prefix_is_fed_in_chunks_beside_other_sessions_steps() -> None:
    draft = scheduler(max_length=2000, max_rows=64)
    tokens = tuple(i % 50 for i in range(500))
    draft.on_prefix(prefix(tokens, session="long", limit=900))
    draft.on_prefix(prefix())
    sizes = []
    for _ in range(4):
        parts, _ = draft.next_step(0.0)
        sizes.append({part.slot: len(part.commit) + len(part.nodes) for part in parts})
        draft.on_step_done(children_of(parts), 0.0)
    assert sizes == [{0: 64}, {1: 3, 0: 61}, {1: 1, 0: 63}, {1: 1, 0: 63}]


def test_a_session_alone_is_drafted_ahead_and_one_among_others_is_not() -> None:
    draft = scheduler("chain:4+8", max_ahead=7)
    draft.on_prefix(prefix(session="a"))
    planned, _ = step(draft)
    assert planned.num_ahead == 3
    answer(draft, planned, 10)
    draft.on_prefix(prefix(session="b"))
    parts, _ = draft.next_step(0.0)
    assert [part.num_ahead for part in parts] == [0, 0]


def test_sessions_share_twice_the_rows_that_one_would_have() -> None:
    """Ten children of the root each: four rows for one session alone, eight of all together beyond."""
    rows = {}
    for num_sessions in (1, 2, 4, 16):
        draft = scheduler("tree:4x10", num_slots=16, max_rows=256)
        for number in range(num_sessions):
            draft.on_prefix(prefix(session=str(number)))
        parts, _ = draft.next_step(0.0)
        children = tuple(Child(token=token, logprob=-1.0 - token / 10) for token in range(10))
        draft.on_step_done([DraftResult(children={ROOT: children})] * num_sessions, 0.0)
        parts, _ = draft.next_step(0.0)
        rows[num_sessions] = [len(part.nodes) for part in parts]
    assert rows == {1: [4], 2: [4] * 2, 4: [2] * 4, 16: [2] * 16}


def test_a_step_of_a_session_that_is_over_is_not_taken_for_its_successors_of_the_same_name() -> None:
    """Released and opened anew while its step runs: name, slot and epoch are the same, the tree is another."""
    draft = scheduler()
    draft.on_prefix(prefix())
    planned, _ = step(draft)
    draft.on_release("s")
    draft.on_prefix(prefix((5, 6)))
    assert answer(draft, planned, 9) == []
    anew, _ = step(draft)
    assert (anew.commit_start, anew.commit) == (0, (5, 6))


def test_the_message_of_a_failure_may_be_of_any_length() -> None:
    draft = scheduler()
    draft.on_prefix(prefix())
    step(draft)
    _, told = draft.on_step_done([RuntimeError("x" * 100_000)], 0.0)
    assert isinstance(told, Send)
    assert isinstance(told.message, Error)
    assert told.message.code == "draft_failed"
