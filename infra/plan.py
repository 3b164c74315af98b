"""From a spec and what exists to a list of actions. Pure: no clock, no cloud, no randomness.

`plan_up` is what has to be done so that everything of the spec exists and nothing else does; on a deployment that is
up it is empty. `plan_down` removes all that was observed, dependants first. The actions are in an order in which they
can be carried out one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infra.spec import Machine, Spec
from infra.state import GLOBAL, SHARED_SECRET, Kind, Life, Observed, Resource, firewall_rules

NODE_ROLE = "node"
"""Draft and verify nodes share a firewall and a profile: neither of them is reached from outside."""


@dataclass(frozen=True, slots=True)
class EnsureSecret:
    """The shared secret, made up by us and kept in the parameter store of the relay's region."""

    region: str


@dataclass(frozen=True, slots=True)
class EnsureProfile:
    """What instances of `role` may ask the cloud for."""

    role: str
    region: str = GLOBAL


@dataclass(frozen=True, slots=True)
class EnsureLogs:
    """The log group."""

    region: str


@dataclass(frozen=True, slots=True)
class EnsureNetwork:
    """A network of our own, with a subnet in every zone."""

    region: str


@dataclass(frozen=True, slots=True)
class EnsureFirewall:
    """Who may come in: at `port` from `allow_from`, or nobody."""

    region: str
    role: str
    port: int | None = None
    allow_from: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnsureAddress:
    """The relay's fixed address."""

    region: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One instance; zones and types are tried in their order, all zones for the first type first."""

    region: str
    machine: Machine


@dataclass(frozen=True, slots=True)
class AttachAddress:
    """Give the relay its address."""

    region: str
    slot: str = "relay"


@dataclass(frozen=True, slots=True)
class Terminate:
    """End instances and wait until they have ended: firewalls and networks cannot go before."""

    region: str
    resources: tuple[Resource, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove something that is not an instance."""

    region: str
    resource: Resource


