"""Performs plans: `Applier.up` and `Applier.down`.

`up` observes, plans, acts in order and waits until the nodes themselves say that they are ready. If anything stops
it, an interrupt included, what this run made is removed again, or kept on request; a later `up` then goes on from
there. `down` goes on past every error, in every region, and ends by looking again: it has succeeded when nothing is
left, not when nothing was refused.
"""

from __future__ import annotations

import random
import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from infra import plan as planning
from infra.errors import AlreadyExists, InfraError, InUse, Leftovers, NotFound, ProviderError, Transient
from infra.journal import Journal
from infra.launching import Launcher
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
    Plan,
    Terminate,
)
from infra.provider import Provider
from infra.spec import Spec
from infra.state import GLOBAL, Kind, Life, Observed, Resource
from infra.waiting import Clock, Waiter

T = TypeVar("T")
RETRY_S = 60.0
END_S = 600.0
"""How long instances may take to end, and what they used to become free."""
SETTLE_S = 30.0
"""How long a new instance may stay invisible to `observe`."""

UserData = Callable[[planning.Launch, str, str, str], str]
"""(launch, relay's region, relay's address, expiry) -> user data."""


@dataclass(slots=True)
class Done:
    """What a run did."""

    plan: Plan
    relay_region: str
    relay_address: str = ""
    instance_ids: dict[str, str] = field(default_factory=dict)


