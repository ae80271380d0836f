"""Everything that can go wrong with a request, as its client is told.

::

    RequestError                     status  type                   retryable
    ├── InvalidRequest                  400  invalid_request_error  no
    │   ├── ModelNotFound               404
    │   ├── BodyTooLarge                413
    │   └── UnsupportedMediaType        415
    ├── Overloaded                      429  rate_limit_error       yes, Retry-After
    ├── Unavailable                     503  server_error           yes, Retry-After
    │   ├── WorkersLost                 503                         yes
    │   └── ShuttingDown                503                         yes
    └── RequestFailed                   500  server_error           no, x-should-retry: false

Whatever raises one of these decides what the client reads, so a message never holds a path, a
prompt or an exception's own text. An error before the first byte becomes a status and an
envelope; one in the middle of a stream becomes an error event with the same envelope.
"""

from __future__ import annotations

import math
from typing import Any


class RequestError(Exception):
    """An error with an answer: ``message`` for people, ``code`` and ``param`` for programs."""

    status = 500
    type = "server_error"
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

    def envelope(self) -> dict[str, Any]:
        """OpenAI's error object, and whether another try can succeed."""
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
        """OpenAI's SDKs obey both: they retry 408, 409, 429 and 5xx unless told not to."""
        headers: dict[str, str] = {}
        if self.status == 429 or self.status >= 500:
            headers["x-should-retry"] = "true" if self.retryable else "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


class InvalidRequest(RequestError):
    """The request can never be answered as it is. ``param`` names the field."""

    status = 400
    type = "invalid_request_error"


class ModelNotFound(InvalidRequest):
    status = 404
    default_code = "model_not_found"


class BodyTooLarge(InvalidRequest):
    status = 413
    default_code = "request_too_large"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    default_code = "unsupported_media_type"


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


class ShuttingDown(Unavailable):
    default_code = "shutting_down"


class RequestFailed(RequestError):
    """The request met a fault of its own, named by ``code``; another try would meet it again."""
