"""A submitted request, turned into rows that the engine can run.

Rendering a template, tokenizing a long prompt and compiling a grammar take from microseconds to a
second; they run in a small thread pool, so that the tokens of others keep flowing meanwhile.

Questions about a loaded model that need no run: which tokens a prompt is made of, and which text
tokens make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mayfly_protocol.requests import (
    ChatPrompt,
    Generation,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from mayfly_protocol.serving import Detokenize, Detokenized, Inquiry, Submit, Tokenize, Tokenized
from mayfly_protocol.transport.sockets import MAX_FRAME_BYTES
from mayfly_worker.engine.admission import Budget
from mayfly_worker.engine.sampler import SequenceSampling
from mayfly_worker.engine.sequence import SequenceState
from mayfly_worker.grammar.compiler import CompiledGrammar, GrammarCompiler
from mayfly_worker.model.loading import LoadedModel
from mayfly_worker.request_errors import InvalidInput
from mayfly_worker.text.choice import ChoiceText, TextPiece
from mayfly_worker.text.prompts import RenderedPrompt, check_ids, param_of, render, token_budget

MOST_BYTES = MAX_FRAME_BYTES // 2
"""Of one answer. A frame that is too long would cut the connection, for every other request."""
_ID_BYTES = 5
"""That a token id takes on the wire, at most."""


def reply(inquiry: Inquiry, loaded: LoadedModel) -> Tokenized | Detokenized:
    """The answer. Safe to call from several threads.

    Raises:
        InvalidInput: an empty prompt, an id that does not exist, a conversation that the model's
            template refuses, or what has an answer of more than :data:`MOST_BYTES`.
    """
    match inquiry:
        case Tokenize():
            ids = _ids(inquiry, loaded)
            shown = () if inquiry.count_only else tuple(ids)
            if _ID_BYTES * len(shown) > MOST_BYTES:
                param = param_of(inquiry.prompt)
                raise InvalidInput(f"{len(ids)} tokens are too many for one answer", param)
            return Tokenized(inquiry.rid, inquiry.attempt, len(ids), shown)
        case Detokenize(rid, attempt, ids=given):
            check_ids(given, loaded.probe.width, "tokens")
            text: str = loaded.tokenizer.decode(list(given), skip_special_tokens=False)
            if len(text.encode()) > MOST_BYTES:
                raise InvalidInput("they make too long a text for one answer", "tokens")
            return Detokenized(rid, attempt, text)


def _ids(inquiry: Tokenize, loaded: LoadedModel) -> list[int]:
    prompt = inquiry.prompt
    if isinstance(prompt, TextPrompt):
        if not prompt.text:
            raise InvalidInput("the prompt is empty: it has no tokens", "prompt")
        if not inquiry.special:
            found: list[int] = loaded.tokenizer.encode(prompt.text, add_special_tokens=False)
            return found
    return render(prompt, loaded.tokenizer, loaded.probe.width).ids


UNLIMITED = 1 << 30
"""Stands for the context of a model that names none."""


@dataclass(slots=True)
class Choice:
    """One choice of a prepared request: its row and the text that its tokens make. ``ended``
    where a continued choice turns out to have been complete already: why, with what had been held
    back of its text."""

    index: int
    row: SequenceState
    text: ChoiceText
    ended: TextPiece | None = None


@dataclass(slots=True)
class Prepared:
    """``together`` is how many choices start at once, from one prefill: those that there are rows
    and memory for. Each of the others follows when there is room for it. ``echo`` is the prompt's
    text, which comes before a choice's first token where it was asked for. ``reasoning`` counts
    the tokens of the thoughts of choices that had ended elsewhere and are not run again."""

    submit: Submit
    prompt_tokens: int
    boundaries: tuple[int, ...]
    choices: list[Choice]
    together: int = 1
    echo: str = ""
    reasoning: int = 0


class Preparer:
    """Checks and prepares requests for one loaded model. Safe to use from several threads."""

    def __init__(self, loaded: LoadedModel, budget: Budget, row_ids: Iterator[int]) -> None:
        self._loaded = loaded
        self._budget = budget
        self._row_ids = row_ids
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.probe.width)
        self._eos = frozenset(loaded.tokenizer.eos_token_ids)

    def prepare(self, submit: Submit) -> Prepared:
        """Raises InvalidInput for what this model cannot do, naming the parameter."""
        generation = submit.generation
        width = self._loaded.probe.width
        check_ids([i for i, _ in generation.sampling.logit_bias], width, "logit_bias")
        check_ids(generation.ending.stop_token_ids, width, "stop_token_ids")
        rendered = render(generation.prompt, self._loaded.tokenizer, width)
        budget = token_budget(
            len(rendered.ids),
            generation.ending.max_tokens,
            self._loaded.card.context or UNLIMITED,
            param_of(generation.prompt),
        )
        grammar = self._grammar(generation, rendered)
        choices = [
            self._choice(submit, index, rendered, budget, grammar)
            for index in range(generation.n)
            if index not in submit.finished
        ]
        return Prepared(
            submit,
            len(rendered.ids),
            (rendered.system_tokens,) if rendered.system_tokens else (),
            choices,
            together=self._together([choice.row for choice in choices]),
            echo=self._echo(generation.prompt) if generation.output.echo else "",
            reasoning=self._reasoning(submit, rendered) if generation.output.split else 0,
        )

    def _reasoning(self, submit: Submit, rendered: RenderedPrompt) -> int:
        total = 0
        for index in submit.finished:
            text = self._text(submit, index, rendered)
            text.replay(_before(submit, index))
            total += text.reasoning_tokens
        return total

    def _text(self, submit: Submit, index: int, rendered: RenderedPrompt) -> ChoiceText:
        return ChoiceText(
            submit.generation, self._loaded.tokenizer, rendered, rid=submit.rid, choice=index
        )

    def _together(self, rows: Sequence[SequenceState]) -> int:
        """How many of the choices fit beside each other; each always fits alone. Those that go on
        from where they were have nothing in common."""
        if any(row.generated for row in rows):
            return 1
        return max(1, self._budget.rows_at(max((row.expected for row in rows), default=0)))

    def _echo(self, prompt: Prompt) -> str:
        match prompt:
            case TextPrompt(text):
                return text
            case TokenPrompt(ids):
                decoded: str = self._loaded.tokenizer.decode(list(ids), skip_special_tokens=False)
                return decoded
            case _:
                return ""

    def _grammar(self, generation: Generation, rendered: RenderedPrompt) -> CompiledGrammar | None:
        prompt, constraint = generation.prompt, generation.output.constraint
        if isinstance(prompt, ChatPrompt) and prompt.tools and prompt.tool_choice == "required":
            return self._grammars.tools(prompt, in_reasoning=rendered.in_reasoning)
        if constraint is None:
            return None
        return self._grammars.compile(constraint, in_reasoning=rendered.in_reasoning)

    def _choice(
        self,
        submit: Submit,
        index: int,
        rendered: RenderedPrompt,
        max_tokens: int,
        grammar: CompiledGrammar | None,
    ) -> Choice:
        generation = submit.generation
        ending = generation.ending
        before = _before(submit, index)
        stop_ids = frozenset(ending.stop_token_ids)
        if not ending.ignore_eos:
            stop_ids |= self._eos
        text = self._text(submit, index, rendered)
        ended: TextPiece | None = None
        if (reason := text.replay(before)) is not None:
            ended = TextPiece(finish=reason)
        elif len(before) >= max_tokens:  # its first worker's context was larger
            ended = text.end("length")
        matcher: Any = None
        if grammar is not None:
            matcher = grammar.matcher()
            matcher.replay(before)
        row = SequenceState(
            id=next(self._row_ids),
            tokens=[*rendered.ids, *before],
            sampling=SequenceSampling(
                generation.sampling,
                index,
                # A finished grammar allows the end alone; to ban that would leave nothing.
                banned=() if grammar else tuple(sorted(stop_ids)),
                banned_until=ending.min_tokens,
            ),
            max_tokens=max_tokens,
            generated=len(before),
            stop_ids=stop_ids,
            logprobs=generation.output.logprobs,
            matcher=matcher,
        )
        return Choice(index, row, text, ended)


def _before(submit: Submit, choice: int) -> list[int]:
    """What a choice had generated elsewhere."""
    return list(submit.resume[choice]) if choice < len(submit.resume) else []