class Applier:
    """Runs plans against a provider.

    Args:
        say: told, in one line, what is being done.
        user_data: makes an instance's user data.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        journal: Journal,
        clock: Clock,
        user_data: UserData,
        say: Callable[[str], None],
        rng: random.Random | None = None,
        new_token: Callable[[], str] = lambda: str(uuid.uuid4()),
        new_secret: Callable[[], str] = lambda: secrets.token_urlsafe(32),
    ) -> None:
        self.provider = provider
        self.journal = journal
        self.clock = clock
        self.waiter = Waiter(clock, rng or random.Random())
        self._say = say
        self._new_secret = new_secret
        self._user_data = user_data
        self._launcher = Launcher(provider, journal=journal, waiter=self.waiter, say=say, new_token=new_token)

    def up(
        self,
        spec: Spec,
        best_relay_region: str,
        *,
        expires_at: str,
        keep: bool = False,
        ready: Callable[[Done], None] = lambda done: None,
    ) -> Done:
        """Make the spec true, then call `ready`, which returns when the nodes are or raises.

        Args:
            expires_at: for a deployment of which nothing exists yet.
            keep: leave what was made when something fails.

        Raises:
            ProviderError, NotReady, KeyboardInterrupt: what stopped it, after the roll-back.
        """
        with self.journal.held():
            if self.journal.damage:
                raise InfraError(self.journal.damage)
            return self._up(spec, best_relay_region, expires_at=expires_at, keep=keep, ready=ready)

    def _up(
        self, spec: Spec, best_relay_region: str, *, expires_at: str, keep: bool, ready: Callable[[Done], None]
    ) -> Done:
        regions = tuple(dict.fromkeys((GLOBAL, *spec.regions, *self.journal.regions)))
        before = self._observe_all(regions)
        done = Done(planning.plan_up(spec, best_relay_region, before), best_relay_region)
        done.relay_region = done.plan.relay_region
        for note in done.plan.notes:
            self._say(f"note: {note}")
        self._settle_expiry(before, expires_at)
        self.journal.note_regions([done.relay_region, *(node.regions[0] for node in spec.nodes)])
        try:
            done.relay_address = next((r.detail for r in before.addresses(done.relay_region)), "")
            stay = planning.kept(spec, done.relay_region, before)
            done.instance_ids = {slot: instance.id for slot, instance in stay.items()}
            for action in done.plan.actions:
                self._say(planning.describe(action))
                self._perform(action, spec, done)
            self._launcher.await_running(spec, done.relay_region, done.instance_ids)
            ready(done)
        except BaseException as exc:
            if keep:
                self._say("kept what was made: `up` goes on from here, `down` removes it")
            else:
                self._say(f"rolling back after {type(exc).__name__}: {exc}")
                self._roll_back(regions, before)
            raise
        return done

    def dry_run(self, spec: Spec, best_relay_region: str) -> Plan:
        """Plan, and ask the provider of every launch whether it would be allowed; changes nothing."""
        observed = self._observe_all((GLOBAL, *spec.regions))
        plan = planning.plan_up(spec, best_relay_region, observed)
        for action in plan.actions:
            if isinstance(action, Launch):
                data = self._user_data(action, plan.relay_region, "192.0.2.1", self.clock.utc().isoformat())
                try:
                    self._launcher.dry_run(action, data, own_network=spec.own_network)
                    told = "allowed"
                except NotFound as exc:
                    told = f"not asked: {exc}"
                self._say(f"would {planning.describe(action)}: {told}")
            else:
                self._say(f"would {planning.describe(action)}")
        return plan

    def down(self, regions: Sequence[str]) -> int:
        """Remove everything of the deployment in these regions; the number of things removed.

        Raises:
            Leftovers: something is left, or a region could not be looked into; names it all.
            InfraError: another run is at work.
        """
        with self.journal.held():
            return self._down(dict.fromkeys((GLOBAL, *regions, *self.journal.regions)))

    def _down(self, regions: Iterable[str]) -> int:
        observed, unseen = self._observe_each(regions)
        observed = self._with_journal(observed)
        actions = planning.plan_down(observed)
        failures = self._remove(actions)
        left, still_unseen = self._look_again(regions, anything=bool(actions))
        problems = [f"{resource}{failures.get(resource.id, '')}" for resource in left]
        problems += [f"could not look into {region}: {exc}" for region, exc in {**unseen, **still_unseen}.items()]
        if problems:
            raise Leftovers("left: " + "; ".join(problems) + ". Run `down` again, or remove it in the console")
        self.journal.clear()
        return sum(len(a.resources) if isinstance(a, Terminate) else 1 for a in actions)

    def _perform(self, action: Action, spec: Spec, done: Done) -> None:
        retry = self._retry
        provider = self.provider
        match action:
            case EnsureSecret(region):
                retry(lambda: provider.ensure_secret(region, self._new_secret()))
            case EnsureProfile(role):
                retry(lambda: provider.ensure_profile(role, spec, done.relay_region))
            case EnsureLogs(region):
                retry(lambda: provider.ensure_logs(region))
            case EnsureNetwork(region):
                retry(lambda: provider.ensure_network(region))
            case EnsureFirewall(region, role, port, allow_from):
                retry(
                    lambda: provider.ensure_firewall(
                        region, role, own_network=spec.own_network, port=port, allow_from=allow_from
                    )
                )
            case EnsureAddress(region):
                done.relay_address = retry(lambda: provider.ensure_address(region))
            case Launch(region, machine):
                data = self._user_data(action, done.relay_region, done.relay_address, self.journal.expires_at)
                done.instance_ids[machine.slot] = self._launcher.launch(action, data, own_network=spec.own_network)
            case AttachAddress(region, slot):
                instance_id = done.instance_ids[slot]
                self._launcher.await_life(region, {slot: instance_id})
                retry(lambda: provider.attach_address(region, done.relay_address, instance_id))
            case Terminate(_, resources):
                for resource in resources:
                    self._begin_end(resource)
                self._await_end(resources)
            case Delete(_, resource):
                self._delete(resource)

    def _retry(self, call: Callable[[], T]) -> T:
        # What a call has made is not at once visible to the next: NotFound is worth another try here.
        return self.waiter.retry(call, on=(Transient, NotFound, AlreadyExists), deadline_s=RETRY_S)

    def _observe_all(self, regions: Sequence[str]) -> Observed:
        return self.waiter.retry(lambda: self.provider.observe(regions), on=(Transient,), deadline_s=RETRY_S)

    def _observe_each(self, regions: Iterable[str]) -> tuple[Observed, dict[str, ProviderError]]:
        """Region by region: one that cannot be seen does not hide the others."""
        found: list[Resource] = []
        unseen = {}
        for region in dict.fromkeys(regions):
            try:
                found += self._observe_all([region]).resources
            except ProviderError as exc:
                unseen[region] = exc
        return Observed(tuple(found)), unseen

    def _settle_expiry(self, before: Observed, expires_at: str) -> None:
        """All instances end at one time, also those that a later `up` adds."""
        known = sorted(r.expires_at for r in before.alive() if r.expires_at)
        now = self.clock.utc().isoformat()
        pending = self.journal.expires_at if self.journal.launches and self.journal.expires_at > now else ""
        wanted = known[0] if known else pending or expires_at
        if wanted != self.journal.expires_at:
            self.journal.set_expiry(wanted)

    def _roll_back(self, regions: Sequence[str], before: Observed) -> None:
        """Remove what this run made. An error here must not hide what went wrong first: it is told, `down` remains."""
        try:
            now = self.waiter.until(lambda: self._settled(regions), deadline_s=SETTLE_S) or self._observe_all(regions)
            failures = self._remove(planning.plan_down(self._with_journal(now).without(before.resources)))
            for slot in list(self.journal.launches):
                if slot not in {r.slot for r in before.alive()}:
                    self.journal.refused(slot)
            for resource_id, why in failures.items():
                self._say(f"could not remove {resource_id}{why}; run `down`")
        except (ProviderError, OSError) as exc:
            self._say(f"could not roll back: {exc}; run `down`")

    def _settled(self, regions: Sequence[str]) -> Observed | None:
        """What exists, once every create call that was not answered can be seen or is known."""
        observed = self._observe_all(regions)
        unanswered = {slot for slot, entry in self.journal.launches.items() if not entry.instance_id}
        seen = {r.slot for r in observed.of(Kind.INSTANCE)}
        return observed if unanswered <= seen else None

    def _with_journal(self, observed: Observed) -> Observed:
        """With the instances that we know to be made and that cannot be seen yet."""
        known = {r.id for r in observed.resources}
        hidden = [
            Resource(kind=Kind.INSTANCE, region=e.region, id=e.instance_id, slot=slot, life=Life.STARTING)
            for slot, e in self.journal.launches.items()
            if e.instance_id and e.instance_id not in known
        ]
        return Observed((*observed.resources, *hidden))

    def _remove(self, actions: Sequence[Action]) -> dict[str, str]:
        """Carry out removals, past every error: what failed, by id, and why. All regions begin to end at once."""
        failures: dict[str, str] = {}
        gateways: dict[str, set[str]] = {}
        for action in actions:
            if isinstance(action, Terminate):
                self._say(planning.describe(action))
                for resource in action.resources:
                    self._guarded(failures, [resource.id], partial(self._begin_end, resource))
        # Where an instance does not end, what it uses is not waited for.
        stuck = {r.region for a in actions if isinstance(a, Terminate) for r in a.resources if r.id in failures}
        for action in actions:
            if isinstance(action, Terminate):
                ending = [r for r in action.resources if r.id not in failures]
                self._guarded(failures, [r.id for r in ending], partial(self._await_end, ending))
            elif isinstance(action, Delete):
                if action.resource.kind is Kind.GATEWAY:
                    gateways.setdefault(action.region, set()).add(action.resource.id)
                if action.resource.kind is Kind.NETWORK and gateways.get(action.region, set()) & set(failures):
                    # A gateway is looked for while there is a network; without one it would be left and not seen.
                    failures[action.resource.id] = " (its gateway is left)"
                    continue
                self._say(planning.describe(action))
                deadline_s = RETRY_S if action.region in stuck else END_S
                call = partial(self._delete, action.resource, deadline_s=deadline_s)
                self._guarded(failures, [action.resource.id], call)
        return failures

    @staticmethod
    def _guarded(failures: dict[str, str], ids: Sequence[str], call: Callable[[], None]) -> None:
        try:
            call()
        except ProviderError as exc:
            failures.update(dict.fromkeys(ids, f" ({exc})"))

    def _begin_end(self, resource: Resource) -> None:
        if resource.life is not Life.ENDING:
            self.waiter.retry(
                lambda: self.provider.terminate(resource.region, resource.id), on=(Transient,), deadline_s=RETRY_S
            )

    def _await_end(self, resources: Sequence[Resource]) -> None:
        waiting = {r.id: r.region for r in resources}

        def ended() -> bool | None:
            for instance_id, region in sorted(waiting.items()):
                try:
                    life = self.provider.lives(region, [instance_id]).get(instance_id, Life.ENDED)
                except NotFound:
                    life = Life.ENDED
                except Transient:
                    continue
                if life is Life.ENDED:
                    del waiting[instance_id]
            return True if not waiting else None

        if self.waiter.until(ended, deadline_s=END_S) is None:
            raise ProviderError(f"not ended after {END_S:g} s: {', '.join(sorted(waiting))}")

    def _delete(self, resource: Resource, *, deadline_s: float = END_S) -> None:
        self.waiter.retry(lambda: self.provider.delete(resource), on=(InUse, Transient), deadline_s=deadline_s)

    def _look_again(self, regions: Iterable[str], *, anything: bool) -> tuple[list[Resource], dict[str, ProviderError]]:
        """What is left; nothing to look for again when nothing was removed."""
        if not anything:
            return [], {}
        last: list[tuple[list[Resource], dict[str, ProviderError]]] = []

        def gone() -> bool | None:
            observed, unseen = self._observe_each(regions)
            last.append((observed.remaining(), unseen))
            return None if observed.remaining() else True

        self.waiter.until(gone, deadline_s=SETTLE_S)
        return last[-1]
