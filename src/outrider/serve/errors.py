"""Errors as clients see them: OpenAI's error object, never a stack trace.

A client's mistake is 4xx, a fault of the server 5xx, never the other way round.
"""

from __future__ import annotations

import re
from typing import Any

from outrider.errors import (
    CapacityError,
    ConfigError,
    DataError,
    DrainingError,
    MissingExtra,
    OutriderError,
    PromptError,
)

__all__ = ["ApiError", "api_error", "bad_request", "internal_error"]

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
# Errors of the engine begin with the field they are about: "top_p 2 is not possible; ..."
_LEADING_FIELD = re.compile(r"([a-z][a-z_.]*) ")


LONGEST_MESSAGE = 2000
"""What a client sent may stand in a message; not all of it, if it is long."""


class ApiError(Exception):
    """A refusal on its way to the client.

    Args:
        status: HTTP status.
        message: what was given, what is allowed, what to do.
        param: the request's field that it is about.
        code: short machine-readable word.
        retry_after_s: seconds after which trying again may help.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= LONGEST_MESSAGE else message[: LONGEST_MESSAGE - 3] + "..."
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers that tell a client whether and when to try again."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        elif self.status == 408:
            headers["x-should-retry"] = "false"
        if self.status == 503:
            headers["connection"] = "close"  # the next try should find another server behind this address
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def internal_error() -> ApiError:
    """A 500 that says nothing about the inside; the log says it all."""
    return ApiError(500, "the server met a fault of its own; its log says more", code="internal_error")


def api_error(error: BaseException) -> ApiError:
    """What a client is told about an exception."""
    if isinstance(error, ApiError):
        return error
    retry_after_s = getattr(error, "retry_after_s", None)
    if isinstance(error, OutriderError) and retry_after_s is not None:
        return ApiError(429, str(error), code="queue_full", retry_after_s=float(retry_after_s))
    if isinstance(error, DrainingError):
        return ApiError(503, str(error), code="draining", retry_after_s=5)
    if isinstance(error, PromptError):
        return bad_request(str(error), param="prompt", code="invalid_prompt")
    if isinstance(error, CapacityError):
        return bad_request(str(error), param="max_tokens", code="capacity_exceeded")
    if isinstance(error, MissingExtra):
        return bad_request(f"this server cannot do that: {error}", code="unsupported_field")
    if isinstance(error, ConfigError | DataError):
        found = _LEADING_FIELD.match(str(error))
        return bad_request(str(error), param=found[1] if found else None, code="invalid_value")
    return internal_error()
