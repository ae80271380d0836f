"""Errors that concern one request and are no fault of its worker.

::

    Exception
     +-- InvalidInput     before the request runs: becomes Rejected(reason="invalid"), HTTP 400
     +-- GrammarFailed    while the request runs: becomes Failed, for this request alone
"""

from __future__ import annotations


class InvalidInput(Exception):
    """The model can never run the request as it is, on any worker.

    ``message`` says what is wrong, where, and what would be right; ``param`` names the request's
    field as in the HTTP API; ``code`` is a fixed word that programs can test for.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class GrammarFailed(Exception):
    """A grammar reached its limits, or met a token that it does not allow, in the middle of an
    answer."""
