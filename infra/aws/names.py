"""Names that follow from the deployment's."""

from __future__ import annotations

SECRET = "secret"
CERTIFICATE = "relay-certificate"


def parameter_path(deployment: str, name: str) -> str:
    """A parameter of the deployment."""
    return f"/foredraft/{deployment}/{name}"


def log_group(deployment: str) -> str:
    return f"/foredraft/{deployment}"


def profile_name(deployment: str, role: str) -> str:
    """Role and instance profile share it."""
    return f"foredraft-{deployment}-{role}"
