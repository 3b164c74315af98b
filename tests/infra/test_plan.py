"""The plan is pure: it is run here against a world of dictionaries, from every partial state."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from infra.plan import (
    Action,
    AttachAddress,
    Delete,
    EnsureAddress,
    EnsureFirewall,
    EnsureLogs,
    EnsureNetwork,
    EnsureProfile,
    EnsureSecret,
    Launch,
    Terminate,
    plan_down,
    plan_up,
)
from infra.spec import Spec
from infra.state import GLOBAL, Kind, Life, Observed, Resource, firewall_rules
from tests.infra.doubles import a_spec, a_table


class World:
    """Carries plans out on resources in memory."""

    def __init__(self, resources: tuple[Resource, ...] = ()) -> None:
        self.resources = list(resources)
        self._ids = count(1)

    @property
    def observed(self) -> Observed:
        return Observed(tuple(self.resources))

    def perform(self, action: Action) -> None:
        match action:
            case EnsureSecret(region):
                self._ensure(Kind.SECRET, region, "secret")
            case EnsureProfile(role):
                self._ensure(Kind.PROFILE, GLOBAL, role)
            case EnsureLogs(region):
                self._ensure(Kind.LOGS, region, "")
            case EnsureNetwork(region):
                for kind in (Kind.NETWORK, Kind.GATEWAY, Kind.ROUTES, Kind.SUBNET):
                    self._ensure(kind, region, "")
            case EnsureFirewall(region, role, port, allow_from):
                self.resources = [r for r in self.resources if (r.kind, r.region, r.slot) != ("firewall", region, role)]
                rules = firewall_rules((port, network) for network in allow_from if port)
                self._ensure(Kind.FIREWALL, region, role, rules)
            case EnsureAddress(region):
                self._ensure(Kind.ADDRESS, region, "relay")
            case Launch(region, machine):
                assert any(r.slot in ("relay", "node") for r in self.observed.of(Kind.FIREWALL, region=region))
                self.resources.append(
                    Resource(
                        kind=Kind.INSTANCE,
                        region=region,
                        id=f"i-{next(self._ids)}",
                        slot=machine.slot,
                        life=Life.RUNNING,
                        fingerprint=machine.fingerprint(),
                    )
                )
            case AttachAddress(region, slot):
                relay = self.observed.alive(slot)[0].id
                self.resources = [
                    replace(r, attached_to=relay) if r.kind is Kind.ADDRESS and r.region == region else r
                    for r in self.resources
                ]
            case Terminate(_, resources):
                self._drop(resources)
            case Delete(_, resource):
                assert not [r for r in self.observed.of(Kind.INSTANCE) if r.life is not Life.ENDED]
                order = list(Kind)
                assert all(order.index(r.kind) >= order.index(resource.kind) for r in self.resources)
                self._drop((resource,))

    def _ensure(self, kind: Kind, region: str, slot: str, fingerprint: str = "") -> None:
        self.resources = [
            r
            for r in self.resources
            if not (r.kind is kind and r.region == region and r.slot == slot and not r.complete)
        ]
        if not self.observed.of(kind, region=region, slot=slot):
            resource_id = f"{kind.value}-{next(self._ids)}"
            self.resources.append(
                Resource(kind=kind, region=region, id=resource_id, slot=slot, fingerprint=fingerprint)
            )

    def _drop(self, gone: tuple[Resource, ...]) -> None:
        self.resources = [r for r in self.resources if r not in gone]


def whole_world(spec: Spec) -> World:
    world = World()
    for action in plan_up(spec, "us-east-2", Observed()).actions:
        world.perform(action)
    return world


OWN = a_spec(deployment={**a_table()["deployment"], "network": "own"})


@given(data=st.data(), own=st.booleans())
def test_from_every_partial_state_one_plan_completes_and_a_second_is_empty(data: st.DataObject, own: bool) -> None:
    spec = OWN if own else a_spec()
    whole = whole_world(spec).resources
    kept = [r for r in whole if data.draw(st.booleans())]
    kept = [replace(r, complete=r.kind not in (Kind.FIREWALL, Kind.PROFILE) or data.draw(st.booleans())) for r in kept]
    world = World(tuple(kept))
    for action in plan_up(spec, "us-east-2", world.observed).actions:
        world.perform(action)
    assert plan_up(spec, "us-east-2", world.observed).actions == ()
    assert sorted(r.slot for r in world.observed.alive()) == ["draft-0", "relay", "verify-0"]
    attached = {r.attached_to for r in world.observed.of(Kind.ADDRESS)}
    assert attached == {world.observed.alive("relay")[0].id}


@given(data=st.data(), own=st.booleans())
def test_down_removes_every_partial_state_in_dependency_order(data: st.DataObject, own: bool) -> None:
    whole = whole_world(OWN if own else a_spec()).resources
    world = World(tuple(r for r in whole if data.draw(st.booleans())))
    for action in plan_down(world.observed):
        world.perform(action)
    assert world.resources == []
    assert plan_down(world.observed) == []


def test_an_empty_account_needs_everything_in_order() -> None:
    kinds = [type(action).__name__ for action in plan_up(a_spec(), "us-east-2", Observed()).actions]
    assert kinds == [
        "EnsureSecret", "EnsureProfile", "EnsureProfile", "EnsureLogs", "EnsureFirewall", "EnsureFirewall",
        "EnsureLogs", "EnsureFirewall", "EnsureAddress", "Launch", "Launch", "Launch", "AttachAddress",
    ]  # fmt: skip


def test_a_relay_that_exists_stays_where_it_is() -> None:
    observed = whole_world(a_spec()).observed
    plan = plan_up(a_spec(), "us-west-2", observed)
    assert plan.relay_region == "us-east-2"
    assert plan.actions == ()
    assert "us-west-2 would be nearer" in plan.notes[0]


def test_a_second_instance_of_a_slot_and_one_of_no_slot_are_ended() -> None:
    observed = whole_world(a_spec()).observed
    verify = observed.alive("verify-0")[0]
    twice = Observed((*observed.resources, replace(verify, id="i-twin"), replace(verify, id="i-old", slot="verify-9")))
    (action,) = plan_up(a_spec(), "us-east-2", twice).actions
    assert isinstance(action, Terminate)
    assert [r.id for r in action.resources] == ["i-twin", "i-old"]


def test_of_two_instances_of_a_slot_the_older_stays() -> None:
    observed = whole_world(a_spec()).observed
    since = "2026-12-01T12:00:0{}+00:00"
    aged = Observed(tuple(replace(r, since=since.format(1)) for r in observed.resources))
    older = replace(aged.alive("verify-0")[0], id="i-older", since=since.format(0))
    (action,) = plan_up(a_spec(), "us-east-2", Observed((*aged.resources, older))).actions
    assert action == Terminate("us-east-2", (aged.alive("verify-0")[0],))


def test_a_node_that_moves_is_ended_there_and_launched_here() -> None:
    verify, draft = a_table()["node"]
    spec = a_spec(node=[verify, {**draft, "region": "us-east-2"}])
    old = whole_world(a_spec()).observed
    actions = plan_up(spec, "us-east-2", old).actions
    assert [type(action).__name__ for action in actions] == ["Terminate", "Launch"]
    assert actions[1] == Launch("us-east-2", spec.nodes[1])


def test_an_instance_of_an_older_spec_is_told_and_left_alone() -> None:
    observed = whole_world(a_spec()).observed
    node = {**a_table()["node"][0], "instance_types": ["g5.xlarge"]}
    plan = plan_up(a_spec(node=[node, a_table()["node"][1]]), "us-east-2", observed)
    assert plan.actions == ()
    assert "verify-0 runs as an older spec said" in plan.notes[0]


def relay_with(**changes: object) -> Spec:
    return a_spec(relay={**a_table()["relay"], **changes})


def test_networks_that_the_spec_no_longer_lets_in_are_shut_out() -> None:
    observed = whole_world(a_spec()).observed
    narrow = relay_with(allow_from=["203.0.113.0/24"])
    (action,) = plan_up(narrow, "us-east-2", observed).actions
    assert action == EnsureFirewall("us-east-2", "relay", 443, ("203.0.113.0/24",))


def test_another_port_is_told_and_the_running_nodes_are_not_cut_off() -> None:
    plan = plan_up(relay_with(port=8443), "us-east-2", whole_world(a_spec()).observed)
    assert plan.actions == ()
    assert [note.partition(" ")[0] for note in plan.notes] == ["relay", "verify-0", "draft-0"]


def test_of_two_addresses_the_one_in_use_stays() -> None:
    world = whole_world(a_spec())
    (address,) = world.observed.of(Kind.ADDRESS)
    twin = replace(address, id="eipalloc-twin", attached_to="")
    plan = plan_up(a_spec(), "us-east-2", Observed((twin, *world.resources)))
    assert plan.actions == (Delete("us-east-2", twin),)


def test_ended_instances_do_not_count() -> None:
    observed = whole_world(a_spec()).observed
    ended = Observed(tuple(replace(r, life=Life.ENDED) if r.slot == "draft-0" else r for r in observed.resources))
    assert [type(a).__name__ for a in plan_up(a_spec(), "us-east-2", ended).actions] == ["Launch"]
    assert ended.remaining() == [r for r in ended.resources if r.slot != "draft-0"]


def test_fifty_nodes_are_planned_in_one_go() -> None:
    verify, draft = a_table()["node"]
    spec = a_spec(node=[{**verify, "count": 25}, {**draft, "count": 25}])
    plan = plan_up(spec, "us-east-2", Observed())
    assert sum(isinstance(a, Launch) for a in plan.actions) == 51
    world = World()
    for action in plan.actions:
        world.perform(action)
    assert plan_up(spec, "us-east-2", world.observed).actions == ()
