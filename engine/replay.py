"""Runners that play recorded answers back at stated speeds, for benchmarks and simulation.

A *recording* holds what a real target committed on a prompt, its most probable tokens at each position, and what a
real drafter proposed there. `ReplayTarget` answers from it as the target would; `ReplayDrafter` proposes from it (what
the drafter said on the true path), or emulates a drafter of stated quality. Both keep to a stated duration of a pass;
whatever the code around them costs comes on top, as in life.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.errors import CacheError, EngineError
from engine.noise import mix64
from engine.slots import Slots, one_by_one
from speculation.passes import Child, DraftResult, DraftStep, Sampling, VerifyPass, VerifyResult
from speculation.walk import walk

Proposals = tuple[Child, ...]
Propose = Callable[[int, bool, int], Proposals]
"""(index in the answer, whether the path so far is the answer's, a hash of the path) -> children, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One greedy answer.

    Attributes:
        kind: of the prompt (chat, code, ...).
        prompt, answer: token ids.
        tops: at each position of the answer, the target's most probable tokens, best first.
        drafted: at each position of the answer, a drafter's children behind the true path; empty if not recorded.
    """

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    tops: tuple[tuple[int, ...], ...]
    drafted: tuple[tuple[tuple[int, float], ...], ...] = ()


def save_recordings(path: Path, recordings: Sequence[Recording]) -> None:
    """Write them as compressed JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump([asdict(recording) for recording in recordings], file)


def load_recordings(path: Path) -> list[Recording]:
    """Read what `save_recordings` wrote.

    Raises:
        EngineError: there is no such file, or it holds something else.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = json.load(file)
        return [
            Recording(
                kind=row["kind"],
                prompt=tuple(row["prompt"]),
                answer=tuple(row["answer"]),
                tops=tuple(map(tuple, row["tops"])),
                drafted=tuple(tuple((int(t), float(lp)) for t, lp in at) for at in row["drafted"]),
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise EngineError(f"{path} holds no recordings: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Pace:
    """Duration of a pass: `base_s`, and `row_s` for each row beyond the `free_rows` first."""

    base_s: float
    row_s: float = 0.0
    free_rows: int = 1

    def seconds(self, num_rows: int) -> float:
        """Of a pass over so many rows."""
        return self.base_s + self.row_s * max(0, num_rows - self.free_rows)

    @classmethod
    def parse(cls, text: str) -> Pace:
        """`MS`, `MS+ROW_MS` or `MS+ROW_MS/FREE_ROWS`, as in 34+0.1/16.

        Raises:
            ValueError: naming the value and the form.
        """
        base, _, rest = text.partition("+")
        row, _, free = rest.partition("/")
        try:
            pace = cls(float(base) / 1e3, float(row or 0) / 1e3, int(free or 1))
        except ValueError:
            raise ValueError(f"pace must be MS, MS+ROW_MS or MS+ROW_MS/FREE_ROWS; got {text!r}") from None
        if not (0 <= pace.base_s <= 60 and 0 <= pace.row_s <= 60 and pace.free_rows >= 1):
            raise ValueError(f"pace must have 0..60000 ms and at least one free row; got {text!r}")
        return pace


def find_answer(recordings: Sequence[Recording], tokens: Sequence[int]) -> Recording | None:
    """The recording whose prompt begins these tokens."""
    for recording in recordings:
        if tuple(tokens[: len(recording.prompt)]) == recording.prompt:
            return recording
    return None


@dataclass(slots=True)
class _TargetSlot:
    recording: Recording | None
    num_prompt: int
    num_tokens: int
    num_cached: int
    stop_ids: tuple[int, ...]


class ReplayTarget:
    """`TargetRunner` that commits recorded answers; behind the end of one, and on unknown prompts, token 0."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        *,
        pace: Pace,
        num_slots: int = 1,
        max_length: int = 4096,
        max_rows: int = 64,
        real_time: bool = True,
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.max_rows = max_rows
        self._recordings = list(recordings)
        self._pace = pace
        self._real_time = real_time
        self._slots: Slots[_TargetSlot] = Slots(num_slots)

    def open(
        self, slot: int, *, sampling: Sampling, tokens: Sequence[int], num_prompt: int, stop_ids: Sequence[int]
    ) -> None:
        """See `TargetRunner.open`; the recordings are greedy, so the sampling parameters do not matter."""
        recording = find_answer(self._recordings, tokens)
        self._slots.open(slot, _TargetSlot(recording, num_prompt, len(tokens), 0, tuple(stop_ids)))

    def prefill(self, slot: int, start: int, end: int) -> None:
        """See `TargetRunner.prefill`; takes no time."""
        self._slots[slot].num_cached = end

    def verify(self, batch: Sequence[VerifyPass]) -> list[VerifyResult | Exception]:
        """See `TargetRunner.verify`: one pass, which lasts as long as its rows of all sessions together make it."""
        began_at = time.perf_counter()
        results = one_by_one(batch, self._verify)
        seconds = self._pace.seconds(sum(len(request.tokens) for request in batch))
        if self._real_time:
            sleep_until(began_at + seconds)
        return [each if isinstance(each, Exception) else replace(each, compute_s=seconds) for each in results]

    def close(self, slot: int) -> None:
        """Free the slot. Closing a free slot does nothing."""
        self._slots.close(slot)

    def _verify(self, request: VerifyPass) -> VerifyResult:
        session = self._slots[request.slot]
        if request.start != session.num_tokens:
            raise CacheError(f"a pass from position {request.start}, but {session.num_tokens} tokens are committed")
        recording = session.recording
        first = request.start - session.num_prompt
        answer = recording.answer if recording is not None else ()

        def choose(row: int, path: tuple[int, ...]) -> int:
            index = first + len(path)
            return answer[index] if index < len(answer) else 0

        walked = walk(request.parents, request.tokens, choose, max_tokens=request.max_tokens, stop_ids=session.stop_ids)
        session.num_tokens += len(walked.tokens)
        tops: tuple[tuple[int, ...], ...] = ()
        if request.num_tops and recording is not None:
            tops = tuple(at[: request.num_tops] for at in recording.tops[first : first + len(walked.tokens)])
        return VerifyResult(tokens=walked.tokens, rows=walked.rows, tops=tops)


@dataclass(slots=True)
class _Node:
    """What a cached node's path amounts to: how many tokens of the answer, whether it is the answer's, a hash."""

    index: int
    true: bool
    key: int


@dataclass(slots=True)
class _DraftSlot:
    tokens: list[int] = field(default_factory=list)
    recording: Recording | None = None
    num_prompt: int = 0
    rows: dict[int, _Node] = field(default_factory=dict)


class ReplayDrafter:
    """`DraftRunner` that proposes what `propose` says for each recording."""

    def __init__(
        self,
        recordings: Sequence[Recording],
        propose: Callable[[Recording], Propose],
        *,
        pace: Pace,
        num_slots: int = 1,
        max_length: int = 4096,
        max_rows: int = 512,
        real_time: bool = True,
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.max_rows = max_rows
        self.max_children = 16
        self.max_ahead = 0
        self._recordings = list(recordings)
        self._propose = {recording.prompt: propose(recording) for recording in self._recordings}
        self._pace = pace
        self._real_time = real_time
        self._slots: Slots[_DraftSlot] = Slots(num_slots)

    def open(self, slot: int, *, sampling: Sampling, num_prompt: int) -> None:
        """See `DraftRunner.open`."""
        self._slots.open(slot, _DraftSlot(num_prompt=num_prompt))

    def step(self, batch: Sequence[DraftStep]) -> list[DraftResult | Exception]:
        """See `DraftRunner.step`: one step, which lasts as long as its rows of all sessions together make it."""
        began_at = time.perf_counter()
        children = one_by_one(batch, self._step)
        seconds = self._pace.seconds(max(1, sum(len(request.nodes) + request.expand_root for request in batch)))
        if self._real_time:
            sleep_until(began_at + seconds)
        return [
            found if isinstance(found, Exception) else DraftResult(children=found, compute_s=seconds)
            for found in children
        ]

    def close(self, slot: int) -> None:
        """Free the slot. Closing a free slot does nothing."""
        self._slots.close(slot)

    def _step(self, request: DraftStep) -> dict[int, Proposals]:
        session = self._slots[request.slot]
        # Of an accepted node all that is known is that the target said the same; the answer has the token.
        recording = session.recording
        for node in request.accepted:
            session.rows.pop(node, None)
        if request.commit_start + len(request.commit) > len(session.tokens):
            have = len(session.tokens)
            missing = request.commit_start - have
            if missing > 0 and recording is not None:
                index = have - session.num_prompt
                session.tokens += recording.answer[index : index + missing]
            session.tokens += request.commit
        session.rows = {node: row for node, row in session.rows.items() if node in request.keep}
        if recording is None:
            recording = session.recording = find_answer(self._recordings, session.tokens)
        if recording is None:
            return {}
        propose = self._propose[recording.prompt]
        length = max(request.commit_start + len(request.commit), 1)
        root = _Node(length - session.num_prompt, True, mix64(length))
        children: dict[int, Proposals] = {}
        if request.expand_root:
            children[-1] = propose(root.index, root.true, root.key)[: request.num_children]
        for wanted in request.nodes:
            parent = root if wanted.parent < 0 else session.rows[wanted.parent]
            answer = recording.answer
            true = parent.true and parent.index < len(answer) and answer[parent.index] == wanted.token
            row = _Node(parent.index + 1, true, mix64(parent.key * 31 + wanted.token + 1))
            session.rows[wanted.node] = row
            children[wanted.node] = propose(row.index, row.true, row.key)[: request.num_children]
        return children


def from_trace(recording: Recording) -> Propose:
    """What the recorded drafter said. Off the true path it goes on with the same confidence and other tokens."""

    def propose(index: int, true: bool, key: int) -> Proposals:
        if not 0 <= index < len(recording.drafted):
            return ()
        row = recording.drafted[index]
        if true:
            return tuple(Child(token=token, logprob=logprob) for token, logprob in row)
        return tuple(Child(token=_other(key, rank), logprob=lp) for rank, (_, lp) in enumerate(row))

    return propose


TOP1_FLOOR, TOP1_A, TOP1_B = 0.31, 0.8, 0.5
OTHERS = (0.442, 0.171, 0.100, 0.060, 0.040, 0.030, 0.020)
"""Of the mass that the first child leaves, the shares of the second, third, ...; 2 to 4 have 0.713 of it."""


def emulated(recording: Recording) -> Propose:
    """A drafter with the hit rates measured for a 0.5B drafter of a 7B target: top-1 0.735, top-4 0.924.

    Positions are easy or hard: the first child's probability is 0.31 + 0.69 x, x of a beta distribution (0.8, 0.5),
    which puts most of them near either end and the mean at 0.735. The children that are right, and the scores that are
    given, follow these probabilities: the scores are calibrated. Which position is how hard, and which child is right,
    is a function of the recording alone.
    """
    seed = mix64(len(recording.prompt) * 1_000_003 + sum(recording.prompt))

    def chances(key: int) -> list[float]:
        first = TOP1_FLOOR + (1 - TOP1_FLOOR) * _beta_quantile(_uniform(mix64(seed ^ key)))
        first = min(first, 0.998)
        return [first, *((1 - first) * share for share in OTHERS)]

    def propose(index: int, true: bool, key: int) -> Proposals:
        if true and not 0 <= index < len(recording.answer):
            return ()
        # On the true path the difficulty belongs to the position, off it to the path.
        own = mix64(seed + index * 7919) if true else key
        rates = chances(own)
        right = -1
        if true:
            draw, total = _uniform(mix64(own + 1)), 0.0
            for rank, rate in enumerate(rates):
                total += rate
                if draw < total:
                    right = rank
                    break
        order = sorted(range(len(rates)), key=lambda rank: -rates[rank])
        return tuple(
            Child(
                token=recording.answer[index] if rank == right else _other(own, rank),
                logprob=math.log(rates[rank]),
            )
            for rank in order
        )

    return propose


def _other(key: int, rank: int) -> int:
    """Some token that is hardly the right one."""
    return mix64(key * 17 + rank) % 32_000


def _uniform(bits: int) -> float:
    return (bits >> 11) / 2.0**53


_QUANTILES: list[float] = []


def _beta_quantile(uniform: float, steps: int = 512) -> float:
    """Quantile of the beta distribution (TOP1_A, TOP1_B), from a table of its numerical integral."""
    if not _QUANTILES:
        cells = 20_000
        mass, running = [], 0.0
        for i in range(cells):
            x = (i + 0.5) / cells
            running += x ** (TOP1_A - 1) * (1 - x) ** (TOP1_B - 1)
            mass.append(running)
        at = 0
        for step in range(steps + 1):
            while at < cells - 1 and mass[at] < running * step / steps:
                at += 1
            _QUANTILES.append((at + 0.5) / cells)
    place = uniform * steps
    low = min(int(place), steps - 1)
    return _QUANTILES[low] + (place - low) * (_QUANTILES[low + 1] - _QUANTILES[low])


def sleep_until(when: float) -> None:
    """Sleep until `time.perf_counter()` says `when`; to a tenth of a millisecond."""
    left = when - time.perf_counter()
    if left > 0:
        time.sleep(left)
