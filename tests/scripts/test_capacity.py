"""The capacity benchmark's arithmetic, and its co-located server, on small loads."""

from __future__ import annotations

import pytest

from engine.replay import Pace, Recording, ReplayDrafter, ReplayTarget, emulated
from scripts.capacity_load import Answered, Capacity, measured, sessions_at, shares
from scripts.capacity_report import expected_ratio, ratios
from scripts.colocated import ColocatedServer


def recording(number: int, num_tokens: int = 40) -> Recording:
    answer = tuple(range(1000 * number, 1000 * number + num_tokens))
    return Recording(kind="chat", prompt=(7, number), answer=answer, tops=((1,),) * num_tokens)


RECORDINGS = [recording(number) for number in range(1, 17)]


def capacity(num_sessions: int, per_session: float, **speeds: float) -> Capacity:
    return Capacity(num_sessions, num_sessions * per_session, {(int(k[1:]),): v for k, v in speeds.items()}, True)


@pytest.mark.parametrize("num_users", [1, 2, 3, 4, 8, 16])
def test_users_ask_all_texts_about_as_often_and_never_one_twice(num_users: int) -> None:
    users = shares([*RECORDINGS, recording(99, num_tokens=3)], num_users, 40)
    asked = [recording.prompt for user in users for recording in user]
    assert all(len({each.prompt for each in user}) == len(user) >= 2 for user in users)
    assert len(set(asked)) == 16 if num_users in (1, 16) else len(set(asked)) >= 8
    with pytest.raises(ValueError, match="41 tokens"):
        shares(RECORDINGS, num_users, 41)


def test_tokens_count_while_all_users_are_busy() -> None:
    users = []
    for late in (0.0, 1.0):
        answers = [Answered(RECORDINGS[0], 0.0), Answered(RECORDINGS[1], 5.0)]
        answers[0].take((1000, 1001), 1.0 + late)
        answers[0].take((1002,), 4.0)
        answers[1].take((2000, 2001, 2002), 6.0 + late)
        users.append(answers)
    found = measured(users)
    # From 2.0, when both have begun, to 6.0, when the first is through: two single tokens and a block of three.
    assert found.tokens_per_s == pytest.approx(5 / 4)
    assert found.equal
    users[0][0].take((9,), 6.0)
    assert not measured(users).equal


def test_sessions_at_a_rate_lie_between_the_measured_numbers_or_follow_from_saturation() -> None:
    curve = [capacity(1, 60.0), capacity(4, 40.0), capacity(16, 20.0)]
    assert sessions_at(61.0, curve) == 0.0
    assert sessions_at(50.0, curve) == pytest.approx(2.5)
    assert sessions_at(20.0, curve) == pytest.approx(16.0)
    assert sessions_at(10.0, curve) == pytest.approx(32.0)


def test_a_share_is_fair_by_the_mean_speed_or_by_what_the_text_gets_alone() -> None:
    alone = capacity(1, 60.0, t1=40.0, t2=80.0)
    assert capacity(2, 30.0, t1=20.0, t2=40.0).least_share(alone) == pytest.approx(1.0)  # each keeps a half
    assert capacity(2, 30.0, t1=30.0, t2=30.0).least_share(alone) == pytest.approx(1.0)  # both have the same
    assert capacity(2, 30.0, t1=10.0, t2=50.0).least_share(alone) == pytest.approx(10 / 40 / ((0.25 + 0.625) / 2))


def test_ours_is_held_against_the_co_located_server_of_its_setting() -> None:
    curves = {
        "paced, 16 rows, pipeline": [capacity(1, 60.0), capacity(4, 40.0)],
        "paced, 16 rows, co-located γ=4": [capacity(1, 50.0), capacity(4, 20.0)],
        "native, pipeline": [capacity(1, 60.0)],
    }
    assert ratios(curves) == {"paced, 16 rows, pipeline": {"1": 2.5, "4": 2.0}}
    assert expected_ratio(4) == pytest.approx(1 + 4 * 3 / 34)


class Timed(ReplayTarget):
    """Counts passes, and the rows of each."""

    rows: list[int]

    def verify(self, batch):  # type: ignore[no-untyped-def]
        self.rows.append(sum(len(request.tokens) for request in batch))
        return super().verify(batch)


class Stepped(ReplayDrafter):
    num_steps = 0

    def step(self, batch):  # type: ignore[no-untyped-def]
        self.num_steps += 1
        return super().step(batch)


@pytest.mark.parametrize("max_rows", [64, 8])
def test_the_co_located_server_drafts_gamma_steps_a_pass_and_answers_as_recorded(max_rows: int) -> None:
    recordings = RECORDINGS[:4]
    sizes = {"pace": Pace(0.0), "num_slots": 4, "max_length": 128, "real_time": False}
    target = Timed(recordings, max_rows=max_rows, **sizes)  # type: ignore[arg-type]
    target.rows = []
    drafter = Stepped(recordings, emulated, **sizes)  # type: ignore[arg-type]
    server = ColocatedServer(target, drafter, gamma=3, max_rows=max_rows)
    users = server.run(shares(recordings, 4, 40), 40)
    assert all(len(answers) == 2 for answers in users)
    for answers in users:
        for answer in answers:
            assert tuple(answer.tokens) == answer.recording.answer
    assert max(target.rows) <= max_rows
    # A pass for all, or for as many as there are rows for; each behind three steps, at the end of an answer fewer.
    assert max(target.rows) == min(max_rows, 16)
    assert 2.5 * len(target.rows) < drafter.num_steps <= 3 * len(target.rows) + 3
