"""Errors of a request that are not its worker's fault.

::

    Exception
     +-- InvalidInput     before it runs: becomes Rejected(reason="invalid"), a 400
     +-- GrammarFailed    while it runs: becomes Failed, for this request alone
"""

from __future__ import annotations


class InvalidInput(Exception):
    """This model can never run the request as it is.

    ``message`` says what is wrong, where, and what would be right; ``param`` is the request's
    field in the API's words; ``code`` a word for programs.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class GrammarFailed(Exception):
    """A grammar met its limits, or a token that it does not allow, in the middle of an answer."""
