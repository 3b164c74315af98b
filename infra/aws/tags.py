"""The tags on everything, and how they are read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DEPLOYMENT = "foredraft:deployment"
SLOT = "foredraft:slot"
FINGERPRINT = "foredraft:fingerprint"
EXPIRES_AT = "foredraft:expires-at"
MARKET = "foredraft:market"

Tag = dict[str, str]


def tag_list(deployment: str, extra: Mapping[str, str], *, slot: str = "", **more: str) -> list[Tag]:
    """Tags for a create call; `extra` are the user's."""
    values = {"Name": f"foredraft-{deployment}" + (f"-{slot}" if slot else ""), **extra, DEPLOYMENT: deployment}
    if slot:
        values[SLOT] = slot
    values.update(more)
    return [{"Key": key, "Value": value} for key, value in values.items()]


def specification(kinds: Sequence[str], tags: Sequence[Tag]) -> list[dict[str, object]]:
    """TagSpecifications for EC2 create calls."""
    return [{"ResourceType": kind, "Tags": list(tags)} for kind in kinds]


def by_deployment(deployment: str) -> list[dict[str, object]]:
    """Filters that find what carries the deployment's tag."""
    return [{"Name": f"tag:{DEPLOYMENT}", "Values": [deployment]}]


def read(tags: Sequence[Mapping[str, str]] | None) -> dict[str, str]:
    """Tags as a mapping."""
    return {tag["Key"]: tag["Value"] for tag in tags or ()}
