"""One instance for one slot: which zone and type to try, what is written down before, what is waited for after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from infra.errors import CapacityError, NotFound, ProviderError, Transient
from infra.journal import Journal, LaunchEntry
from infra.plan import Launch
from infra.provider import LaunchRequest, Provider
from infra.spec import Spec
from infra.state import Kind, Life
from infra.waiting import Waiter

LAUNCH_S = 120.0
RUNNING_S = 300.0
MISMATCH = "IdempotentParameterMismatch"


def why_ended(provider: Provider, region: str, instance_id: str) -> str:
    """What the cloud says about the end of an instance, in brackets: a quota, a key, a price; "" if it says nothing."""
    try:
        found = [r for r in provider.observe([region]).of(Kind.INSTANCE) if r.id == instance_id and r.reason]
    except ProviderError:
        return ""
    return f" ({found[0].reason})" if found else ""


class Launcher:
    """Launches instances through a provider.

    Args:
        new_token: makes the token under which a create call is known.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        journal: Journal,
        waiter: Waiter,
        say: Callable[[str], None],
        new_token: Callable[[], str],
    ) -> None:
        self._provider = provider
        self._journal = journal
        self._waiter = waiter
        self._say = say
        self._new_token = new_token

    def launch(self, action: Launch, user_data: str, *, own_network: bool) -> str:
        """The id of the one instance that now has the slot.

        Raises:
            CapacityError: no zone has any of the types; lists what was tried.
            ProviderError: whatever another zone would not help with.
        """
        machine, tried = action.machine, []
        for zone, instance_type in self._places(action):
            try:
                instance_id = self._create(action, zone, instance_type, user_data, own_network=own_network)
            except CapacityError as exc:
                self._journal.refused(machine.slot)
                tried.append(f"{instance_type} in {zone}: {exc.code or exc}")
                self._say(f"{machine.slot}: {tried[-1]}; trying the next")
                continue
            except ProviderError as exc:
                # Refused for good: there is no instance behind the token. A lost answer is another matter.
                if not isinstance(exc, Transient):
                    self._journal.refused(machine.slot)
                raise
            self._journal.launched(machine.slot, instance_id)
            return instance_id
        raise self._no_room(action, tried)

    def dry_run(self, action: Launch, user_data: str, *, own_network: bool) -> None:
        """Would the first place that has room be allowed?

        Raises:
            CapacityError: no zone offers any of the types, or has a subnet.
            NotFound: there is no network yet to ask with.
            ProviderError: it would not be allowed.
        """
        tried = []
        for zone, instance_type in self._places(action):
            request = self._request(action, zone, instance_type, user_data, token="dry-run")
            try:
                self._provider.launch(request, own_network=own_network, dry_run=True)
                return
            except CapacityError as exc:
                tried.append(f"{instance_type} in {zone}: {exc.code or exc}")
        raise self._no_room(action, tried)

    def await_running(self, spec: Spec, relay_region: str, ids: Mapping[str, str]) -> None:
        """All of them run, as far as the cloud can tell; that says nothing yet about the nodes on them."""
        by_region: dict[str, dict[str, str]] = {}
        for machine in spec.machines:
            region = relay_region if machine.role == "relay" else machine.regions[0]
            by_region.setdefault(region, {})[machine.slot] = ids[machine.slot]
        for region, slots in by_region.items():
            self.await_life(region, slots)

    def await_life(self, region: str, slots: Mapping[str, str]) -> None:
        """Wait until instances run.

        Raises:
            ProviderError: one ends, or the time is up.
        """
        ids = sorted(slots.values())

        def running() -> bool | None:
            try:
                lives = self._provider.lives(region, ids)
            except (NotFound, Transient):
                # Made a moment ago: the id is ours, it will be seen.
                return None
            for slot, instance_id in slots.items():
                if lives.get(instance_id) in (Life.ENDING, Life.ENDED, Life.STOPPED):
                    why = why_ended(self._provider, region, instance_id)
                    raise ProviderError(f"{slot} ({instance_id} in {region}) ended while it started{why}")
            return True if all(lives.get(i) is Life.RUNNING for i in ids) else None

        if self._waiter.until(running, deadline_s=RUNNING_S) is None:
            raise ProviderError(f"not running after {RUNNING_S:g} s in {region}: {', '.join(sorted(slots))}")

    @staticmethod
    def _no_room(action: Launch, tried: list[str]) -> CapacityError:
        told = "; ".join(tried) or f"no zone offers {' or '.join(action.machine.instance_types)}"
        return CapacityError(
            f"{action.machine.slot}: no capacity in {action.region}; tried {told}",
            hint="list more instance_types or zones in the spec, another region, or the other market",
        )

    def _places(self, action: Launch) -> Iterator[tuple[str, str]]:
        """Where to try, in order; first where a run before us was when it died."""
        pending = self._journal.launches.get(action.machine.slot)
        if pending and not pending.instance_id and pending.region == action.region:
            yield pending.zone, pending.instance_type
        for instance_type in action.machine.instance_types:
            offered = self._waiter.retry(
                partial(self._provider.zones, action.region, instance_type),
                on=(Transient,),
                deadline_s=LAUNCH_S,
            )
            for zone in [z for z in action.machine.zones or offered if z in offered]:
                yield zone, instance_type

    def _create(self, action: Launch, zone: str, instance_type: str, user_data: str, *, own_network: bool) -> str:
        slot = action.machine.slot
        pending = self._journal.launches.get(slot)
        same = pending and not pending.instance_id and (pending.zone, pending.instance_type) == (zone, instance_type)
        token = pending.token if pending and same else self._new_token()
        try:
            return self._create_once(action, zone, instance_type, user_data, token, own_network=own_network)
        except ProviderError as exc:
            if not same or exc.code != MISMATCH:
                raise
            # The spec was edited since: what the old token may have made has the slot's tag, and was not observed.
            return self._create_once(action, zone, instance_type, user_data, self._new_token(), own_network=own_network)

    def _create_once(
        self, action: Launch, zone: str, instance_type: str, user_data: str, token: str, *, own_network: bool
    ) -> str:
        request = self._request(action, zone, instance_type, user_data, token=token)
        entry = LaunchEntry(token=token, region=action.region, zone=zone, instance_type=instance_type)
        self._journal.about_to_launch(action.machine.slot, entry)
        # The same token each time: however often the answer is lost, there is one instance.
        return self._waiter.retry(
            lambda: self._provider.launch(request, own_network=own_network),
            on=(Transient, NotFound),
            deadline_s=LAUNCH_S,
        )

    def _request(self, action: Launch, zone: str, instance_type: str, user_data: str, *, token: str) -> LaunchRequest:
        return LaunchRequest(
            region=action.region,
            zone=zone,
            instance_type=instance_type,
            machine=action.machine,
            user_data=user_data,
            token=token,
            expires_at=self._journal.expires_at,
        )
