"""Errors that concern one request and are no fault of its worker.

::

    Exception
     +-- InvalidInput         before the request runs: becomes Rejected(reason="invalid"), HTTP 400
     |    +-- PromptTooLong   with the numbers of tokens
     +-- GrammarFailed        while the request runs: becomes Failed, for this request alone
"""

from __future__ import annotations


class InvalidInput(Exception):
    """The model can never run the request as it is, on any worker.

    ``message`` says what is wrong, where, and what would be right; ``param`` names the request's
    field as in the HTTP API; ``code`` is a fixed word that programs can test for.
    """

    prompt_tokens: int | None = None
    context: int | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class PromptTooLong(InvalidInput):
    """The prompt, in the request's field ``param``, leaves no room for an answer in the model's
    context. ``prompt_tokens`` is the prompt's length, ``context`` the model's context length, both
    in tokens."""

    def __init__(self, prompt_tokens: int, context: int, param: str) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, and the context of {context} tokens "
            "has to hold the prompt and the answer; shorten the prompt",
            param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.context = context


class GrammarFailed(Exception):
    """A grammar reached its limits, or met a token that it does not allow, in the middle of an
    answer."""
