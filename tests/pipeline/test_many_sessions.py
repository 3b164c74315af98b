"""Many sessions at a time: each answer is the target's own, passes are shared, nobody is left behind."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from engine.scripted import ScriptedDrafter, ScriptedTarget
from engine.scripted_logits import agreeing, hash_logits, reference
from scripts.simulation import Simulation, Times
from speculation.growth import parse_growth
from speculation.selection import BestFirst
from wire.messages import Acceptance, Candidates, Message, OpenSession
from wire.sampling import Sampling

VOCAB_SIZE = 32
TIMES = Times(rtt_s=0.086, verify_s=0.034, verify_row_s=0.0001, free_rows=16, draft_s=0.003, prefill_token_s=0.0005)


def simulation(num_slots: int, *, growth: str = "tree:4x3", max_rows: int = 16, **options: Any) -> Simulation:
    target = hash_logits(VOCAB_SIZE, 17)
    return Simulation(
        target=ScriptedTarget(target, num_slots=num_slots, max_rows=max_rows, vocab_size=VOCAB_SIZE),
        drafter=ScriptedDrafter(agreeing(target, 0.7, 1), num_slots=num_slots, max_rows=64, vocab_size=VOCAB_SIZE),
        growth=parse_growth(growth), selection=BestFirst(max_rows), vocab_size=VOCAB_SIZE,
        **({"times": TIMES} | options),
    )  # fmt: skip


def prompt_of(number: int) -> tuple[int, ...]:
    return tuple(random.Random(number).choices(range(VOCAB_SIZE), k=1 + 5 * (number % 7)))


@pytest.mark.parametrize("num_sessions", [2, 9, 24])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"local": (True, True)},
        {"growth": "chain:4", "patience_s": 1.0},
        {"growth": "chain:3", "patience_s": 1.0, "shared_device": True, "times": Times(rtt_s=0.0)},
        {"growth": "chain:2+14", "max_rows": 4},
    ],
    ids=["streamed trees", "with local drafter", "synchronous", "one device", "fewer rows than sessions"],
)
def test_each_of_many_answers_is_the_targets_own(num_sessions: int, how: dict[str, Any]) -> None:
    """Greedy and sampled ones, opened at random times, over a link that shuffles frames."""
    rng = random.Random(5)

    def fault(leg: str, message: Message) -> tuple[float, ...]:
        late = isinstance(message, Candidates | Acceptance) and not how.get("shared_device")
        return (rng.random() * 0.02 if late else 0.0,)

    many = simulation(16, fault=fault, **how)
    wanted = {}
    for number in range(num_sessions):
        sampling = Sampling(temperature=0.8, seed=number) if number % 2 else Sampling()
        many.open(
            OpenSession(session=f"s{number}", prompt_ids=prompt_of(number), max_tokens=20, sampling=sampling),
            at_s=rng.random() * 0.3,
        )
        wanted[f"s{number}"] = reference(hash_logits(VOCAB_SIZE, 17), sampling, prompt_of(number), 20)
    many.run()
    assert {name: tuple(answer.tokens) for name, answer in many.answers.items()} == wanted
    if num_sessions > 2:
        num_passes = len({busy.start_s for busy in many.busy if busy.kind == "verify"})
        assert num_passes < sum(busy.kind == "verify" for busy in many.busy)


def test_many_sessions_get_equal_shares_and_more_together_than_one_alone() -> None:
    speeds = {}
    for num_sessions in (1, 3, 9):
        many = simulation(9, max_rows=32)
        for number in range(num_sessions):
            many.open(OpenSession(session=f"s{number}", prompt_ids=prompt_of(number), max_tokens=40))
        many.run()
        each = [answer.tokens_per_s for answer in many.answers.values()]
        assert min(each) >= 0.7 * sum(each) / len(each)
        speeds[num_sessions] = sum(each)
    assert speeds[3] > 2 * speeds[1]
    assert speeds[9] > 2 * speeds[3]


def test_while_one_session_waits_for_its_round_trip_others_use_the_target() -> None:
    """Synchronous rounds: 120 ms for one session, of which the target works 34."""
    busy = {}
    for num_sessions in (1, 4):
        many = simulation(4, growth="chain:3", patience_s=5.0, max_rows=4)
        for number in range(num_sessions):
            many.open(OpenSession(session=f"s{number}", prompt_ids=prompt_of(number), max_tokens=60))
        many.run()
        busy[num_sessions] = many.busy_share("verify", 0.5, 1.5)
    assert busy[1] < 0.35
    assert busy[4] > 0.95


def test_on_one_device_a_round_costs_the_drafts_and_the_pass() -> None:
    """Three sessions in lockstep: three draft steps for all, then one pass for all."""
    times = Times(rtt_s=0.0, verify_s=0.034, draft_s=0.003)
    many = simulation(3, growth="chain:3", patience_s=5.0, shared_device=True, times=times)
    for number in range(3):
        many.open(OpenSession(session=f"s{number}", prompt_ids=(number, 3), max_tokens=40))
    many.run(until_s=0.5)
    passes = sorted({busy.start_s for busy in many.busy if busy.kind == "verify"})
    for start_s in passes[1:9]:
        assert sum(busy.start_s == start_s for busy in many.busy if busy.kind == "verify") == 3
    gaps = [later - earlier for earlier, later in itertools.pairwise(passes[1:10])]
    assert gaps == pytest.approx([0.034 + 3 * 0.003] * 8, abs=1e-4)
    for one in many.busy:
        for other in many.busy:
            if one.kind != other.kind:
                assert one.end_s <= other.start_s + 1e-9 or other.end_s <= one.start_s + 1e-9


def test_sessions_without_a_slot_wait_in_line_and_are_told_their_place() -> None:
    many = simulation(2)
    for number in range(5):
        many.open(OpenSession(session=f"s{number}", prompt_ids=(1, 2), max_tokens=10), at_s=number * 0.001)
    many.run()
    places = [many.answers[f"s{number}"].places for number in range(5)]
    assert places[:2] == [[], []]
    assert [told[0] for told in places[2:]] == [1, 2, 3]
    for told in places[2:]:
        assert told == sorted(told, reverse=True)
        assert told[-1] == 1
    assert all(answer.finish_reason == "length" for answer in many.answers.values())
