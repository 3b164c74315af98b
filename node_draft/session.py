"""What the draft node's scheduler hands out, and what it remembers of a session."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from speculation.growth import Frontier
from speculation.passes import Sampling
from speculation.tree import Tree
from wire.messages import MAX_ROUNDS_PER_FRAME, Acceptance, AppliedRound, Message, RoundTiming


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to the relay."""

    message: Message


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """Have the runner open a slot."""

    slot: int
    sampling: Sampling
    num_prompt: int


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """Have the runner free a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class FrameAnswered:
    """A frame's round is over: what the draft node knows of it, for the ledger. Times are this node's clock."""

    session: str
    started_at: float
    sent_at: float
    draft_s: float
    timing: RoundTiming
    acceptance: Acceptance


Action = Send | OpenSlot | CloseSlot | FrameAnswered


@dataclass(slots=True)
class Counters:
    """What the drafter did, for metrics and traces."""

    num_steps: int = 0
    num_rows: int = 0
    num_nodes: int = 0
    num_wasted: int = 0
    num_frames: int = 0
    num_resends: int = 0
    num_resyncs: int = 0
    num_stale_messages: int = 0


@dataclass(slots=True)
class SentFrame:
    """A frame in flight."""

    started_at: float
    sent_at: float
    draft_s: float


@dataclass(slots=True)
class Session:
    """One session of the draft node."""

    id: str
    epoch: int
    slot: int
    total: int
    limit: int
    digest: str
    num_prompt: int
    sampling: Sampling
    parts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    tree: Tree | None = None
    """None while the prefix is loading."""
    num_cached: int = 0
    """Committed rows of the cache, once the next step has settled it."""
    cached: set[int] = field(default_factory=set)
    """Nodes that have been through the model and are alive or newly accepted."""
    accepted: list[int] = field(default_factory=list)
    """Nodes accepted since the last step was given out, in path order."""
    frontier: Frontier = field(default_factory=Frontier)
    next_node: int = 0
    next_frame: int = 0
    unsent: list[int] = field(default_factory=list)
    """Live nodes that have not been sent, parents first; some may never be good enough."""
    wire_ids: dict[int, int] = field(default_factory=dict)
    """Ids under which live nodes were sent: a resend gives them new ones, the cache keeps the old."""
    next_wire_id: int = 0
    in_flight: OrderedDict[int, SentFrame] = field(default_factory=OrderedDict)
    applied: deque[AppliedRound] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS_PER_FRAME))
    """Rounds that are over and that the relay has not been told of."""
    flushed_at: float = float("-inf")
    verify_s: float | None = None
    """Duration of a pass of the target, as last reported."""
    wanted: bool = True
    """Whether the verify node wants candidates."""
    resend_floor: int = 0
    """Orphans in frames below it are known about."""
    resync_at: int = -1
    started_at: float | None = None
    draft_s: float = 0.0

    @property
    def tip_position(self) -> int:
        """Position that the deepest path proposes next; for traces. The prefix is there."""
        assert self.tree is not None
        return max((node.position for node in self.tree.nodes.values()), default=self.tree.length - 1) + 1

    def take_answered(self, timing: RoundTiming) -> SentFrame | None:
        """The frame that has been answered, if it was in flight; the ones before it are not waited for any more.

        They were lost, or will be answered out of turn.
        """
        self.verify_s = timing.verify_s + timing.overhead_s
        sent = self.in_flight.pop(timing.frame, None)
        for frame in [frame for frame in self.in_flight if frame < timing.frame]:
            del self.in_flight[frame]
        return sent
