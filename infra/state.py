"""What exists of a deployment, as found by its tags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

GLOBAL = "global"
"""The region of what belongs to no region."""

SHARED_SECRET = "secret"
"""The slot of what `up` makes; another of the kind is the certificate that a relay has published."""


class Kind(StrEnum):
    """Everything that a deployment can consist of. The order is the order in which it is removed."""

    INSTANCE = "instance"
    ADDRESS = "address"
    VOLUME = "volume"
    FIREWALL = "firewall"
    ROUTES = "routes"
    SUBNET = "subnet"
    GATEWAY = "gateway"
    NETWORK = "network"
    PROFILE = "profile"
    SECRET = "secret"
    LOGS = "logs"


class Life(StrEnum):
    """How far an instance is. Only the first two count as existing for `up`."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    ENDING = "ending"
    ENDED = "ended"


def firewall_rules(rules: Iterable[tuple[int, str]]) -> str:
    """Ports and the networks that may come in there, as one text: the fingerprint of a firewall."""
    return ", ".join(f"{port} from {network}" for port, network in sorted(rules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One thing that exists.

    Attributes:
        slot: of an instance, the machine it is; of others, the role they serve or "".
        fingerprint: of an instance its machine's, of a firewall its rules.
        detail: what else tells two of a kind apart: an address, a zone.
        since: when it was launched, ISO 8601.
        reason: why an instance is in its state, if the cloud says so: "Client.VolumeLimitExceeded: ...".
        complete: false for what a failed run left half made (a group without its rule, a role without its profile).
    """

    kind: Kind
    region: str
    id: str
    slot: str = ""
    life: Life | None = None
    instance_type: str = ""
    zone: str = ""
    market: str = ""
    fingerprint: str = ""
    expires_at: str = ""
    since: str = ""
    detail: str = ""
    reason: str = ""
    attached_to: str = ""
    complete: bool = True

    def __str__(self) -> str:
        named = f" {self.slot}" if self.slot else ""
        return f"{self.kind.value}{named} {self.id} in {self.region}"


@dataclass(frozen=True, slots=True)
class Observed:
    """All of it."""

    resources: tuple[Resource, ...] = ()

    def of(self, kind: Kind, *, region: str | None = None, slot: str | None = None) -> list[Resource]:
        return [r for r in self.resources if r.kind is kind and region in (None, r.region) and slot in (None, r.slot)]

    def alive(self, slot: str | None = None) -> list[Resource]:
        """Instances that run or are about to, the longest known first."""
        found = [r for r in self.of(Kind.INSTANCE, slot=slot) if r.life in (Life.STARTING, Life.RUNNING)]
        return sorted(found, key=lambda r: r.since)

    def addresses(self, region: str | None = None) -> list[Resource]:
        """The relay's addresses, the one in use first: a create call whose answer was lost may have left another."""
        return sorted(self.of(Kind.ADDRESS, region=region), key=lambda r: not r.attached_to)

    def remaining(self) -> list[Resource]:
        """What still costs or stands in the way: all but instances that have ended."""
        return [r for r in self.resources if r.life is not Life.ENDED]

    def without(self, others: Iterable[Resource]) -> Observed:
        known = {(r.kind, r.region, r.id) for r in others}
        return Observed(tuple(r for r in self.resources if (r.kind, r.region, r.id) not in known))
