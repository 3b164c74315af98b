"""What can go wrong, by what can be done about it.

InfraError
├── SpecError           the spec is wrong: field, value and limit are named
├── BudgetError         the spec would cost more than it allows
├── NotReady            instances run, but a node did not become healthy in time
├── Leftovers           `down` is done and something still exists
└── ProviderError       the cloud said no
    ├── CapacityError   no room, or no such type, in this zone: try the next
    ├── QuotaError      an account limit: stop, with a hint
    ├── PermissionDenied    stop, with a hint
    ├── NotFound        gone, or not visible yet
    ├── AlreadyExists   somebody, often we ourselves, made it before
    ├── InUse           something else still depends on it: wait and try again
    └── Transient       throttled, or the cloud's own fault: wait and try again
"""

from __future__ import annotations


class InfraError(Exception):
    """Told to the user in one line."""


class SpecError(InfraError):
    """A wrong field of the spec."""


class BudgetError(InfraError):
    """More dollars than the spec allows."""


class NotReady(InfraError):
    """A node did not become healthy.

    Attributes:
        boot_logs: the end of the boot log of each instance concerned, by slot.
    """

    def __init__(self, message: str, boot_logs: dict[str, str]) -> None:
        super().__init__(message)
        self.boot_logs = boot_logs


class Leftovers(InfraError):
    """Something could not be removed."""


class ProviderError(InfraError):
    """A call failed.

    Attributes:
        code: the provider's own code.
        hint: what the user can do, or "".
    """

    def __init__(self, message: str, *, code: str = "", hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.code = code
        self.hint = hint


class CapacityError(ProviderError):
    """This zone cannot give this type now."""


class QuotaError(ProviderError):
    """An account limit is reached."""


class PermissionDenied(ProviderError):
    """The credentials do not allow it."""


class NotFound(ProviderError):
    """It does not exist, or is not visible yet."""


class AlreadyExists(ProviderError):
    """It exists."""


class InUse(ProviderError):
    """Something depends on it."""


class Transient(ProviderError):
    """Worth another try, later."""
