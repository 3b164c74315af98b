"""Who serves a session with whom: what the router knows of peers and sessions, and its choices among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from relay.fit import misfit
from wire.messages import Hello, ModelIdentity


@dataclass(slots=True)
class Peer:
    """A client or node that has been let in. `sessions` is an ordered set."""

    id: str
    hello: Hello
    draining: bool = False
    num_malformed: int = 0
    sessions: dict[str, None] = field(default_factory=dict)

    @property
    def load(self) -> float:
        """Sessions relative to capacity."""
        return len(self.sessions) / self.hello.capacity

    @property
    def has_room(self) -> bool:
        """Whether a draft node can take one more session; a full one would refuse. A verify node queues."""
        return self.load < 1 and not self.draining

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
        epoch: counts its pairings with a draft node.
        refused: draft nodes that failed it.
    """

    id: str
    client: str
    verify: str
    speculate: bool
    opened_at: float
    draft: str | None = None
    epoch: int = 0
    refused: set[str] = field(default_factory=set)


def choose_verify(model: str, nodes: Sequence[Peer]) -> tuple[Peer | None, str]:
    """The verify node with the least load that serves `model` ("" for any), or None and why there is none."""
    serving = [node for node in nodes if model in ("", node.model.name)]
    ready = [node for node in serving if not node.draining]
    if ready:
        return min(ready, key=lambda node: node.load), ""
    if serving:
        return None, f"every verify node for {model or 'any model'} is draining"
    names = ", ".join(sorted({node.model.name for node in nodes})) or "none"
    return None, f"no verify node serves {model or 'any model'}; connected models: {names}"


def choose_draft(session: Session, target: ModelIdentity, nodes: Sequence[Peer]) -> Peer | None:
    """The draft node with the least load that fits the target, has room and has not failed this session."""
    ready = [
        node
        for node in nodes
        if node.has_room and node.id not in session.refused and misfit(node.model, target) is None
    ]
    return min(ready, key=lambda node: node.load, default=None)


def fits_none(draft: Peer, verify_nodes: Sequence[Peer]) -> str | None:
    """Why the draft node fits none of the verify nodes; None if it fits one, or if there are none."""
    reasons = [(node, misfit(draft.model, node.model)) for node in verify_nodes]
    if not reasons or any(reason is None for _, reason in reasons):
        return None
    return f"{draft} fits no verify node: " + "; ".join(f"{node}: {reason}" for node, reason in reasons[:3])
