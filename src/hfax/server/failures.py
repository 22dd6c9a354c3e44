"""Errors as OpenAI's API has them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

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
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for people.
        param: the field that is wrong.
        code: for programs.
        headers: further ones.
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
        """As JSON."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """What to answer where something failed; nothing of what happened inside is told, but for errors made for users."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusyError):
        return ApiError(
            429, "Too many requests wait. Try again later.", code="queue_full", headers={"Retry-After": "1"}
        )
    if isinstance(error, EngineDeadError):
        return ApiError(503, "The engine does not run.", code="engine_dead")
    if isinstance(error, (InvalidInputError, UnsupportedOptionError, UnsupportedModelError)):
        return ApiError(400, f"{error.what} {error.why} {error.fix}")
    if isinstance(error, OutOfMemoryError):
        return ApiError(500, "The device's memory does not hold this request.", code="out_of_memory")
    if isinstance(error, HfaxError):
        return ApiError(500, error.what)
    return ApiError(500, "The request failed inside of the server.", code="internal_error")
