"""Keys on the wire: the files that hold them, and trusted peers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mayfly_protocol.transport import keys as key_files
from mayfly_protocol.transport.keys import (
    IdentityError,
    TrustList,
    make_pair,
    new_pair,
    parse_trusted,
    read_pair,
    secret_file,
    trusted_file,
    write_trusted,
)

keys = st.binary(min_size=32, max_size=32).map(bytes.hex)
names = st.from_regex(r"[A-Za-z0-9_.@-]{1,64}", fullmatch=True)


def test_a_pair_is_made_once_and_only_for_this_user(tmp_path: Path) -> None:
    assert read_pair(tmp_path) is None
    made = make_pair(tmp_path)
    assert read_pair(tmp_path) == made
    assert stat.S_IMODE(secret_file(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE(secret_file(tmp_path).parent.stat().st_mode) == 0o700
    assert made.secret.hex() not in repr(made)
    with pytest.raises(IdentityError, match="already"):
        make_pair(tmp_path)
    assert read_pair(tmp_path) == made


def test_one_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    made = make_pair(tmp_path)
    secret_file(tmp_path).chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600") as refused:
        read_pair(tmp_path)
    assert made.secret.hex() not in str(refused.value)


@pytest.mark.parametrize("content", ["", "hello\n", "0f" * 31, "0F" * 32, "0f" * 33])
def test_no_key(tmp_path: Path, content: str) -> None:
    make_pair(tmp_path)
    secret_file(tmp_path).write_text(content)
    with pytest.raises(IdentityError, match="holds no key"):
        read_pair(tmp_path)


@given(st.dictionaries(keys, names, max_size=8))
def test_the_list_comes_back_as_it_was_written(trusted: dict[str, str]) -> None:
    text = "# a comment\n\n" + "".join(f"{key}  {name} \n" for key, name in trusted.items())
    if len(set(trusted.values())) < len(trusted):
        with pytest.raises(IdentityError, match="twice"):
            parse_trusted(text)
    else:
        assert parse_trusted(text) == trusted


@given(st.text(max_size=200))
def test_a_list_is_understood_or_refused_in_words(text: str) -> None:
    try:
        found = parse_trusted(text)
    except IdentityError as error:
        assert str(error).startswith("line ")
    else:
        assert all(len(key) == 64 for key in found)


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    file, key = trusted_file(tmp_path), new_pair().public
    write_trusted(file, {key: "gateway"})
    with pytest.raises(IdentityError, match="not a valid name"):
        write_trusted(file, {key: "not a name"})
    assert key_files.read_trusted(file) == {key: "gateway"}
    assert [path.name for path in file.parent.iterdir()] == ["trusted"]


def test_a_list_is_followed(tmp_path: Path) -> None:
    file = trusted_file(tmp_path)
    first, second = new_pair().public, new_pair().public
    trusted = TrustList(file)
    assert (len(trusted), trusted.problem) == (0, "")
    write_trusted(file, {first: "a", second: "b"})
    assert trusted.reload() == frozenset()
    assert first in trusted and trusted.name(first) == "a"
    write_trusted(file, {second: "b"})
    assert trusted.reload() == {first}
    assert first not in trusted
    assert trusted.name(first) == f"{first[:8]}..."


def test_a_broken_list_changes_nothing(tmp_path: Path) -> None:
    file = trusted_file(tmp_path)
    key = new_pair().public
    write_trusted(file, {key: "a"})
    trusted = TrustList(file)
    for number, content in enumerate(("gibberish\n", "")):
        file.write_text(content)
        os.utime(file, (number, number))
        assert trusted.reload() == frozenset()
        assert key in trusted
    assert "line 1" in trusted.problem
    write_trusted(file, {})
    assert trusted.reload() == {key}
    assert trusted.problem == ""


def test_a_list_of_nobody_is_not_empty(tmp_path: Path) -> None:
    """So that a file which an editor has just begun to write is told from it."""
    file = trusted_file(tmp_path)
    write_trusted(file, {})
    assert file.read_text().startswith("#")
    assert key_files.read_trusted(file) == {}


def test_a_list_that_is_gone_trusts_nobody(tmp_path: Path) -> None:
    file = trusted_file(tmp_path)
    key = new_pair().public
    write_trusted(file, {key: "a"})
    trusted = TrustList(file)
    file.unlink()
    assert trusted.reload() == {key}
    assert len(trusted) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(IdentityError, match="cannot be written"):
        make_pair(tmp_path)
