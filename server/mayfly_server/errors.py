"""The errors by which a request can end, and the HTTP answers that clients get for them.

::

    RequestError                     status  type                   retryable
    ├── InvalidRequest                  400  invalid_request_error  no
    │   ├── ContextExceeded             400
    │   ├── ThreadUnsupported           400
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
        └── UnreadableCall              500                         yes

The text of an error is sent to the client, so the code that raises an error never puts a path, a
prompt or the text of another exception into it. An error before the first byte of an answer is sent
as an HTTP status with a JSON object; an error in the middle of a stream is sent as an event with
that object.
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
    param: Annotated[
        str | None,
        Field(description="The field of the request that the error is about.", examples=["stop"]),
    ]
    code: Annotated[
        str | None,
        Field(description="The error's name, for programs.", examples=["model_not_found"]),
    ]
    retryable: Annotated[bool, Field(description="True if the same request may succeed later.")]


@with_config(ConfigDict(extra="forbid"))
class ErrorAnswer(TypedDict):
    """The JSON object of an error answer, in OpenAI's form."""

    error: ErrorObject


class RequestError(Exception):
    """An error that is sent to the client: ``message`` is its text, ``code`` its name for programs,
    ``param`` the field of the request that is wrong. ``retry_after_s`` becomes Retry-After."""

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
        """The error as JSON in OpenAI's form. ``retryable``, which OpenAI does not have, is True if
        the same request may succeed later."""
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
        """The headers that tell a client if and when to try again: ``x-should-retry`` and
        ``retry-after`` (seconds). OpenAI's SDKs obey both headers; without the headers, these SDKs
        retry the statuses 408, 409, 429 and 5xx."""
        headers: dict[str, str] = {}
        if self.status in (408, 429) or self.status >= 500:
            headers["x-should-retry"] = "true" if self.retryable else "false"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


class InvalidRequest(RequestError):
    """The request is invalid and has to be changed. ``param`` names the wrong field, if it is
    one."""

    status = 400
    type = "invalid_request_error"


class ContextExceeded(InvalidRequest):
    """The prompt, in the request's field ``param``, is too long for the model's context.

    ``tokens`` counts the prompt's tokens and at least one token of the answer; it is larger than
    ``context``. Agents recognize the wording of the message, or the code, and shorten the
    conversation.
    """

    default_code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, context: int, *, param: str | None) -> None:
        self.tokens = max(prompt_tokens, context + 1)
        self.context = context
        place = "prompt" if param == "prompt" else "messages"
        if prompt_tokens > context:
            used = f"your {place} resulted in {prompt_tokens} tokens"
        else:
            used = (
                f"you requested {self.tokens} tokens ({prompt_tokens} in the {place}, "
                f"{self.tokens - prompt_tokens} in the completion)"
            )
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, {used}. Please "
            f"reduce the length of the {place}.",
            param=param,
        )


class ThreadUnsupported(InvalidRequest):
    """The request, in Anthropic's API, asks the server to keep the conversation. Anthropic's SDKs
    recognize the code and send the whole conversation instead."""

    default_code = "thread_unsupported_request"


class Unauthorized(InvalidRequest):
    """The request has no API key, or an API key that is not known."""

    status = 401
    default_code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"www-authenticate": "Bearer"}


class Forbidden(InvalidRequest):
    """The API key has no right to this request, or the request comes from a web page of another
    site."""

    status = 403
    default_code = "permission_denied"


class ModelNotFound(InvalidRequest):
    """The server has no model of the name that the request gives."""

    status = 404
    default_code = "model_not_found"


class NotServed(InvalidRequest):
    """The request is for a part of OpenAI's or Anthropic's API that this server does not have."""

    status = 404
    default_code = "not_served"


class RequestTimeout(InvalidRequest):
    """The bytes of the request took too long to arrive."""

    status = 408
    default_code = "request_timeout"
    retryable = True


class BodyTooLarge(InvalidRequest):
    """The request's body is too long, or holds too many JSON values."""

    status = 413
    default_code = "request_too_large"


class AddressTooLong(InvalidRequest):
    """The request's URL is too long."""

    status = 414
    default_code = "uri_too_long"


class UnsupportedMediaType(InvalidRequest):
    """The request's body is not JSON by its Content-Type, or is compressed."""

    status = 415
    default_code = "unsupported_media_type"


class Misdirected(InvalidRequest):
    """The request's Host header names a host that this server does not answer for."""

    status = 421
    default_code = "host_not_allowed"


class HeadersTooLarge(InvalidRequest):
    """The request has too many headers, or too long ones."""

    status = 431
    default_code = "headers_too_large"


class RateLimited(RequestError):
    """The API key has exceeded its limit of requests per minute or at a time."""

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
    """The request was tried on several workers, and all of them were lost before its end; it is not
    tried again."""

    default_code = "workers_lost"


class TooManyConnections(Unavailable):
    """The server has the largest number of connections that it allows."""

    default_code = "too_many_connections"


class ShuttingDown(Unavailable):
    """The server is shutting down."""

    default_code = "shutting_down"


class RequestFailed(RequestError):
    """The request itself makes the model or its workers fail, and would do so again. ``code`` names
    the kind of fault. ``cause``, the text of the first cause, is for the log: clients do not get
    it."""

    def __init__(self, message: str, *, code: str | None = None, cause: str = "") -> None:
        super().__init__(message, code=code)
        self.cause = cause


class UnreadableCall(RequestFailed):
    """The model wrote a tool call that cannot be read, and its beginning has been sent."""

    default_code = "unreadable_tool_call"
    retryable = True


class DeadlineExceeded(RequestError):
    """The request took longer than the server's limit, and would probably do so again."""

    status = 504
    default_code = "deadline_exceeded"
