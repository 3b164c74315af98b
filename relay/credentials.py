"""Who may do what at the relay: credentials by role, their secrets and their limits.

A file of credentials is TOML:

    [[credential]]
    name = "tokyo-nodes"                 # in logs and metrics; never a secret
    roles = ["node"]                     # of "admin" (metrics), "node" (draft and verify nodes), "client"
    secrets = ["new one", "old one"]     # any of them is good: add the new one, switch the peers, remove the old one
    max_sessions = 64                    # of all its clients together; 0 or left out for no limit
    frames_per_s = 2000                  # of all its links together: above it they are read more slowly, and HTTP
                                         # requests (a frame for each session) are answered with 429
    bytes_per_s = 4000000

Without a file there is one credential for everything, the shared secret.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from dataclasses import dataclass
from typing import Any

from wire.settings import MIN_SECRET_CHARS, secret_fault

ROLES = ("admin", "node", "client")
ROLE_OF_PEER = {"draft": "node", "verify": "node", "client": "client"}
MAX_SECRETS = 8
MAX_LIMIT = 10**15
FIELDS = {"name", "roles", "secrets", "max_sessions", "frames_per_s", "bytes_per_s"}


class CredentialsError(ValueError):
    """The file of credentials is not good; the message names entry, field and limit, and no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """One entry. Limits are None for none.

    Attributes:
        digests: SHA-256 of each secret that is good now.
    """

    name: str
    roles: tuple[str, ...]
    digests: tuple[bytes, ...]
    max_sessions: int | None = None
    frames_per_s: float | None = None
    bytes_per_s: float | None = None

    def allows(self, peer_role: str) -> bool:
        """Whether a peer with this role in its Hello may come with it."""
        return ROLE_OF_PEER[peer_role] in self.roles


@dataclass(frozen=True, slots=True)
class Identity:
    """What a peer has shown: a credential, by the secret with this digest."""

    credential: Credential
    digest: bytes


class Credentials:
    """All credentials of a relay."""

    def __init__(self, entries: tuple[Credential, ...]) -> None:
        self.entries = entries

    @classmethod
    def shared(cls, secret: str) -> Credentials:
        """One secret for everything."""
        return cls((Credential(name="shared", roles=ROLES, digests=(_digest(secret),)),))

    @classmethod
    def from_toml(cls, text: str) -> Credentials:
        """Read a file's text.

        Raises:
            CredentialsError: it is not as the module's docstring says.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as exc:
            # The library quotes no line, so no secret.
            raise CredentialsError(f"not TOML: {exc}") from None
        if set(data) != {"credential"} or not isinstance(data["credential"], list) or not data["credential"]:
            raise CredentialsError("there must be at least one [[credential]], and nothing else")
        entries = tuple(_entry(i, raw) for i, raw in enumerate(data["credential"]))
        names = [entry.name for entry in entries]
        digests = [digest for entry in entries for digest in entry.digests]
        if len(set(names)) < len(names):
            raise CredentialsError("two credentials have the same name")
        if len(set(digests)) < len(digests):
            raise CredentialsError("two credentials have the same secret")
        return cls(entries)

    def find(self, given: str) -> Identity | None:
        """The credential of a secret; takes as long for a wrong one, however much of it is right."""
        digest = _digest(given)
        found = None
        for entry in self.entries:
            for known in entry.digests:
                if hmac.compare_digest(known, digest):
                    found = Identity(entry, known)
        return found

    def renew(self, identity: Identity) -> Identity | None:
        """The identity under these credentials, after a reload; None if its secret is not good any more."""
        for entry in self.entries:
            if identity.digest in entry.digests:
                return Identity(entry, identity.digest)
        return None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


def _entry(number: int, raw: Any) -> Credential:
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str) or not 0 < len(raw["name"]) <= 64:
        raise CredentialsError(f"credential {number + 1} needs a name of 1..64 characters")
    name = raw["name"]
    unknown = set(raw) - FIELDS
    if unknown:
        raise CredentialsError(f"credential {name} has no field {', '.join(sorted(map(str, unknown)))}")
    roles, given = raw.get("roles"), raw.get("secrets")
    if not isinstance(roles, list) or not roles or not set(map(str, roles)) <= set(ROLES):
        raise CredentialsError(f"credential {name}: roles must be some of {', '.join(ROLES)}")
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_SECRETS:
        raise CredentialsError(f"credential {name}: secrets must be a list of 1..{MAX_SECRETS}")
    for secret in given:
        fault = secret_fault(secret) if isinstance(secret, str) else "must be a string"
        if fault:
            raise CredentialsError(f"credential {name}: a secret {fault} (at least {MIN_SECRET_CHARS} characters)")
    limits: dict[str, Any] = {}
    for field in ("max_sessions", "frames_per_s", "bytes_per_s"):
        value = raw.get(field, 0)
        kinds = (int,) if field == "max_sessions" else (int, float)
        if type(value) not in kinds or not 0 <= value <= MAX_LIMIT:
            raise CredentialsError(f"credential {name}: {field} must be a number in 0..{MAX_LIMIT:g}, 0 for no limit")
        limits[field] = value or None
    return Credential(name=name, roles=tuple(roles), digests=tuple(map(_digest, given)), **limits)
