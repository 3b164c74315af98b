"""AWS's error codes, by what can be done about them; see `infra.errors`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's own, for an address that cannot be reached
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError

from infra.errors import (
    AlreadyExists,
    CapacityError,
    InUse,
    NotFound,
    PermissionDenied,
    ProviderError,
    QuotaError,
    Transient,
)

CAPACITY = {
    "InsufficientInstanceCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "InsufficientFreeAddressesInSubnet",
    "InsufficientVolumeCapacity",
    "SpotMaxPriceTooLow",
    "Unsupported",
    "UnsupportedOperation",
}
QUOTA = {
    "AddressLimitExceeded",
    "InstanceLimitExceeded",
    "InternetGatewayLimitExceeded",
    "LimitExceeded",
    "LimitExceededException",
    "MaxSpotInstanceCountExceeded",
    "ParameterLimitExceeded",
    "SecurityGroupLimitExceeded",
    "VcpuLimitExceeded",
    "VolumeLimitExceeded",
    "VpcLimitExceeded",
}
CREDENTIALS = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
"""Who asks is not believed: not (or no longer) known, or the clock is too far from AWS's."""
PERMISSION = {
    *CREDENTIALS,
    "AccessDenied",
    "AccessDeniedException",
    "Blocked",
    "OptInRequired",
    "PendingVerification",
    "UnauthorizedOperation",
}
EXISTS = {
    "EntityAlreadyExists",
    "InvalidGroup.Duplicate",
    "InvalidPermission.Duplicate",
    "ParameterAlreadyExists",
    "Resource.AlreadyAssociated",
    "ResourceAlreadyExistsException",
    "RouteAlreadyExists",
}
IN_USE = {
    "DeleteConflict",
    "DependencyViolation",
    "InvalidGroup.InUse",
    "InvalidIPAddress.InUse",
    "OperationAbortedException",
    "VolumeInUse",
}
TRANSIENT = {
    "ConcurrentModification",
    "EC2ThrottledException",
    "InternalError",
    "InternalFailure",
    "InternalServerError",
    "RequestLimitExceeded",
    "ServiceFailure",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "TooManyUpdates",
    "Unavailable",
}
HINTS: dict[type[ProviderError], str] = {
    QuotaError: "ask for more in the Service Quotas console, or choose another type or region in the spec",
    PermissionDenied: "the permissions needed are in infra/policy.json",
}
BELIEVE_US = "renew the credentials if they have expired, and look at this machine's clock"
P = ParamSpec("P")
T = TypeVar("T")


def error_kind(code: str, message: str = "") -> type[ProviderError]:
    """The class for a code."""
    table: tuple[tuple[set[str], type[ProviderError]], ...] = (
        (CAPACITY, CapacityError),
        (QUOTA, QuotaError),
        (PERMISSION, PermissionDenied),
        (EXISTS, AlreadyExists),
        (IN_USE, InUse),
        (TRANSIENT, Transient),
    )
    for codes, kind in table:
        if code in codes:
            return kind
    if code.startswith("InvalidAMIID"):
        # An image does not appear by waiting.
        return ProviderError
    if "NotFound" in code or code in ("NoSuchEntity", "InvalidInstanceID.Malformed", "Gateway.NotAttached"):
        return NotFound
    # A profile made a moment ago is not known everywhere yet.
    if code.startswith("InvalidParameter") and "nstance" in message and "rofile" in message:
        return Transient
    return ProviderError


def translate(exc: Exception, what: str) -> ProviderError:
    """The error of ours for one of botocore's; `what` was being done."""
    if isinstance(exc, ClientError):
        code = str(exc.response.get("Error", {}).get("Code", ""))
        message = str(exc.response.get("Error", {}).get("Message", ""))
        kind = error_kind(code, message)
        hint = BELIEVE_US if code in CREDENTIALS else HINTS.get(kind, "")
        return kind(f"{what}: {code}: {' '.join(message.split())}", code=code, hint=hint)
    if isinstance(exc, NoCredentialsError | PartialCredentialsError):
        return PermissionDenied(f"{what}: {exc}", hint="run `aws configure`, or set AWS_PROFILE")
    lost = isinstance(exc, HTTPClientError | ConnectionError | ResponseParserError)
    return (Transient if lost else ProviderError)(f"{what}: {' '.join(str(exc).split())[:300]}")


def translated(method: Callable[P, T]) -> Callable[P, T]:
    """A method of the provider whose botocore errors come out as ours."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (ClientError, BotoCoreError, ResponseParserError) as exc:
            operation = getattr(exc, "operation_name", "") or method.__name__
            region = next((a for a in args if isinstance(a, str) and a.count("-") >= 2), "")
            raise translate(exc, f"{operation}{' in ' + region if region else ''}") from exc

    return call


def response_code(exc: Any) -> str:
    """The code of a ClientError."""
    return str(exc.response.get("Error", {}).get("Code", ""))
