"""The errors that a request can end with, as its client reads them.

::

    RequestError                     status  type                   retryable
    ├── InvalidRequest                  400  invalid_request_error  no
    │   ├── Unauthorized                401
    │   ├── Forbidden                   403
    │   ├── ModelNotFound               404
    │   ├── NotServed                   404
    │   ├── RequestTimeout              408                         yes
    │   ├── BodyTooLarge                413
    │   ├── AddressTooLong              414
    │   ├── UnsupportedMediaType        415
    │   ├── Misdirected                 421
    │   └── HeadersTooLarge             431
    ├── RateLimited                     429  rate_limit_error       yes, Retry-After
    ├── Overloaded                      429  rate_limit_error       yes, Retry-After
    ├── Unavailable                     503  server_error           yes, Retry-After
    │   ├── WorkersLost                 503                         yes
    │   ├── TooManyConnections          503                         yes
    │   └── ShuttingDown                503                         yes
    ├── DeadlineExceeded                504  server_error           no, x-should-retry: false
    └── RequestFailed                   500  server_error           no, x-should-retry: false

The code that raises one of these decides what the client reads, so a message never holds a path, a
prompt or an exception's own text. An error before the first byte becomes a status and an
envelope; one in the middle of a stream becomes an error event with the same envelope.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]


@with_config(ConfigDict(extra="forbid"))
class ErrorObject(TypedDict):
    message: Annotated[str, Field(examples=["temperature: Input should be a valid number."])]
    type: ErrorType
    param: Annotated[str | None, Field(description="The field it is about.", examples=["stop"])]
    code: Annotated[str | None, Field(description="For programs.", examples=["model_not_found"])]
    retryable: Annotated[bool, Field(description="Whether another try can succeed.")]


@with_config(ConfigDict(extra="forbid"))
class ErrorAnswer(TypedDict):
    """OpenAI's error envelope."""

    error: ErrorObject


class RequestError(Exception):
    """An error with an answer: ``message`` for people, ``code`` and ``param`` for programs."""

    status = 500
    type: ErrorType = "server_error"
    default_code: str | None = None
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def envelope(self) -> ErrorAnswer:
        """OpenAI's error object, with ``retryable``: whether another try can succeed."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                "retryable": self.retryable,
            }
        }

    def headers(self) -> dict[str, str]:
        """The headers that tell a client whether and when to try again: ``x-should-retry`` and
        ``retry-after``. OpenAI's SDKs follow both; without them they retry 408, 409, 429 and
        5xx."""
        headers: dict[str, str] = {}
        if self.status in (408, 429) or self.status >= 500:
            headers["x-should-retry"] = "true" if self.retryable else "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


class InvalidRequest(RequestError):
    """The request can never be answered as it is. ``param`` names the field."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(InvalidRequest):
    """The request has no API key, or an unknown one."""

    status = 401
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"www-authenticate": "Bearer"}


class Forbidden(InvalidRequest):
    """The key may not do this, or the request comes from a page of another site."""

    status = 403
    default_code = "permission_denied"


class ModelNotFound(InvalidRequest):
    """No model of this name is served."""

    status = 404
    default_code = "model_not_found"


class NotServed(InvalidRequest):
    """The API exists elsewhere and is not served here."""

    status = 404
    default_code = "not_served"


class RequestTimeout(InvalidRequest):
    """The request took too long to arrive."""

    status = 408
    default_code = "request_timeout"
    retryable = True


class BodyTooLarge(InvalidRequest):
    """The body is too long, or holds too many values."""

    status = 413
    default_code = "request_too_large"


class AddressTooLong(InvalidRequest):
    """The URL is too long."""

    status = 414
    default_code = "uri_too_long"


class UnsupportedMediaType(InvalidRequest):
    """The body is no JSON by its headers, or compressed."""

    status = 415
    default_code = "unsupported_media_type"


class Misdirected(InvalidRequest):
    """The request is for a host that this server does not answer for."""

    status = 421
    default_code = "host_not_allowed"


class HeadersTooLarge(InvalidRequest):
    """The headers are too many or too long."""

    status = 431
    default_code = "headers_too_large"


class RateLimited(RequestError):
    """The API key has exceeded its limits."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    retryable = True


class Overloaded(RequestError):
    """Every worker of the model has a full queue."""

    status = 429
    type = "rate_limit_error"
    default_code = "overloaded"
    retryable = True


class Unavailable(RequestError):
    """No worker of the model is ready, or none became ready in time."""

    status = 503
    default_code = "model_unavailable"
    retryable = True


class WorkersLost(Unavailable):
    """The request outlived as many workers as it may."""

    default_code = "workers_lost"


class TooManyConnections(Unavailable):
    """The server has as many connections as it may."""

    default_code = "too_many_connections"


class ShuttingDown(Unavailable):
    """The server is shutting down."""

    default_code = "shutting_down"


class RequestFailed(RequestError):
    """The request met a fault of its own, named by ``code``; another try would meet it again."""


class DeadlineExceeded(RequestError):
    """The request took longer than any may; another try would take as long."""

    status = 504
    default_code = "deadline_exceeded"
