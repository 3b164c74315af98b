"""Round trips between all nodes of a relay, from what the relay itself measures (`foredraft-hop --matrix`).

Nodes have no open port, so nothing but the relay reaches them, and every frame between two of them passes it: the round
trip of a pair is the sum of the two hops. They are those of the relay's own small pings. What a payload adds on top is
not measured here: for that run `--listen` with the relay's URL beside one node and `--connect` beside the other.
"""

from __future__ import annotations

import json
import statistics
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 10.0
UNSTEADY = 1.5


class MatrixRefused(Exception):
    """The relay does not answer, or does not let us see its nodes."""


@dataclass(slots=True)
class NodeHop:
    """One node's hop: round trips to the relay in milliseconds, one for each snapshot."""

    name: str
    role: str
    region: str
    rtts_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Of the snapshots."""
        return statistics.median(self.rtts_ms)


def read_snapshots(url: str, secret: str, num: int) -> list[Mapping[str, Any]]:
    """So many snapshots of the status of the relay whose HTTP side is at `url`; they come once a second.

    Raises:
        MatrixRefused: names the address and what is wrong.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise MatrixRefused(
            f"--matrix must be http://HOST:PORT or https://HOST:PORT of the relay's HTTP side, got {url}"
        )
    request = urllib.request.Request(f"{url.rstrip('/')}/status/events", headers={"Authorization": f"Bearer {secret}"})
    found: list[Mapping[str, Any]] = []
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as events:
            for line in events:
                if line.startswith(b"data: "):
                    found.append(json.loads(line[6:]))
                    if len(found) == num:
                        return found
    except urllib.error.HTTPError as exc:
        raise MatrixRefused(f"{url}: {exc.code} {exc.reason}; it needs a secret with the role admin") from exc
    except (OSError, ValueError) as exc:
        raise MatrixRefused(f"{url}: {exc}") from exc
    raise MatrixRefused(f"{url}: the events ended after {len(found)} of {num}")


def node_hops(snapshots: Iterable[Mapping[str, Any]]) -> list[NodeHop]:
    """Each node's hop; one that was never measured is left out."""
    hops: dict[str, NodeHop] = {}
    for snapshot in snapshots:
        for node in snapshot["nodes"]:
            if node["rtt_ms"] is not None:
                hop = hops.setdefault(node["id"], NodeHop(node["name"], node["role"], node["region"]))
                hop.rtts_ms.append(node["rtt_ms"])
    return list(hops.values())


def matrix_figures(hops: Sequence[NodeHop]) -> dict[str, Any]:
    """As JSON has it: each node, each pair of a draft and a verify node from the nearest on, and what is odd."""
    pairs = [
        {"draft": draft.name, "verify": verify.name, "rtt_ms": round(draft.median_ms + verify.median_ms, 2)}
        for draft in hops
        if draft.role == "draft"
        for verify in hops
        if verify.role == "verify"
    ]
    return {
        "nodes": [
            {"name": hop.name, "role": hop.role, "region": hop.region, "rtt_ms": round(hop.median_ms, 2),
             "least_ms": min(hop.rtts_ms), "most_ms": max(hop.rtts_ms)}
            for hop in hops
        ],
        "pairs": sorted(pairs, key=lambda pair: float(pair["rtt_ms"])),
        "odd": [
            f"{hop.role} node {hop.name}: its round trip moves between {min(hop.rtts_ms):g} and {max(hop.rtts_ms):g} ms"
            for hop in hops
            if max(hop.rtts_ms) > UNSTEADY * min(hop.rtts_ms) and max(hop.rtts_ms) - min(hop.rtts_ms) > 1
        ],
    }  # fmt: skip


def matrix_text(figures: Mapping[str, Any]) -> str:
    """For people: draft nodes down, verify nodes across, ms there and back through the relay."""
    nodes: dict[str, list[Mapping[str, Any]]] = {
        role: [node for node in figures["nodes"] if node["role"] == role] for role in ("draft", "verify")
    }
    lines = [f"{'ms there and back':28}" + "".join(f"{node['name'][:15]:>16}" for node in nodes["verify"])]
    lines.append(f"{'  to the relay alone':28}" + "".join(f"{node['rtt_ms']:16.2f}" for node in nodes["verify"]))
    for draft in nodes["draft"]:
        cells = "".join(f"{draft['rtt_ms'] + verify['rtt_ms']:16.2f}" for verify in nodes["verify"])
        lines.append(f"{draft['name'][:17]:18}{draft['rtt_ms']:9.2f} {cells}")
    lines += [f"there is no {role} node" for role, found in nodes.items() if not found]
    lines.append("round trips of small pings, through the relay; a payload's bytes come on top")
    return "\n".join([*lines, *(f"odd: {what}" for what in figures["odd"])])
