"""Keys of the configuration, and the files, variables and options that set them."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mayfly_cli.app import app
from mayfly_cli.commands import config
from mayfly_cli.config.keys import DEFAULTS, SERVER, table
from mayfly_cli.config.loading import Configuration, ConfigurationError, load
from support.config_values import other_value


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder without a configuration, and no variables of ours."""
    import os

    for name in list(os.environ):
        if name.startswith("MAYFLY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "a-folder").mkdir()
    (folder / "a-file").touch()
    monkeypatch.chdir(folder)
    yield folder


def written(folder: Path, text: str) -> Path:
    file = folder / "mayfly.toml"
    file.write_text(text)
    return file


def value_of(configuration: Configuration, name: str) -> Any:
    """Returns a value as TOML would have it, with paths relative to the working directory."""
    value = configuration.values[name]
    if name == "models":
        return [{"path": each["path"]} for each in value]
    if isinstance(value, Path):
        return value.name
    return list(value) if isinstance(value, tuple) else value


CLOSED = {"aliases", "name"}
"""Keys that need no [[models]], and are alone here."""


@pytest.mark.parametrize("name", SERVER)
class TestEveryKey:
    def test_in_a_file(self, nowhere: Path, name: str) -> None:
        wanted = other_value(SERVER[name])
        line = (
            "[[models]]\npath = 'org/a'" if name == "models" else f"{name} = {config.toml(wanted)}"
        )
        file = written(nowhere, line)
        guarded = SERVER[name].declared.guarded
        configuration = load(file if guarded else None, {})
        assert value_of(configuration, name) == wanted
        assert configuration.origins == {name: str(file)}

    def test_in_the_environment(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        wanted = other_value(SERVER[name])
        text = ", ".join(wanted) if SERVER[name].is_list else str(wanted)
        text = json.dumps(wanted) if name == "models" else text
        monkeypatch.setenv(SERVER[name].variable, text)
        configuration = load(None, {})
        assert value_of(configuration, name) == wanted
        assert configuration.origins == {name: SERVER[name].variable}
        monkeypatch.setenv(SERVER[name].variable, "")
        assert load(None, {}).origins == {}

    def test_as_an_option(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        key, wanted = SERVER[name], other_value(SERVER[name])
        if name == "model":
            options = [wanted]
        elif key.type is bool:
            options = [key.flag if wanted else f"--no-{key.flag[2:]}"]
        elif key.is_list:
            options = [part for value in wanted for part in (key.flag, value)]
        else:
            options = [key.flag, json.dumps(wanted) if name == "models" else str(wanted)]
        shown = CliRunner().invoke(app, ["config", "show", *options])
        assert shown.exit_code == 0, shown.output
        assert f"# {key.flag}" in shown.stdout
        found = tomllib.loads(shown.stdout)[name]
        assert (found[0]["path"] if name == "models" else found) == (
            "org/a" if name == "models" else wanted
        )


@pytest.mark.parametrize("name", [name for name in SERVER if SERVER[name].declared.guarded])
def test_S15_a_file_that_nobody_named_may_not_run_code_or_open_the_server(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wanted = other_value(SERVER[name])
    file = written(nowhere, f"{name} = {config.toml(wanted)}")
    refused = CliRunner().invoke(app, ["config", "show"])
    assert refused.exit_code == 1
    for word in (str(file), name, "--config mayfly.toml"):
        assert word in refused.stderr
    assert value_of(load(file, {}), name) == wanted
    monkeypatch.setenv("MAYFLY_CONFIG", str(file))
    assert name in CliRunner().invoke(app, ["config", "show"]).stdout


def test_S15_a_table_of_a_file_that_nobody_named_may_not_run_code(nowhere: Path) -> None:
    written(nowhere, "[[models]]\npath = 'org/a'\ntrust_remote_code = true")
    with pytest.raises(ConfigurationError, match="trust_remote_code is taken only"):
        load(None, {})
    written(nowhere, "host = '127.0.0.1'\n[[models]]\npath = 'org/a'\ntrust_remote_code = false")
    assert load(None, {}).notes == (f"the configuration is read from {nowhere / 'mayfly.toml'}",)


def test_S15_a_file_of_the_users_own_configuration_folder_may_set_everything(nowhere: Path) -> None:
    usual = Path(os.environ["XDG_CONFIG_HOME"]) / "mayfly" / "mayfly.toml"
    usual.parent.mkdir(parents=True)
    usual.write_text("trust_remote_code = true")
    configuration = load(None, {})
    assert configuration.values["trust_remote_code"] is True
    assert str(usual) in configuration.notes[0]


@pytest.mark.parametrize("command", ["config show", "doctor"])
def test_an_option_may_have_another_flag(command: str) -> None:
    refused = CliRunner().invoke(app, [*command.split(), "--max-num-seqs", "0"])
    assert refused.exit_code == 2
    assert "--max-num-seqs" in refused.stderr
    shown = CliRunner().invoke(app, ["config", "show", "--max-num-seqs", "3"])
    assert re.search(r"^max_rows = 3 +# --max-rows$", shown.stdout, re.MULTILINE)


def test_the_strongest_wins(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(nowhere, "port = 1\nworkers = 1\nmax_rows = 1\n")
    monkeypatch.setenv("MAYFLY_WORKERS", "2")
    monkeypatch.setenv("MAYFLY_MAX_ROWS", "2")
    configuration = load(None, {"max_rows": 3})
    values = configuration.values
    names = ("port", "workers", "max_rows", "host")
    assert [values[name] for name in names] == [1, 2, 3, "127.0.0.1"]
    assert configuration.origins == {
        "port": str(file),
        "workers": "MAYFLY_WORKERS",
        "max_rows": "--max-rows",
    }


def test_where_the_file_is_looked_for(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = nowhere.parent / "config" / "mayfly"
    usual.mkdir(parents=True)
    written(usual, "port = 1")
    monkeypatch.setattr("platformdirs.user_config_path", lambda name: usual)
    assert load(None, {}).values["port"] == 1
    written(nowhere, "port = 2")
    assert load(None, {}).values["port"] == 2
    other = nowhere / "other.toml"
    other.write_text("port = 3")
    assert load(other, {}).values["port"] == 3
    for arguments, environment in (
        (["--config", str(other)], {}),
        ([], {"MAYFLY_CONFIG": "other.toml"}),
    ):
        shown = CliRunner().invoke(app, ["config", "show", *arguments], env=environment)
        assert "port = 3" in shown.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prot = 1", "there is no key 'prot'; did you mean port?"),
        ("maxrows = 1", "there is no key 'maxrows'; did you mean max_rows?"),
        ("zzz = 1", "there is no key 'zzz'"),
        ("api_keys = ['secret']", "did you mean api_keys_file?"),
        ("[[models]]\npath = 'a'\nworker = 2", "models 0: there is no key 'worker'; did you mean"),
        ("[[models]]\nworkers = 2", "models 0.path: Field required"),
        ("[[models]]\npath = 'a'\nport = 2", "models 0: there is no key 'port'"),
        ("[[models]]\npath = 'a'\nworkers = 0", "models 0.workers: Input should be greater"),
        ("[[models]]\npath = 'a'\nkv_bits = 7", "models 0.kv_bits: 7 is not one of 2, 3"),
        ("models = 5", "models: has to be a list of tables, each under [[models]]"),
        ("[models]\npath = 'a'", "models: has to be a list of tables, each under [[models]]"),
        ("[[model]]\npath = 'a'", "tables are [[models]]"),
        ("[model]\npath = 'a'", "tables are [[models]]"),
        ("port = 'x'", "port: Input should be a valid integer"),
        ("port = 65536", "port: Input should be less than"),
        ("kv_bits = 7", "kv_bits: 7 is not one of 2, 3"),
        ("metrics = 'all'", "metrics: all is not one of admin, open, off"),
        ("queue_wait = nan", "queue_wait: Input should be"),
        ("queue_wait = inf", "queue_wait: Input should be a finite number"),
        ("allowed_hosts = [1]", "allowed_hosts 0: Input should be a valid string"),
        ("allowed_hosts = ['a.example:80']", "'a.example:80' does not have the form of"),
        ("allowed_hosts = ['http://a']", "'http://a' does not have the form of"),
        ("allowed_hosts = ['[::1]']", "'[::1]' does not have the form of"),
        ("cors_origins = ['https://a.example/']", "'https://a.example/' does not have the form of"),
        ("cors_origins = ['*', 'a.example']", "'a.example' does not have the form of https://"),
        (
            "cors_origins = ['https://A.example']",
            "does not have the form of https://app.example.com",
        ),
        ("adapter = 'none'", "adapter: there is no folder"),
        ("api_keys_file = 'none'", "api_keys_file: there is no file"),
        ("port = 1\nport = 2", "is not TOML: "),
        ("model = 'a'\n[[models]]\npath = 'a'", "model and models exclude each other"),
        ("name = 'x'\n[[models]]\npath = 'a'", "name: goes with a single model"),
    ],
)
def test_what_makes_no_sense_in_a_file(nowhere: Path, text: str, problem: str) -> None:
    file = written(nowhere, text)
    with pytest.raises(ConfigurationError) as caught:
        load(None, {})
    assert problem in str(caught.value)
    assert caught.value.option is None
    assert str(file) in str(caught.value)
    result = CliRunner().invoke(app, ["config", "show"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert problem in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("MAYFLY_PORT", "tcp://10.0.0.1:80", "MAYFLY_PORT: Input should be a valid integer"),
        ("MAYFLY_INSECURE", "perhaps", "MAYFLY_INSECURE: Input should be a valid boolean"),
        ("MAYFLY_MODELS", "[", "MAYFLY_MODELS: not JSON"),
        ("MAYFLY_MODELS", '[{"pth": "a"}]', "there is no key 'pth'; did you mean path?"),
        ("MAYFLY_ADAPTER", "none", "MAYFLY_ADAPTER: there is no folder none"),
    ],
)
def test_what_makes_no_sense_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        load(None, {})
    assert problem in str(caught.value)


def test_what_makes_no_sense_as_an_option() -> None:
    for options, problem in (
        (["--kv-bits", "7"], "7 is not one of"),
        (["--metrics", "all"], "all is not one of"),
        (["--models", "["], "not JSON"),
        (["--port", "x"], "port"),
        (["a-model", "--models", "[]"], "exclude each other"),
    ):
        result = CliRunner().invoke(app, ["config", "show", *options])
        assert result.exit_code in (1, 2)
        assert problem in result.stderr
        assert ("Usage" in result.stderr) == (result.exit_code == 2)


def test_forms_that_hosts_and_origins_may_have(nowhere: Path) -> None:
    hosts = ["*", "*.example.com", "Mac-2.local", "my_host", "10.0.0.1", "fd00::1"]
    origins = ["*", "null", "http://localhost:3000", "https://a.example", "http://[::1]:80"]
    origins += ["tauri://localhost", "chrome-extension://abc"]
    file = written(nowhere, f"allowed_hosts = {hosts}\ncors_origins = {origins}")
    values = load(file, {}).values
    assert (list(values["allowed_hosts"]), list(values["cors_origins"])) == (hosts, origins)


def test_strange_variables_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets some for a service that is called mayfly."""
    monkeypatch.setenv("MAYFLY_PROT", "1")
    monkeypatch.setenv("MAYFLY_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("MAYFLY_API_KEYS", "secret")
    first, second = load(None, {}).notes
    assert first == "the environment variable MAYFLY_PROT is not known; did you mean MAYFLY_PORT?"
    assert "MAYFLY_SERVICE_HOST" in second


def test_paths_in_a_file_are_relative_to_it(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(
        nowhere,
        "model = 'a-folder'\nadapter = 'a-folder'\nstate_dir = 'state'\napi_keys_file = 'a-file'\n",
    )
    monkeypatch.chdir(nowhere.parent)
    values = load(nowhere / "mayfly.toml", {}).values
    assert values["model"] == str(nowhere / "a-folder")
    assert values["adapter"] == nowhere / "a-folder"
    assert values["state_dir"] == nowhere / "state"
    assert values["api_keys_file"] == nowhere / "a-file"
    written(nowhere, "[[models]]\npath = 'a-folder'\n[[models]]\npath = 'org/model'")
    first, second = load(nowhere / "mayfly.toml", {}).models
    assert (first["path"], second["path"]) == (str(nowhere / "a-folder"), "org/model")


def test_tables_inherit_what_they_leave_out(nowhere: Path) -> None:
    written(
        nowhere,
        "workers = 2\nmax_rows = 8\n"
        "[[models]]\npath = 'a'\naliases = ['x', 'y']\n"
        "[[models]]\npath = 'b'\nname = 'bee'\nworkers = 1\n",
    )
    first, second = load(None, {"max_rows": 4}).models
    names = ("workers", "max_rows", "aliases", "name")
    assert [first[name] for name in names] == [2, 4, ("x", "y"), None]
    assert [second[name] for name in names] == [1, 4, (), "bee"]


def test_one_model_or_several(nowhere: Path) -> None:
    [demo] = load(None, {}).models
    assert demo == table("", {})
    written(nowhere, "[[models]]\npath = 'a'\n[[models]]\npath = 'b'\n")
    assert [each["path"] for each in load(None, {}).models] == ["a", "b"]
    [one] = load(None, {"model": "c", "name": "sea", "workers": 3}).models
    assert one == table("c", {"name": "sea", "workers": 3})


def test_what_is_shown_says_the_same_again(nowhere: Path) -> None:
    file = written(
        nowhere,
        'port = 1\nnodes = ["a", "b\\"c"]\nmetrics = "open"\nworkers = 2\n'
        "[[models]]\npath = 'a'\nkv_bits = 4\n[[models]]\npath = 'b'\naliases = ['x']\n",
    )
    before = load(file, {"queue_wait": 7.5})
    shown = config.settings_toml(before)
    again = nowhere / "again.toml"
    again.write_text(shown)
    assert load(again, {}).values == before.values
    assert "queue_wait = 7.5" in shown
    assert "# --queue-wait" in shown
    assert f"# {nowhere / 'mayfly.toml'}" in shown
    assert "# default" in shown


def test_a_begun_file_says_nothing_and_everything(nowhere: Path) -> None:
    result = CliRunner().invoke(app, ["config", "init"])
    assert (result.exit_code, result.stdout) == (0, "wrote mayfly.toml\n")
    text = (nowhere / "mayfly.toml").read_text()
    assert load(None, {}) == replace(load(None, {}), values=DEFAULTS, origins={})
    said = [line.removeprefix("# ") for line in text.splitlines()]
    lines = [line for line in said if line.partition(" = ")[0] in SERVER and " = " in line]
    own = lines[: len(lines) - 3]  # the example of a table comes last
    assert {line.partition(" = ")[0] for line in own} | {
        key.name for key in SERVER.values() if key.optional
    } == SERVER.keys() - {"models"}
    (nowhere / "mayfly.toml").write_text("\n".join(own))
    assert load(None, {}).values == DEFAULTS
    again = CliRunner().invoke(app, ["config", "init"])
    assert again.exit_code == 1
    assert "is there already" in again.stderr
