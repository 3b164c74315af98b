"""Ready is what the nodes themselves say, through the relay. "Running" says nothing, nor does an open port.

A relay that cannot speak for its nodes (see `infra.health`) is believed about itself; each node is then believed by the
line that it writes when its model has passed its self-check and its first link to the relay stands: {"ready": true}.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from infra.boot import FAILED
from infra.errors import NotFound, NotReady, ProviderError, Transient
from infra.health import Health, Prober, RelayAddress
from infra.launching import why_ended
from infra.plan import Launch, Plan
from infra.provider import Provider
from infra.spec import Spec
from infra.state import Life
from infra.waiting import Waiter

READY_LINE = '"ready": true'
TAIL_LINES = 40
LOOK_AT_BOOT_LOG_EVERY = 4


def tail(text: str, lines: int = TAIL_LINES) -> str:
    """The end of a log."""
    return "\n".join(text.splitlines()[-lines:])


class Readiness:
    """Waits for one deployment.

    Args:
        started_ms: wall clock; older lines of the log belong to an earlier life.
    """

    def __init__(
        self,
        provider: Provider,
        spec: Spec,
        *,
        waiter: Waiter,
        probe: Prober,
        say: Callable[[str], None],
        started_ms: int,
    ) -> None:
        self._provider = provider
        self._spec = spec
        self._waiter = waiter
        self._probe = probe
        self._say = say
        self._started_ms = started_ms
        self._secret = ""
        self.ready: set[str] = set()
        """Slots that have said so."""

    def wait(self, plan: Plan, relay_address: str, instance_ids: dict[str, str]) -> None:
        """Return when relay and nodes are ready.

        Raises:
            NotReady: the time is up, an instance has ended or a boot script has failed; with the ends of the boot logs.
        """
        launched = {a.machine.slot for a in plan.actions if isinstance(a, Launch)}
        attempts = 0

        def look() -> bool | None:
            nonlocal attempts
            attempts += 1
            health = self.look(plan.relay_region, relay_address)
            missing = self.missing()
            if not missing:
                return True
            self._say(f"waiting for {', '.join(missing)}: {health.told}")
            self._fail_early(plan, instance_ids, launched & set(missing), attempts)
            return None

        if self._waiter.until(look, deadline_s=self._spec.ready_timeout_s) is None:
            missing = self.missing()
            told = f"not ready after {self._spec.ready_timeout_s / 60:g} minutes: {', '.join(missing)}"
            raise NotReady(told, self._logs(plan.relay_region, instance_ids, missing))

    def look(self, relay_region: str, relay_address: str) -> Health:
        """Ask once, and note who is ready."""
        try:
            self._secret = self._secret or self._provider.fetch_secret(relay_region)
            certificate = self._provider.fetch_certificate(relay_region, self._spec)
        except (NotFound, Transient) as exc:
            return Health(False, frozenset(), f"no certificate yet ({exc.code})")
        access = self._spec.access
        address = RelayAddress(
            host=relay_address,
            port=access.port,
            name=access.domain or relay_address,
            secret=self._secret,
            # The internet's authorities are asked about a certificate that the relay did not make.
            certificate="" if access.certificate_parameter else certificate,
        )
        health = self._probe(address)
        if not health.up:
            return health
        self.ready.add("relay")
        if health.nodes is not None:
            slots = {node.slot for node in self._spec.nodes}
            self.ready = {"relay"} | (slots & health.nodes)
        else:
            self._believe_logs()
        return health

    def missing(self) -> list[str]:
        """Slots that have not said that they are ready."""
        return [m.slot for m in self._spec.machines if m.slot not in self.ready]

    def _believe_logs(self) -> None:
        for node in self._spec.nodes:
            if node.slot in self.ready:
                continue
            try:
                lines = self._provider.log_lines(node.regions[0], node.slot, since_ms=self._started_ms)
                if any(READY_LINE in line.text for line in lines):
                    self.ready.add(node.slot)
            except (NotFound, Transient):
                continue

    def _fail_early(self, plan: Plan, ids: dict[str, str], waiting: set[str], attempts: int) -> None:
        """No need to wait for what cannot come."""
        if attempts % LOOK_AT_BOOT_LOG_EVERY:
            return
        for slot in sorted(waiting):
            region = self._region(plan.relay_region, slot)
            try:
                if self._provider.lives(region, [ids[slot]]).get(ids[slot]) in (Life.ENDING, Life.ENDED, Life.STOPPED):
                    why = why_ended(self._provider, region, ids[slot])
                    raise NotReady(f"{slot} ended{why}", self._logs(plan.relay_region, ids, [slot]))
                log = self._provider.boot_log(region, ids[slot])
            except ProviderError:
                # Not every type has such a log yet, and not everybody may read it: the wait goes on without.
                continue
            if FAILED in log:
                raise NotReady(f"the boot script of {slot} failed", {slot: tail(log)})

    def _logs(self, relay_region: str, ids: dict[str, str], slots: list[str]) -> dict[str, str]:
        """The end of each one's boot log and of its service's; a log that cannot be had must not hide the failure.

        A wrong argument or model is only seen in the second: the boot script has ended well by then.
        """
        logs = {}
        for slot in slots:
            region = self._region(relay_region, slot)
            try:
                logs[slot] = tail(self._provider.boot_log(region, ids[slot]))
            except (ProviderError, KeyError) as exc:
                logs[slot] = f"(no boot log: {exc})"
            with contextlib.suppress(ProviderError):
                lines = [line.text for line in self._provider.log_lines(region, slot, since_ms=self._started_ms)]
                if lines:
                    logs[slot] += f"\n--- end of its service's log\n{tail(chr(10).join(lines))}"
        return logs

    def _region(self, relay_region: str, slot: str) -> str:
        return relay_region if slot == "relay" else next(n.regions[0] for n in self._spec.nodes if n.slot == slot)
