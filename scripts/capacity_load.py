"""The load of the capacity benchmark: users who ask one recorded prompt after the other, and what they measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.replay import Recording


@dataclass
class Answered:
    """One answer as it came; times are seconds of one clock."""

    recording: Recording
    opened_at: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def take(self, tokens: Sequence[int], now: float) -> None:
        """Some tokens have come."""
        self.tokens += tokens
        self.times += [now] * len(tokens)

    @property
    def equal(self) -> bool:
        """Whether it is the recorded answer, as far as it goes."""
        return tuple(self.tokens) == self.recording.answer[: len(self.tokens)]

    @property
    def tokens_per_s(self) -> float:
        """From the request to the last token."""
        return len(self.tokens) / (self.times[-1] - self.opened_at)


def shares(recordings: Sequence[Recording], num_users: int, num_tokens: int) -> list[list[Recording]]:
    """What each user asks: all recordings long enough, each about as often, and no user the same twice.

    At least two answers each, so that there is a stretch in which all users are busy.
    """
    usable = [recording for recording in recordings if len(recording.answer) >= num_tokens]
    if not usable:
        raise ValueError(f"no recorded answer has {num_tokens} tokens")
    per_user = max(2, -(-len(usable) // num_users))
    step = next(step for step in (5, 7, 3, 1) if math.gcd(step, len(usable)) == 1)
    return [[usable[(user + turn * step) % len(usable)] for turn in range(per_user)] for user in range(num_users)]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What some users got together.

    Attributes:
        tokens_per_s: of all users, while all of them were busy.
        speeds: of each recording (by its prompt), the mean speed of its answers, tokens/s.
        equal: whether all answers are the recorded ones.
    """

    num_sessions: int
    tokens_per_s: float
    speeds: Mapping[tuple[int, ...], float]
    equal: bool

    @property
    def per_session(self) -> float:
        """Tokens/s of one session."""
        return self.tokens_per_s / self.num_sessions

    def least_share(self, alone: Capacity) -> float:
        """The slowest session's speed over its fair share.

        Texts differ: one that repeats itself is fast alone and in company. A session has its fair share if it is as
        fast as the mean session, or if it keeps as much of the speed that its text has alone as the mean text does;
        whichever it is nearer to counts.
        """
        kept = {prompt: speed / alone.speeds[prompt] for prompt, speed in self.speeds.items() if prompt in alone.speeds}
        mean_kept, mean_speed = statistics.mean(kept.values()), statistics.mean(self.speeds.values())
        return min(max(kept[prompt] / mean_kept, self.speeds[prompt] / mean_speed) for prompt in kept)


def measured(users: Sequence[Sequence[Answered]]) -> Capacity:
    """Figures over what each user was answered."""
    begin = max(answers[0].times[0] for answers in users)
    end = min(answers[-1].times[-1] for answers in users)
    num_tokens = sum(begin < at <= end for answers in users for answer in answers for at in answer.times)
    by_prompt: dict[tuple[int, ...], list[float]] = {}
    for answers in users:
        for answer in answers:
            by_prompt.setdefault(answer.recording.prompt, []).append(answer.tokens_per_s)
    return Capacity(
        num_sessions=len(users),
        tokens_per_s=num_tokens / (end - begin),
        speeds={prompt: statistics.mean(speeds) for prompt, speeds in by_prompt.items()},
        equal=all(answer.equal for answers in users for answer in answers),
    )


def sessions_at(rate: float, curve: Sequence[Capacity]) -> float:
    """How many sessions a server serves at `rate` tokens/s each, between and beyond the numbers it was measured at.

    Beyond the last, its tokens/s are taken to stay what they are (it is saturated); 0 if not even one session gets it.
    """
    ordered = sorted(curve, key=lambda each: each.num_sessions)
    if ordered[0].per_session < rate:
        return 0.0
    for one, more in itertools.pairwise(ordered):
        if more.per_session < rate:
            part = (one.per_session - rate) / (one.per_session - more.per_session)
            return one.num_sessions + part * (more.num_sessions - one.num_sessions)
    return max(float(ordered[-1].num_sessions), ordered[-1].tokens_per_s / rate)
