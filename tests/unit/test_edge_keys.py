"""API keys: files, the environment, and requests that are sent with one."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mayfly_cli.app import app
from mayfly_server.api.admin import page
from mayfly_server.http import api_keys
from mayfly_server.http.api_keys import (
    Keyring,
    KeysError,
    digest_of,
    find_key,
    from_environment,
    new_key,
    parse_keys_file,
)
from mayfly_server.http.auth import Access, access_to, presented_keys

HASH = digest_of("secret-1").hex()


def one(**fields: object) -> str:
    whole = {"name": '"alice"', "sha256": f'"{HASH}"', **fields}
    return "[[keys]]\n" + "".join(f"{name} = {value}\n" for name, value in whole.items())


def test_a_file_of_keys() -> None:
    alice, bob = parse_keys_file(
        one(requests_per_minute=60, concurrency=4)
        + api_keys.file_entry("bob@example.com", "secret-2", admin=True)
    )
    assert (alice.name, alice.admin) == ("alice", False)
    assert (alice.requests_per_minute, alice.concurrency) == (60, 4)
    assert (bob.name, bob.admin, bob.concurrency) == ("bob@example.com", True, None)
    assert find_key([alice, bob], ["secret-1"]) == alice
    assert find_key([alice, bob], ["nonsense", "secret-2"]) == bob
    for nonsense in ([], [""], ["secret-3"], [HASH], ["secret-1 "], ["SECRET-1"]):
        assert find_key([alice, bob], nonsense) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("secret-1\nsecret-2\n", "not TOML"),
        ("", "keys: Field required"),
        ("keys = []", "keys: "),
        (one(sha256='"secret-1"'), "keys.0.sha256"),
        (one(key='"secret-1"'), "keys.0.key: Extra inputs"),
        (one(name='"a\\nb"'), "keys.0.name"),
        (one(concurrency=0), "keys.0.concurrency"),
        (one(requests_per_minute='"9"'), "keys.0.requests_per_minute"),
        (one() + one(), "two keys are called 'alice'"),
    ],
)
def test_files_that_are_none(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(KeysError) as caught:
        api_keys.read_keys_file(file)
    said = str(caught.value)
    assert said.startswith(f"{file}: ")
    assert problem in said
    assert "secret" not in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="No such file"):
        api_keys.read_keys_file(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(KeysError, match="UTF-8"):
        api_keys.read_keys_file(tmp_path / "bytes.toml")


def test_keys_of_the_environment() -> None:
    assert from_environment({}) == ()
    found = from_environment(
        {"MAYFLY_API_KEYS": " secret-1, secret-2 ,", "MAYFLY_ADMIN_KEY": "the-admins"}
    )
    assert [(key.name, key.admin) for key in found] == [
        ("environment-1", False),
        ("environment-2", False),
        ("admin", True),
    ]
    assert find_key(found, ["secret-2"]) == found[1]
    assert find_key(found, ["the-admins"]) == found[2]
    assert "secret" not in repr(found)
    for empty in ("", " , "):
        with pytest.raises(KeysError, match="holds no key"):
            from_environment({"MAYFLY_API_KEYS": empty})
    for broken in ("ä", "a b", "a\n"):
        with pytest.raises(KeysError, match="key 2 has characters") as caught:
            from_environment({"MAYFLY_API_KEYS": f"secret-1,{broken}x"})
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("variable", ["MAYFLY_API_KEYS", "MAYFLY_ADMIN_KEY"])
def test_S18_a_key_that_can_be_guessed_is_refused(variable: str) -> None:
    for short in ("x", "1234567"):
        with pytest.raises(KeysError, match=f"{variable}: key 1 can be guessed") as caught:
            from_environment({variable: short})
        assert short not in str(caught.value)
    assert from_environment({variable: "12345678"})


def test_S18_a_file_that_others_may_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(one())
    for mode, taken in ((0o600, True), (0o644, True), (0o664, False), (0o646, False)):
        file.chmod(mode)
        if taken:
            assert api_keys.read_keys_file(file)
        else:
            with pytest.raises(KeysError, match=f"others may write to it .mode {mode:o}.*chmod"):
                api_keys.read_keys_file(file)
    os.chown(file, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(
        os, "geteuid", lambda: 12345
    )
    file.chmod(0o644)
    with pytest.raises(KeysError, match="it belongs to user"):
        api_keys.read_keys_file(file)


def test_new_keys_are_long_and_different() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert min(map(len, made)) > 40


class TestKeyring:
    def touch(self, file: Path, text: str) -> None:
        """Writes with another time, however coarse the file system's clock is."""
        file.write_text(text)
        later = time.time() + len(text)
        os.utime(file, (later, later))

    def test_it_is_open_without_keys(self) -> None:
        assert not Keyring().required
        assert Keyring(from_environment({"MAYFLY_API_KEYS": "secret-1"})).required

    def test_it_reads_a_changed_file_again(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.toml"
        self.touch(file, api_keys.file_entry("alice", "secret-1"))
        ring = Keyring(from_environment({"MAYFLY_API_KEYS": "fixed-key"}), file)
        assert ring.required
        assert ring.find(["secret-1"])
        self.touch(file, api_keys.file_entry("bob", "secret-2"))
        ring.reload_if_changed()
        assert not ring.find(["secret-1"])
        assert ring.find(["secret-2"])
        assert ring.find(["fixed-key"])

    @pytest.mark.parametrize("broken", ["nonsense", "", None])
    def test_a_file_that_breaks_changes_nothing(self, tmp_path: Path, broken: str | None) -> None:
        file = tmp_path / "keys.toml"
        self.touch(file, api_keys.file_entry("alice", "secret-1"))
        ring = Keyring((), file)
        if broken is None:
            file.unlink()
        else:
            self.touch(file, broken)
        ring.reload_if_changed()
        assert ring.required
        assert ring.find(["secret-1"])
        self.touch(file, api_keys.file_entry("alice", "secret-9"))
        ring.reload_if_changed()
        assert ring.find(["secret-9"])

    def test_it_does_not_start_without_its_file(self, tmp_path: Path) -> None:
        with pytest.raises(KeysError):
            Keyring((), tmp_path / "none.toml")


class TestCommand:
    def test_makes_keys(self, tmp_path: Path) -> None:
        file = tmp_path / "keys.toml"
        run = CliRunner().invoke
        first = run(app, ["keys", "new", str(file), "alice", "--concurrency", "2"])
        second = run(app, ["keys", "new", str(file), "bob", "--admin"])
        assert (first.exit_code, second.exit_code) == (0, 0)
        found = api_keys.read_keys_file(file)
        assert find_key(found, [first.stdout.strip()]) == found[0]
        assert find_key(found, [second.stdout.strip()]) == found[1]
        assert (found[0].concurrency, found[1].admin) == (2, True)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert first.stdout.strip() not in file.read_text()

    @pytest.mark.parametrize("name", ["alice", 'x"', "a b", ""])
    def test_refuses_what_would_break_the_file(self, tmp_path: Path, name: str) -> None:
        file = tmp_path / "keys.toml"
        CliRunner().invoke(app, ["keys", "new", str(file), "alice"])
        before = file.read_text()
        result = CliRunner().invoke(app, ["keys", "new", str(file), name])
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "with the new key in it" in result.stderr
        assert file.read_text() == before


def scope(*headers: tuple[bytes, bytes], query: bytes = b"") -> dict[str, object]:
    return {"headers": headers, "query_string": query}


def test_where_a_key_may_stand() -> None:
    def found(*headers: tuple[bytes, bytes]) -> list[str]:
        return list(presented_keys(scope(*headers, query=b"key=k&api_key=k")))

    assert found((b"authorization", b"Bearer k")) == ["k"]
    assert found((b"authorization", b"bearer  k ")) == ["k"]
    assert found((b"x-api-key", b"k")) == ["k"]
    assert found((b"authorization", b"Bearer a"), (b"x-api-key", b"b")) == ["a", "b"]
    assert found((b"authorization", b"Bearer")) == [""]
    assert found((b"authorization", b"Basic k"), (b"cookie", b"key=k")) == []
    assert found((b"authorization", b"Bearer \xff")) == ["ÿ"]


def test_paths_and_what_they_need() -> None:
    for path in ("/livez", "/readyz", "/health", "/", "/page/page.css"):
        assert access_to(path, "admin", page.PATHS) is Access.OPEN
    for path in ("/metrics", "/openapi.json", "/mayfly/status", "/mayfly/events", "/mayfly/new"):
        assert access_to(path, "admin", page.PATHS) is Access.ADMIN
    assert access_to("/metrics", "open") is Access.OPEN
    for path in (
        "//",
        "/page/",
        "/page/nonsense",
        "/v1/models",
        "/nonsense",
        "/livez/",
        "/LIVEZ",
        "//livez",
        "/v1/../livez",
    ):
        assert access_to(path, "open", page.PATHS) is Access.KEY
