"""Who may use the HTTP side: `Authorization: Bearer SECRET`, nothing in a URL.

The credentials are the relay's own (`relay/credentials.py`), with their roles, rotation and limits: "client" may ask,
"admin" sees the status of all sessions and may ask as well. A request counts as a frame for each session that it opens,
at least as one, and as the bytes of its body; who is above a limit gets a 429 and when to come again.
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

    def admit(self, credential: Credential, num_bytes: int, now: float) -> None:
        """Count a request, whose body has so many bytes.

        Raises:
            ApiError: 429, and nothing is counted: a limit of the credential is exhausted by what came before.
        """
        pace = self._access.pace(credential, now)
        if pace is None:
            return
        over = pace.refusal(now)
        if over is not None:
            text = (
                f"credential {credential.name} is above its limit, {over.limit} = {over.value:g}; "
                f"come again in {over.wait_s:.1f} s"
            )
            raise ApiError(429, text, code="rate_limit_exceeded", retry_after_s=over.wait_s)
        pace.charge(1, num_bytes, now)

    def charge(self, credential: Credential, num_frames: int, num_bytes: int, now: float) -> None:
        """Count what has only shown after the request was let in."""
        pace = self._access.pace(credential, now)
        if pace is not None:
            pace.charge(num_frames, num_bytes, now)

    def has(self, header: str | None, *roles: str) -> bool:
        """Whether `credential` would find one."""
        try:
            self.credential(header, *roles)
        except ApiError:
            return False
        return True
