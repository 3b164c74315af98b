"""Who may use the HTTP side: `Authorization: Bearer SECRET`, nothing in a URL, compared in constant time."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from relay.api_errors import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The credentials of the HTTP side. `admin` sees the status of all sessions, `client` asks."""

    client: str
    admin: str

    def check_client(self, header: str | None) -> None:
        """An administrator may ask as well.

        Raises:
            ApiError: 401.
        """
        given = _bearer(header)
        # Both are compared whatever the first says.
        if not (_same(given, self.client) | _same(given, self.admin)):
            raise _refusal("the secret")

    def check_admin(self, header: str | None) -> None:
        """Raises ApiError 401."""
        if not _same(_bearer(header), self.admin):
            raise _refusal("the admin secret")


def _bearer(header: str | None) -> str:
    scheme, _, given = (header or "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


def _refusal(what: str) -> ApiError:
    return ApiError(401, f"Authorization: Bearer SECRET with {what} of this relay is required", code="invalid_api_key")
