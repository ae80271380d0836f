"""Makes mlx-lm tokenizers for tests of text handling: byte-level, SentencePiece style, WordPiece,
written in Python, and with the markers of tool calls or reasoning."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_python import PreTrainedTokenizer

from mayfly_worker.text.dialects.dialect import Framing
from mayfly_worker.text.dialects.families import DIALECTS
from mayfly_worker.text.dialects.registry import choose_format, thought_named
from support.answer_templates import HARMONY
from support.models import tokenizer as kinds

CONTEXT = 2048

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁hello", "▁world", "hello", "h", "e", "l", "o", "lo", ",", ".", "▁▁", "é"]


@lru_cache
def byte_level(kind: kinds.Kind = "thinking", template: str | None = None) -> TokenizerWrapper:
    with tempfile.TemporaryDirectory() as folder:
        kinds.save(Path(folder), kind, context=CONTEXT, template=template)
        return load(Path(folder))


@lru_cache
def byte_fallback(*, strips: bool = True) -> TokenizerWrapper:
    """A tokenizer like one converted from SentencePiece: tokens with ``▁`` for spaces and
    ``<0xE2>`` for bytes. With ``strips`` its decoder drops a text's first space."""
    vocabulary = {token: id for id, token in enumerate(["<s>", "</s>", *BYTES, *WORDS])}
    rust = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    rust.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>")
    )


@lru_cache
def word_piece() -> TokenizerWrapper:
    words = ["[UNK]", "[SEP]", "do", "##n", "'", "t", "go", "##ing", ",", "now", "."]
    rust = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    rust.decoder = decoders.WordPiece()
    rust.add_special_tokens([AddedToken("[SEP]", special=True)])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="[SEP]"))


class Characters(PreTrainedTokenizer):
    """A tokenizer written in Python, with one token for each printable ASCII character."""

    def __init__(self, **options: Any) -> None:
        self._tokens = {chr(32 + n): n for n in range(95)}
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        return {**self._tokens, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._tokens.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(32 + index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


@lru_cache
def python_written() -> TokenizerWrapper:
    return TokenizerWrapper(Characters(eos_token="</s>"))


INSIDE = (
    *("[ARGS]", "[CALL_ID]", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<arg_key>", "<tool_sep>"),
)
"""Tokens within tool calls, in some dialects."""


HARMONY_MARKERS = (
    *("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"),
    "<|call|>",
)


@lru_cache
def harmony(template: str = HARMONY) -> TokenizerWrapper:
    """A tokenizer with the special tokens of gpt-oss, and a template in the shape of its own."""
    rust = kinds.train("plain")
    rust.add_special_tokens([AddedToken(marker, special=True) for marker in HARMONY_MARKERS])
    inner = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=kinds.PAD, pad_token=kinds.PAD)
    inner.chat_template = template
    return TokenizerWrapper(inner)


PRINTED = ("apriel", "ernie45", "exaone_deep", "granite", "hunyuan_a13b", "reasoning", "thinking")
"""Forms of thoughts whose marks are no tokens."""


@lru_cache
def with_parser(
    name: str, *, special: bool = False, thought: str = "none", in_prompt: str = ""
) -> TokenizerWrapper:
    """A byte-level tokenizer of a model that writes tool calls in the dialect of this name, and
    thoughts in the form of the name ``thought``. Their markers are single tokens of the vocabulary,
    special tokens with ``special``. Prompts end with ``in_prompt``."""
    dialect = DIALECTS[name]
    form = thought_named(thought)
    assert not isinstance(form, Framing)
    rust = kinds.train("plain")
    markers = [*dialect.starts, *dialect.ends, *(HARMONY_MARKERS if name == "harmony" else ())]
    if form is not None and form.name not in PRINTED:
        markers += [*(form.tokens or (form.start, form.end)), *form.inside, *(form.answer or ())]
    rust.add_tokens([AddedToken(m, special=special, normalized=False) for m in markers])
    rust.add_special_tokens([AddedToken(token, special=True) for token in INSIDE])
    inner = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=kinds.END, pad_token=kinds.PAD)
    inner.chat_template = (
        "{# <|START_RESPONSE|>, <|END_RESPONSE|> #}"
        "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ {json.dumps(in_prompt)} }}}}{{% endif %}}"
    )
    tokenizer = TokenizerWrapper(inner, eos_token_ids=[2])
    choose_format(tokenizer, name, thought)
    return tokenizer


def ids_of(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def in_pieces(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    """The token ids of a text that is encoded one character at a time, so that a marker such as
    ``<tool_call>`` in the text does not become a single token."""
    return [id for character in text for id in ids_of(character, tokenizer)]


@lru_cache
def thinking_with(kind: str) -> TokenizerWrapper:
    """A tokenizer of a reasoning model, whose reasoning ends with ``</think>``. By ``kind``, this
    marker is one ordinary token ("thinking"), a special token ("special"), or several tokens
    ("plain")."""
    if kind == "thinking":
        return byte_level("thinking")
    rust = kinds.train("plain")
    if kind == "special":
        rust.add_special_tokens([AddedToken(m, special=True) for m in kinds.THINK_MARKERS])
    wrapper = TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=kinds.END, pad_token=kinds.PAD)
    )
    choose_format(wrapper, reasoning_parser="qwen3")
    return wrapper
