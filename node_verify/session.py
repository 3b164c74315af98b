"""What the verify node's scheduler hands out, and what it remembers of a session."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from enum import Enum, auto

from node_verify.requests import Request
from node_verify.text import AnswerText
from speculation.passes import Sampling, VerifyPass
from speculation.selection import Estimates
from speculation.stats import SessionStats
from speculation.tree import Tree
from wire.messages import Message, RoundTiming

MAX_UNANSWERED_FRAMES = 256


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the relay."""

    message: Message


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """Have the runner open a slot."""

    slot: int
    sampling: Sampling
    tokens: tuple[int, ...]
    num_prompt: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """Have the runner free a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session is over, for metrics and traces."""

    session: str
    finish_reason: str
    report: dict[str, float]


Action = Send | OpenSlot | CloseSlot | SessionEnded


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run positions start..end-1 of a session's prompt through the target."""

    session: str
    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Verify:
    """What a pass does for one session.

    Attributes:
        sources: where the candidates of rows 1, 2, ... came from.
        depth: of their longest path.
    """

    session: str
    request: VerifyPass
    sources: tuple[str, ...]
    depth: int


Work = Prefill | Verify


class State(Enum):
    """See the docstring of `node_verify/scheduler.py`."""

    OPENING = auto()
    WAITING = auto()
    PREFILL = auto()
    RUNNING = auto()


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A candidates frame that no acceptance has answered yet."""

    frame: int
    arrived_at: float
    relay_s: float
    draft_s: float = 0.0
    draft_overhead_s: float = 0.0


@dataclass(slots=True)
class RoundSums:
    """What this node knows of the rounds of a session, added up, in seconds; `report` gives means.

    Each duration was taken by the clock of the node it is about. The way between draft node and relay is not among
    them: nobody tells this node how long that is.
    """

    num: int = 0
    draft_s: float = 0.0
    draft_overhead_s: float = 0.0
    relay_s: float = 0.0
    hop_s: float = 0.0
    queue_s: float = 0.0
    verify_s: float = 0.0
    verify_overhead_s: float = 0.0

    def add(self, frame: ReceivedFrame, timing: RoundTiming, hop_rtt_s: float) -> None:
        """Count a frame that is being answered."""
        self.num += 1
        self.draft_s += frame.draft_s
        self.draft_overhead_s += frame.draft_overhead_s
        self.relay_s += timing.relay_s
        self.hop_s += hop_rtt_s
        self.queue_s += timing.queue_s
        self.verify_s += timing.verify_s
        self.verify_overhead_s += timing.overhead_s

    def report(self) -> dict[str, float]:
        """For `Done.report`: round_WHAT_s for each of the sums, over the frames answered; nothing without any."""
        names = [each.name for each in fields(self) if each.name != "num"]
        return {f"round_{name}": getattr(self, name) / self.num for name in names} if self.num else {}


@dataclass(slots=True)
class Session:
    """One session of the verify node."""

    id: str
    opened_at: float
    state: State = State.OPENING
    slot: int = -1
    request: Request | None = None
    text: AnswerText | None = None
    tree: Tree | None = None
    num_prefilled: int = 0
    estimates: Estimates = field(default_factory=Estimates)
    epoch: int = 0
    draft: str = ""
    """Name of the draft node that is paired."""
    drafting: bool = False
    """Whether a draft node is paired and in good standing."""
    frames: deque[ReceivedFrame] = field(default_factory=lambda: deque(maxlen=MAX_UNANSWERED_FRAMES))
    orphan_frame: int = -1
    idle_since: float = 0.0
    stats: SessionStats = field(default_factory=SessionStats)
    rounds: RoundSums = field(default_factory=RoundSums)
    compute_s: float = 0.0
    overhead_s: float = 0.0
    started_at: float = 0.0
    first_token_at: float | None = None

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens that the target has not read; the last one is row 0 of the first pass."""
        assert self.request is not None
        return len(self.request.known_ids) - 1 - self.num_prefilled

    def report(self, now: float) -> dict[str, float]:
        """For `Done.report`: statistics, a mean round, and where the time of the answer went at this node."""
        times = {
            "verify_compute_s": self.compute_s,
            "verify_overhead_s": self.overhead_s,
            "waited_for_slot_s": max(0.0, self.started_at - self.opened_at),
            "first_token_s": (self.first_token_at or now) - self.opened_at,
            "answer_s": now - self.opened_at,
        }
        return self.stats.report() | self.rounds.report() | times


def work_slot(work: Work) -> int:
    """The cache slot that a piece of work uses."""
    return work.slot if isinstance(work, Prefill) else work.request.slot
