"""Questions about a loaded model that need no run: which tokens a prompt is made of, and which text
tokens make."""

from __future__ import annotations

from mayfly_protocol.requests import TextPrompt
from mayfly_protocol.serving import Detokenize, Detokenized, Inquiry, Tokenize, Tokenized
from mayfly_protocol.sockets import MAX_FRAME_BYTES
from mayfly_worker.errors import InvalidRequest
from mayfly_worker.loading import Loaded
from mayfly_worker.text.prompts import check_ids, param_of, render

MOST_BYTES = MAX_FRAME_BYTES // 2
"""Of one answer. A frame that is too long would cut the connection, for every other request."""
_ID_BYTES = 5
"""That a token id takes on the wire, at most."""


def reply(inquiry: Inquiry, loaded: Loaded) -> Tokenized | Detokenized:
    """The answer. Safe to call from several threads.

    Raises:
        InvalidRequest: an empty prompt, an id that does not exist, a conversation that the model's
            template refuses, or what has an answer of more than :data:`MOST_BYTES`.
    """
    match inquiry:
        case Tokenize():
            ids = _ids(inquiry, loaded)
            shown = () if inquiry.count_only else tuple(ids)
            if _ID_BYTES * len(shown) > MOST_BYTES:
                param = param_of(inquiry.prompt)
                raise InvalidRequest(f"{len(ids)} tokens are too many for one answer", param)
            return Tokenized(inquiry.rid, inquiry.attempt, len(ids), shown)
        case Detokenize(rid, attempt, ids=given):
            check_ids(given, loaded.probe.width, "tokens")
            text: str = loaded.tokenizer.decode(list(given), skip_special_tokens=False)
            if len(text.encode()) > MOST_BYTES:
                raise InvalidRequest("they make too long a text for one answer", "tokens")
            return Detokenized(rid, attempt, text)


def _ids(inquiry: Tokenize, loaded: Loaded) -> list[int]:
    prompt = inquiry.prompt
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise InvalidRequest("the prompt is empty: it has no tokens", "prompt")
        if not inquiry.special:
            found: list[int] = loaded.tokenizer.encode(prompt.text, add_special_tokens=False)
            return found
    return render(prompt, loaded.tokenizer, loaded.probe.width).ids
