"""What a cloud has to be able to do. `plan` and `apply` know no more of it than this; `infra.aws` is one.

Every method may raise the `ProviderError`s of `infra.errors`. What is created carries the deployment's tags from the
create call on, so that `observe` finds it although we may die before the call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from infra.spec import Machine, Spec
from infra.state import Life, Observed, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One create call for one instance. The same token and values again give the same instance, not a second one."""

    region: str
    zone: str
    instance_type: str
    machine: Machine
    user_data: str
    token: str
    expires_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a node's log."""

    at_ms: int
    slot: str
    text: str


class Provider(Protocol):
    """One deployment in one cloud account."""

    def check_access(self, spec: Spec) -> None:
        """Are there credentials, and are the spec's regions open to them? Changes nothing."""
        ...

    def all_regions(self) -> list[str]:
        """Every region that the account can use."""
        ...

    def observe(self, regions: Sequence[str]) -> Observed:
        """Everything with the deployment's tags, on all pages; the region GLOBAL is what belongs to none."""
        ...

    def zones(self, region: str, instance_type: str) -> list[str]:
        """Zones of the region that offer the type."""
        ...

    def spot_usd_per_hour(self, region: str, instance_types: Sequence[str]) -> Mapping[str, float]:
        """Current spot prices, the dearest zone's."""
        ...

    def ensure_secret(self, region: str, value: str) -> None:
        """Keep the shared secret; one that is there stays."""
        ...

    def ensure_profile(self, role: str, spec: Spec, relay_region: str) -> None:
        """Let instances of `role` read what they need and write their logs, no more."""
        ...

    def ensure_logs(self, region: str) -> None: ...

    def ensure_network(self, region: str) -> None: ...

    def ensure_firewall(
        self, region: str, role: str, *, own_network: bool, port: int | None, allow_from: Sequence[str]
    ) -> None:
        """Nothing comes in but at `port`; a rule that is there counts as made."""
        ...

    def ensure_address(self, region: str) -> str:
        """The fixed address itself."""
        ...

    def attach_address(self, region: str, address: str, instance_id: str) -> None: ...

    def launch(self, request: LaunchRequest, *, own_network: bool, dry_run: bool = False) -> str:
        """The new instance's id; "" for a dry run, which has checked permissions and nothing else."""
        ...

    def lives(self, region: str, ids: Sequence[str]) -> Mapping[str, Life]:
        """How far instances are; raises NotFound when one is not visible (yet, or any more)."""
        ...

    def terminate(self, region: str, instance_id: str) -> None:
        """Begin to end an instance; one that is gone counts as ended."""
        ...

    def delete(self, resource: Resource) -> None:
        """Remove one thing; one that is gone counts as removed. Raises InUse while something depends on it."""
        ...

    def fetch_secret(self, region: str) -> str: ...

    def fetch_certificate(self, region: str, spec: Spec) -> str:
        """The relay's certificate in PEM; raises NotFound until the relay has published it."""
        ...

    def boot_log(self, region: str, instance_id: str) -> str:
        """The end of what the instance wrote while booting."""
        ...

    def log_lines(self, region: str, slot: str, *, since_ms: int) -> Iterator[LogLine]: ...

    def run_command(self, region: str, instance_id: str, command: str) -> str:
        """Start a shell command on the instance, without an open port; the id of the run."""
        ...

    def command_output(self, region: str, instance_id: str, command_id: str) -> tuple[str, str, int] | None:
        """(stdout, stderr, exit code), or None while it runs."""
        ...

    def shell_command(self, region: str, instance_id: str) -> list[str]:
        """The command that opens an interactive shell on the instance."""
        ...
