"""Errors in the OpenAI API's format: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from hfax.errors import (
    EngineBusyError,
    EngineDeadError,
    HfaxError,
    InvalidInputError,
    OutOfMemoryError,
    UnsupportedModelError,
    UnsupportedOptionError,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status code.
        message: human-readable message.
        param: the invalid field.
        code: machine-readable error code.
        headers: additional response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The error as a JSON object."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unknown_model(name: str, known: tuple[str, ...]) -> ApiError:
    """The error of a request that names another model."""
    return ApiError(
        404, f"The model {name[:200]!r} does not exist. Use {known[0]!r}.", param="model", code="model_not_found"
    )


def as_api_error(error: BaseException) -> ApiError:
    """Convert an exception to an error response; internal details are hidden, except in errors meant for users."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusyError):
        return ApiError(429, "The waiting queue is full. Retry later.", code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineDeadError):
        return ApiError(503, "The engine is not running.", code="engine_dead")
    if isinstance(error, (InvalidInputError, UnsupportedOptionError, UnsupportedModelError)):
        return ApiError(400, f"{error.what} {error.why} {error.fix}")
    if isinstance(error, OutOfMemoryError):
        return ApiError(500, "Out of device memory for this request.", code="out_of_memory")
    if isinstance(error, HfaxError):
        return ApiError(500, error.what)
    return ApiError(500, "Internal server error.", code="internal_error")
