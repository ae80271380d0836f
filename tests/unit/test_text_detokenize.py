"""Text comes out as soon as it is certain, and is what decoding everything at once gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_worker.text.detokenize import Detokenizer, TokenTexts, hugging_face, rust_tokenizer
from support import vocabularies

BYTE_LEVEL = vocabularies.byte_level("tools")
VOCABULARY = len(BYTE_LEVEL)
BYTES = range(3, 259)


def stream(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each id, and of the end."""
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(id) for id in ids), detokenizer.finish()]


def whole(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


byte_level_ids = st.lists(
    st.integers(0, VOCABULARY - 1) | st.sampled_from(BYTES) | st.sampled_from([0, 1, 2]),
    max_size=60,
)


@settings(deadline=None)
@given(byte_level_ids)
def test_is_the_decoded_whole_and_a_prefix_of_it_all_along(ids: list[int]) -> None:
    pieces = stream(BYTE_LEVEL, ids)
    assert "".join(pieces) == whole(BYTE_LEVEL, ids)
    for end in range(len(ids)):
        assert whole(BYTE_LEVEL, ids[:end]).startswith("".join(pieces[:end]))


@settings(deadline=None)
@given(st.text())
def test_R32_characters_of_several_tokens_come_whole(text: str) -> None:
    ids = vocabularies.in_pieces(text, BYTE_LEVEL)
    pieces = stream(BYTE_LEVEL, ids)
    assert "".join(pieces) == text
    # A U+FFFD can only be one that the model wrote: three bytes of it, held back until it ends.
    assert "�" in text or not any("�" in piece for piece in pieces)


def test_R34_only_the_incomplete_character_is_held_back() -> None:
    ids = vocabularies.ids_of("hi", BYTE_LEVEL)
    emoji = vocabularies.in_pieces("🦄", BYTE_LEVEL)
    after = vocabularies.ids_of(" ok", BYTE_LEVEL)
    assert len(emoji) > 1
    pieces = stream(BYTE_LEVEL, [*ids, *emoji, *after])
    assert "".join(pieces[: len(ids)]) == "hi"
    assert [p for p in pieces[len(ids) : len(ids) + len(emoji)] if p] == ["🦄"]
    assert pieces[len(ids) + len(emoji) - 1] == "🦄"
    assert "".join(pieces[len(ids) + len(emoji) :]) == " ok"


def test_half_a_character_at_the_end_is_replaced() -> None:
    ids = vocabularies.in_pieces("a🦄", BYTE_LEVEL)[:-1]
    assert stream(BYTE_LEVEL, ids)[-1] == "�"


def test_special_tokens_and_ids_beyond_the_vocabulary_have_no_text() -> None:
    ids = vocabularies.ids_of("a<|im_start|>b<|im_end|>", BYTE_LEVEL)
    assert "".join(stream(BYTE_LEVEL, [*ids, VOCABULARY + 7])) == "ab"


@pytest.mark.parametrize("strips", [True, False])
def test_the_first_space_is_as_in_the_decoded_output(strips: bool) -> None:
    tokenizer = vocabularies.byte_fallback(strips=strips)
    ids = tokenizer.convert_tokens_to_ids(["▁hello", "▁world", "▁▁", "<0xF0>"])
    ids += tokenizer.convert_tokens_to_ids(["<0x9F>", "<0xA6>", "<0x84>", "</s>", "lo"])
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == whole(tokenizer, ids) == (" " * (not strips)) + "hello world  🦄lo"
    assert pieces[:2] == [" hello"[strips:], " world"]
    assert pieces[6] == "🦄"


@settings(deadline=None)
@given(st.booleans(), st.lists(st.integers(0, 270), max_size=40))
def test_malformed_bytes_never_stop_a_byte_fallback_stream(strips: bool, ids: list[int]) -> None:
    tokenizer = vocabularies.byte_fallback(strips=strips)
    text, expected = "".join(stream(tokenizer, ids)), whole(tokenizer, ids)
    assert len(text) == len(expected)
    # Only what the decoder takes back later can differ.
    assert all(mine == right or right == "�" for mine, right in zip(text, expected, strict=True))


def test_word_pieces_are_joined() -> None:
    tokenizer = vocabularies.word_piece()
    ids = tokenizer.convert_tokens_to_ids(["go", "##ing", ",", "now", "[SEP]", "."])
    assert "".join(stream(tokenizer, ids)) == "going, now."


@settings(deadline=None)
@given(st.lists(st.integers(0, 94), max_size=30))
def test_a_tokenizer_written_in_python_is_streamed_by_mlx_lm(ids: list[int]) -> None:
    tokenizer = vocabularies.python_written()
    assert rust_tokenizer(tokenizer) is None
    assert "".join(stream(tokenizer, ids)) == whole(tokenizer, ids)


def test_a_tokenizer_that_decodes_in_python_keeps_its_own_decoding() -> None:
    class Shouting(type(hugging_face(BYTE_LEVEL))):  # type: ignore[misc]
        def decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super().decode(*args, **kwargs)).upper()

    rust = rust_tokenizer(BYTE_LEVEL)
    tokenizer = type(BYTE_LEVEL)(Shouting(tokenizer_object=rust))
    assert rust_tokenizer(tokenizer) is None
    assert "".join(stream(tokenizer, vocabularies.ids_of("hey you", BYTE_LEVEL))) == "HEY YOU"


# Single tokens


@settings(deadline=None)
@given(st.text(min_size=1))
def test_token_bytes_make_up_the_text(text: str) -> None:
    texts = TokenTexts(BYTE_LEVEL)
    ids = vocabularies.ids_of(text, BYTE_LEVEL)
    assert b"".join(texts(id)[1] for id in ids) == text.encode()


def test_token_texts_of_half_characters_specials_and_nothing() -> None:
    texts = TokenTexts(BYTE_LEVEL)
    first = vocabularies.ids_of("🦄", BYTE_LEVEL)[0]
    assert texts(first)[1] == "🦄".encode()[: len(texts(first)[1])]
    assert "�" in texts(first)[0]
    assert texts(2) == ("<|im_end|>", b"<|im_end|>")
    assert texts(VOCABULARY + 7) == ("", b"")


def test_token_texts_with_byte_fallback() -> None:
    tokenizer = vocabularies.byte_fallback()
    texts = TokenTexts(tokenizer)
    hello, byte = tokenizer.convert_tokens_to_ids(["▁hello", "<0xF0>"])
    assert texts(hello) == (" hello", b" hello")
    assert texts(byte) == ("�", b"\xf0")


def test_token_texts_of_other_tokenizers_are_their_decoding() -> None:
    assert TokenTexts(vocabularies.python_written())(33) == ("A", b"A")
    assert TokenTexts(vocabularies.word_piece())(2) == ("do", b"do")
