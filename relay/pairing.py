"""Who serves a session with whom: what the router knows of peers and sessions, and its choices among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from relay.fit import misfit
from relay.kept import KeptAnswer
from wire.messages import Hello, ModelIdentity

MAX_SESSIONS_PER_CLIENT = 256
UNKNOWN_RTT_S = 0.2
"""Taken for a peer whose round trip has not been measured yet."""
LOAD_COST_S = 0.1
"""What a node's load adds to its round trip when nodes are compared: a full one counts as 100 ms farther away."""
QUEUE_COST_S = 10.0
"""What each capacity's worth of sessions beyond a verify node's slots adds: they wait for whole answers."""


@dataclass(slots=True)
class Peer:
    """A client or node that has been let in.

    Attributes:
        group: peers with one credential have their sessions counted together.
        credential: name of the one that it came with.
        rtt_s: measured round trip to it, None before the first.
        sessions: an ordered set.
    """

    id: str
    hello: Hello
    group: str = ""
    max_sessions: int = MAX_SESSIONS_PER_CLIENT
    credential: str = ""
    draining: bool = False
    num_malformed: int = 0
    rtt_s: float | None = None
    sessions: dict[str, None] = field(default_factory=dict)

    @property
    def load(self) -> float:
        """Sessions relative to capacity."""
        return len(self.sessions) / self.hello.capacity

    @property
    def cost_s(self) -> float:
        """How much one more session would rather be elsewhere: round trip, load, and the line behind a full node."""
        rtt_s = self.rtt_s if self.rtt_s is not None else UNKNOWN_RTT_S
        # A session more: of two empty nodes the larger is left emptier.
        load = (len(self.sessions) + 1) / self.hello.capacity
        return rtt_s + LOAD_COST_S * load + QUEUE_COST_S * max(0.0, load - 1)

    @property
    def has_room(self) -> bool:
        """Whether a draft node can take one more session; a full one would refuse. A verify node queues."""
        return self.load < 1 and not self.draining

    def is_called_like(self, other: Peer) -> bool:
        """Whether the two may be one node that has come twice."""
        mine, its = self.hello, other.hello
        return (mine.role, mine.name, self.credential) == (its.role, its.name, other.credential)

    @property
    def model(self) -> ModelIdentity:
        """What a node serves."""
        assert self.hello.model is not None, "nodes have a model, as Hello checks"
        return self.hello.model

    def __str__(self) -> str:
        return f"{self.hello.role} node {self.hello.name}"


@dataclass(slots=True)
class Session:
    """Who serves one session; peers are named by id.

    Attributes:
        client: None while it is away.
        verify: None while a replacement is waited for, and when the answer is complete.
        target: the model that serves; a replacement must have its fingerprint.
        kept: what a replacement and a client that was away need; None if that would take too much memory.
        last: the frame that ended the session, for a client that is away.
        epochs_from: before its first epoch. Another for each session, as candidates may still be under way that were
            drafted for an earlier one of the same name.
        epoch: counts its pairings with a draft node.
        refused: draft nodes that failed it.
        lost: how it lost its verify node, in words; "" while it is with its first one.
        lost_at: when that was.
        full: verify nodes that had no place for it when it was sent there.
    """

    id: str
    client: str | None
    verify: str | None
    speculate: bool
    opened_at: float
    target: ModelIdentity
    kept: KeptAnswer | None = None
    resume_key: str = ""
    last: bytes | None = None
    draft: str | None = None
    epochs_from: int = 0
    epoch: int = 0
    refused: set[str] = field(default_factory=set)
    lost: str = ""
    lost_at: float = 0.0
    full: set[str] = field(default_factory=set)


def choose_verify(model: str, fingerprint: str, nodes: Sequence[Peer]) -> tuple[Peer | None, str]:
    """The verify node that costs least, or None and why there is none.

    Args:
        model: name asked for, "" for any.
        fingerprint: of the model that began the answer, "" for a new one.
    """
    serving = [node for node in nodes if model in ("", node.model.name)]
    same = [node for node in serving if fingerprint in ("", node.model.fingerprint)]
    ready = [node for node in same if not node.draining]
    if ready:
        return min(ready, key=lambda node: node.cost_s), ""
    if same:
        return None, f"every verify node for {model or 'any model'} is draining"
    names = ", ".join(sorted({node.model.name for node in nodes})) or "none"
    if serving:
        return None, f"no verify node serves the very model that began this answer; connected models: {names}"
    return None, f"no verify node serves {model or 'any model'}; connected models: {names}"


def choose_draft(session: Session, nodes: Sequence[Peer]) -> Peer | None:
    """The draft node that costs least among those that fit, have room and have not failed this session."""
    ready = [
        node
        for node in nodes
        if node.has_room and node.id not in session.refused and misfit(node.model, session.target) is None
    ]
    return min(ready, key=lambda node: node.cost_s, default=None)


def fits_none(draft: Peer, verify_nodes: Sequence[Peer]) -> str | None:
    """Why the draft node fits none of the verify nodes; None if it fits one, or if there are none."""
    reasons = [(node, misfit(draft.model, node.model)) for node in verify_nodes]
    if not reasons or any(reason is None for _, reason in reasons):
        return None
    return f"{draft} fits no verify node: " + "; ".join(f"{node}: {reason}" for node, reason in reasons[:3])
