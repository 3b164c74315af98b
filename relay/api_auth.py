"""Who may use the HTTP side: `Authorization: Bearer SECRET`, nothing in a URL.

The credentials are the relay's own (`relay/credentials.py`), with their roles, rotation and limits: "client" may ask,
"admin" sees the status of all sessions and may ask as well.
"""

from __future__ import annotations

from relay.access import Access
from relay.api_errors import ApiError
from relay.credentials import Credential

NO_SECRET = "-"


class HttpAccess:
    """The relay's credentials, for HTTP requests."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def credential(self, header: str | None, *roles: str) -> Credential:
        """The credential of a request, which must have one of these roles.

        Raises:
            ApiError: 401 without a secret that is known, 403 with one that is for something else.
        """
        scheme, _, given = (header or "").partition(" ")
        identity = self._access.authenticate(given.strip() if scheme.lower() == "bearer" else NO_SECRET)
        if identity is None:
            text = "Authorization: Bearer SECRET with a secret of this relay is required"
            raise ApiError(401, text, code="invalid_api_key")
        credential = identity.credential
        if not set(roles) & set(credential.roles):
            text = f"credential {credential.name} is for {', '.join(credential.roles)}, not for this"
            raise ApiError(403, text, code="not_allowed")
        return credential

    def has(self, header: str | None, *roles: str) -> bool:
        """Whether `credential` would find one."""
        try:
            self.credential(header, *roles)
        except ApiError:
            return False
        return True
