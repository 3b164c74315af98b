"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a fitting status."""

from __future__ import annotations

import re
from typing import Any

from relay.errors import RequestFailed
from wire.errors import FrameTooLarge, WireError

_FIELD = re.compile(r"[a-z_]+(?=[ .\[])")
STATUS_OF_CODE = {
    "bad_request": 400,
    "bad_session": 409,
    "empty_prompt": 400,
    "prompt_too_long": 400,
    "no_verify_node": 503,
    "overloaded": 429,
    "draining": 503,
    "verify_lost": 502,
    "target_failed": 500,
    "slow_reader": 503,
}
CODE_OF_OPENAI = {"prompt_too_long": "context_length_exceeded"}
RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request that gets an error for an answer.

    Args:
        status: of the HTTP response.
        message: for people; names the field, the value and the limit.
        param: the field at fault.
        code: for programs.
        retry_after_s: with 429 and 503, when it may be worth trying again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """Whose fault it was, in OpenAI's words."""
        by_status = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                     429: "rate_limit_error"}  # fmt: skip
        return by_status.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def from_wire(exc: WireError, *, prompt_field: str) -> ApiError:
    """What went wrong in the pipeline, as the caller should see it.

    Args:
        prompt_field: how this request calls its prompt: "messages", "prompt" or "tokens".
    """
    if isinstance(exc, FrameTooLarge):
        return ApiError(413, f"{prompt_field} is too large: {exc}", param=prompt_field, code="request_too_large")
    if not isinstance(exc, RequestFailed):
        # Our own checks of a request's fields; each begins with the field's name.
        param = field_of(str(exc), prompt_field)
        return ApiError(400, _as_given(str(exc), param), param=param, code="invalid_value")
    status = STATUS_OF_CODE.get(exc.code, 500)
    if exc.code == "no_verify_node" and exc.message.startswith("no verify node serves any model"):
        return ApiError(503, exc.message, code=exc.code)
    if exc.code == "no_verify_node" and "draining" not in exc.message:
        return ApiError(404, exc.message, param="model", code="model_not_found")
    param = None
    if status == 400:
        about_prompt = exc.code in ("prompt_too_long", "empty_prompt")
        param = prompt_field if about_prompt else field_of(exc.message, prompt_field)
    return ApiError(status, _as_given(exc.message, param), param=param, code=CODE_OF_OPENAI.get(exc.code, exc.code))


def _as_given(message: str, param: str | None) -> str:
    """The message, with the field named as the caller named it."""
    is_about_ids = param is not None and message.startswith("prompt_ids")
    return f"{param}{message.removeprefix('prompt_ids')}" if is_about_ids else message


def field_of(message: str, prompt_field: str) -> str | None:
    """The field that a message of `wire/fields.py` begins with, by the name the caller knows it under."""
    match = _FIELD.match(message)
    if match is None:
        return prompt_field if "chat template" in message else None
    return {"prompt_ids": prompt_field, "tokens": prompt_field, "prompt": prompt_field}.get(match[0], match[0])
