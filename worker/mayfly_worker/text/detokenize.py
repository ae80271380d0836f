"""Decodes token ids to text, one id at a time and never half a character.

The text equals that of decoding the output's ids alone, whatever the prompt was: characters that a
tokenizer drops at the beginning of a text (the first space, with SentencePiece) are dropped from
the output, too.

Special tokens are hidden, as ``skip_special_tokens`` does, except those of reasoning and tool call
markers: the output parser has to find these markers in the text. Inside a tool call all special
tokens are shown except those that end an answer, since some formats use special tokens of their own
in a call (``[ARGS]``, ``<|"|>``) that the call's parser reads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from mayfly_worker.text.markers import marker_strings

REPLACEMENT = "�"


def hugging_face(tokenizer: Any) -> Any:
    """Returns the Hugging Face tokenizer inside mlx-lm's ``TokenizerWrapper``."""
    return tokenizer._tokenizer


def rust_tokenizer(tokenizer: Any) -> Any | None:
    """Returns the ``tokenizers.Tokenizer``, written in Rust, that decodes for this tokenizer. None
    if decoding is done in Python, as a subclass may do even if it has a Rust tokenizer."""
    inner = hugging_face(tokenizer)
    rust = getattr(inner, "_tokenizer", None)
    plain = (
        isinstance(rust, Tokenizer)
        and type(inner).decode is PreTrainedTokenizerBase.decode
        and type(inner)._decode is PreTrainedTokenizerFast._decode
    )
    return rust if plain else None


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens: the text of ``hidden`` ones is left out of an output, but the text of
    ``in_calls``, which are some of the hidden ones, is shown inside tool calls."""

    hidden: frozenset[int]
    in_calls: frozenset[int]


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> SpecialTokens:
    added = hugging_face(tokenizer).added_tokens_decoder
    shown = {
        id
        for marker in marker_strings(tokenizer)
        for id in tokenizer.encode(marker, add_special_tokens=False)
    }
    hidden = frozenset(id for id, token in added.items() if token.special and id not in shown)
    return SpecialTokens(hidden, hidden - frozenset(tokenizer.eos_token_ids))


class Detokenizer:
    """Decodes the ids of one output, one at a time. The texts that :meth:`add` and :meth:`finish`
    return are together the text that decoding all ids at once gives, with hidden special tokens
    left out (without ``hide_special``, none is). The one exception is malformed output, in which a
    later id may change the decoded text of earlier ids: text that was returned stays as it is."""

    __slots__ = ("_hidden", "_in_calls", "_stream")

    def __init__(self, tokenizer: Any, *, hide_special: bool = True) -> None:
        special = special_tokens(tokenizer)
        self._hidden = special.hidden if hide_special else frozenset()
        self._in_calls = special.in_calls
        rust = rust_tokenizer(tokenizer)
        self._stream: _Stream = (
            _PythonStream(tokenizer.detokenizer) if rust is None else _RustStream(rust)
        )

    def add(self, id: int, *, in_call: bool = False) -> str:
        """Returns the text that became certain with this token id; empty while a character is
        incomplete.

        An id beyond the vocabulary (from padded logits) has no text. ``in_call`` says that the id
        belongs to a tool call, in which more special tokens are shown.
        """
        if id in self._hidden and not (in_call and id in self._in_calls):
            return ""
        return self._stream.add(id)

    def finish(self) -> str:
        """Returns the text of an incomplete last character, if any. No id can be added
        afterwards."""
        return self._stream.finish()


class _Stream(Protocol):
    def add(self, id: int) -> str: ...

    def finish(self) -> str: ...


class _RustStream:
    """Decodes with the tokenizer's own decoder, which is written in Rust.

    ``DecodeStream`` returns nothing while the text ends in U+FFFD, and decodes no more than the ids
    since the last returned text. It raises if a later id changes text that it has returned, which
    only malformed output does: a byte-fallback decoder turns *all* bytes of a run into U+FFFD once
    one of them is wrong, even bytes that had made a whole character. Text that was returned stays
    as it is; further text is taken from the same position of the text that all ids decode to.
    """

    __slots__ = ("_ids", "_length", "_rust", "_stream", "_waiting")

    def __init__(self, rust: Any) -> None:
        self._rust = rust
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._length = 0
        self._waiting = False

    def add(self, id: int) -> str:
        self._ids.append(id)
        try:
            text = self._stream.step(self._rust, id)
        except Exception as error:
            # The binding raises a bare Exception, whose text alone tells its kinds apart.
            if not str(error).startswith("Invalid prefix"):
                raise
            text = self._realign()
        if not text:
            self._waiting = True
            return ""
        self._waiting = False
        self._length += len(text)
        return str(text)

    def _realign(self) -> str:
        self._stream = DecodeStream(ids=self._ids, skip_special_tokens=False)
        return self._whole()[self._length :]

    def finish(self) -> str:
        return self._whole()[self._length :] if self._waiting else ""

    def _whole(self) -> str:
        return str(self._rust.decode(self._ids, skip_special_tokens=False))


class _PythonStream:
    """Decodes with mlx-lm's detokenizer, for tokenizers that are written in Python."""

    __slots__ = ("_detokenizer",)

    def __init__(self, detokenizer: Any) -> None:
        self._detokenizer = detokenizer

    def add(self, id: int) -> str:
        self._detokenizer.add_token(id)
        return str(self._detokenizer.last_segment)

    def finish(self) -> str:
        self._detokenizer.finalize()
        return str(self._detokenizer.last_segment)


class TokenTexts:
    """Text and bytes of single tokens, for log-probabilities: ``texts(id) -> (text, bytes)``.

    The bytes of an output's tokens, joined, are the bytes of the output (but for characters that
    the decoder drops at its beginning); a token that is no whole character has U+FFFD in its text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._inner = hugging_face(tokenizer)
        self._added: dict[int, str] = {
            id: token.content for id, token in self._inner.added_tokens_decoder.items()
        }
        self._kinds = _decoder_kinds(rust_tokenizer(tokenizer))
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, id: int) -> tuple[str, bytes]:
        """Returns the text and the bytes of a token; both are empty for an id that the tokenizer
        does not have."""
        known = self._known.get(id)
        if known is None:
            raw = self._bytes(id)
            known = self._known[id] = (raw.decode("utf-8", "replace"), raw)
        return known

    def _bytes(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        token = self._inner.convert_ids_to_tokens(id)
        if token is None:
            return b""
        if "ByteLevel" in self._kinds:
            return _byte_level(token)
        if "ByteFallback" in self._kinds and _is_byte(token):
            return bytes([int(token[3:5], 16)])
        if self._kinds & {"ByteFallback", "Metaspace"}:
            return str(token).replace("▁", " ").encode()
        return str(self._inner.decode([id])).encode()


def _decoder_kinds(rust: Any | None) -> frozenset[str]:
    """Returns the type names of the decoders (``ByteLevel``, ``ByteFallback`` and others) that a
    tokenizer applies in turn."""
    if rust is None or rust.decoder is None:
        return frozenset()
    decoder = json.loads(rust.decoder.__getstate__())
    return frozenset(d["type"] for d in decoder.get("decoders", [decoder]))


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Maps the characters in which GPT-2's byte-level tokens write bytes to these bytes: a byte
    that is printable in Latin-1 is written as itself, the others as the characters from U+0100 on,
    in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()