Action = (
    EnsureSecret
    | EnsureProfile
    | EnsureLogs
    | EnsureNetwork
    | EnsureFirewall
    | EnsureAddress
    | Launch
    | AttachAddress
    | Terminate
    | Delete
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, and what the user should know although nothing is done about it."""

    relay_region: str
    actions: tuple[Action, ...]
    notes: tuple[str, ...] = ()


def plan_up(spec: Spec, best_relay_region: str, observed: Observed) -> Plan:
    """What is missing. A relay that exists stays where it is: moving it would cut every session."""
    relays = observed.alive("relay")
    addresses = observed.of(Kind.ADDRESS)
    placed = [r.region for r in (*relays, *addresses) if r.region in spec.relay.regions]
    relay_region = placed[0] if placed else best_relay_region
    notes = _notes(spec, relay_region, best_relay_region, observed)
    regions = dict.fromkeys([relay_region, *(node.regions[0] for node in spec.nodes)])
    stay = kept(spec, relay_region, observed)
    actions: list[Action] = list(_surplus(observed, stay.values()))
    if not _whole(observed, Kind.SECRET, relay_region, SHARED_SECRET):
        actions.append(EnsureSecret(relay_region))
    actions += [
        EnsureProfile(role) for role in ("relay", NODE_ROLE) if not _whole(observed, Kind.PROFILE, GLOBAL, role)
    ]
    for region in regions:
        roles = [
            role
            for role, wanted in (
                ("relay", region == relay_region),
                (NODE_ROLE, any(node.regions[0] == region for node in spec.nodes)),
            )
            if wanted
        ]
        if not _whole(observed, Kind.LOGS, region):
            actions.append(EnsureLogs(region))
        if spec.own_network and not network_is_whole(observed, region):
            actions.append(EnsureNetwork(region))
        actions += [
            _firewall(spec, region, role) for role in roles if not _firewall_stands(spec, region, role, observed)
        ]
    if not observed.of(Kind.ADDRESS, region=relay_region):
        actions.append(EnsureAddress(relay_region))
    for machine in spec.machines:
        if machine.slot not in stay:
            actions.append(Launch(relay_region if machine.role == "relay" else machine.regions[0], machine))
    actions += [Delete(relay_region, address) for address in observed.addresses(relay_region)[1:]]
    attached = {r.attached_to for r in observed.of(Kind.ADDRESS, region=relay_region)}
    if "relay" not in stay or stay["relay"].id not in attached:
        actions.append(AttachAddress(relay_region))
    return Plan(relay_region, tuple(actions), tuple(notes))


def plan_down(observed: Observed) -> list[Action]:
    """Remove everything: instances first, in every region, then what they used, by the order of `Kind`."""
    actions: list[Action] = []
    instances = observed.of(Kind.INSTANCE)
    for region in dict.fromkeys(r.region for r in instances):
        # An instance that is ending still holds its network interface: it is waited for like the others.
        ending = tuple(r for r in instances if r.region == region and r.life is not Life.ENDED)
        if ending:
            actions.append(Terminate(region, ending))
    for kind in Kind:
        if kind is not Kind.INSTANCE:
            actions += [Delete(r.region, r) for r in observed.of(kind)]
    return actions


def network_is_whole(observed: Observed, region: str) -> bool:
    """Is every part of a network of our own there?"""
    parts = (Kind.NETWORK, Kind.GATEWAY, Kind.ROUTES, Kind.SUBNET)
    return all(_whole(observed, kind, region) for kind in parts)


def describe(action: Action) -> str:
    """One line for the user."""
    match action:
        case EnsureSecret(region):
            return f"create the shared secret in the parameter store ({region})"
        case EnsureProfile(role):
            return f"create the instance profile of {role}"
        case EnsureLogs(region):
            return f"create the log group ({region})"
        case EnsureNetwork(region):
            return f"create a network with a subnet in each zone ({region})"
        case EnsureFirewall(region, role, port, allow_from):
            opened = f"port {port} from {', '.join(allow_from)}" if port else "nothing from outside"
            return f"set the firewall of {role}: {opened} ({region})"
        case EnsureAddress(region):
            return f"allocate the relay's address ({region})"
        case Launch(region, machine):
            return f"launch {machine.slot}: {' or '.join(machine.instance_types)}, {machine.market} ({region})"
        case AttachAddress(region):
            return f"attach the address to the relay ({region})"
        case Terminate(region, resources):
            return f"terminate {', '.join(r.slot or r.id for r in resources)} ({region})"
        case Delete(_, resource):
            return f"delete {resource}"


def _firewall(spec: Spec, region: str, role: str) -> EnsureFirewall:
    if role == "relay":
        return EnsureFirewall(region, role, spec.access.port, spec.access.allow_from)
    return EnsureFirewall(region, role)


def _firewall_stands(spec: Spec, region: str, role: str, observed: Observed) -> bool:
    """Is it there, with the rules of the spec? While a relay runs as an older spec said, its port stays as it is."""
    if not _whole(observed, Kind.FIREWALL, region, role):
        return False
    if any(r.fingerprint != spec.relay.fingerprint() for r in observed.alive("relay") if role == "relay"):
        return True
    wanted = _firewall(spec, region, role)
    rules = firewall_rules((wanted.port, network) for network in wanted.allow_from if wanted.port)
    return all(r.fingerprint == rules for r in observed.of(Kind.FIREWALL, region=region, slot=role))


def _whole(observed: Observed, kind: Kind, region: str, slot: str | None = None) -> bool:
    found = observed.of(kind, region=region, slot=slot)
    return bool(found) and all(r.complete for r in found)


def kept(spec: Spec, relay_region: str, observed: Observed) -> dict[str, Resource]:
    """The instance of each slot that is where the spec wants it; of several the longest known."""
    wanted = {m.slot: relay_region if m.role == "relay" else m.regions[0] for m in spec.machines}
    found: dict[str, Resource] = {}
    for instance in observed.alive():
        if wanted.get(instance.slot) == instance.region:
            found.setdefault(instance.slot, instance)
    return found


def _surplus(observed: Observed, kept: Iterable[Resource]) -> list[Terminate]:
    """Instances that the spec does not have, or not there, and seconds of a slot: a failed run may have left them."""
    ids = {instance.id for instance in kept}
    surplus: dict[str, list[Resource]] = {}
    for instance in observed.alive():
        if instance.id not in ids:
            surplus.setdefault(instance.region, []).append(instance)
    return [Terminate(region, tuple(instances)) for region, instances in surplus.items()]


def _notes(spec: Spec, relay_region: str, best: str, observed: Observed) -> Sequence[str]:
    notes = []
    if relay_region != best:
        notes.append(f"the relay is in {relay_region}; {best} would be nearer now: `down`, then `up`, moves it")
    notes += [
        f"{machine.slot} runs as an older spec said: end it or run `down`, then `up`"
        for machine in spec.machines
        for instance in observed.alive(machine.slot)
        if instance.fingerprint and instance.fingerprint != machine.fingerprint()
    ]
    return notes
