"""Questions about a loaded model that need no run: which tokens a prompt is made of, and which text
tokens make."""

from __future__ import annotations

from mayfly_protocol.requests import TextPrompt
from mayfly_protocol.serving import Detokenize, Detokenized, Inquiry, Tokenize, Tokenized
from mayfly_worker.errors import InvalidRequest
from mayfly_worker.loading import Loaded
from mayfly_worker.text.prompts import check_ids, render


def reply(inquiry: Inquiry, loaded: Loaded) -> Tokenized | Detokenized:
    """The answer. Safe to call from several threads.

    Raises:
        InvalidRequest: an empty prompt, an id that does not exist, or a conversation that the
            model's template refuses.
    """
    match inquiry:
        case Tokenize():
            ids = _ids(inquiry, loaded)
            shown = () if inquiry.count_only else tuple(ids)
            return Tokenized(inquiry.rid, inquiry.attempt, len(ids), shown)
        case Detokenize(rid, attempt, ids=given):
            check_ids(given, loaded.probe.width, "tokens")
            text: str = loaded.tokenizer.decode(list(given), skip_special_tokens=False)
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
