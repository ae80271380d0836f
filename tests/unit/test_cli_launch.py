"""``mayfly launch``: each agent's settings, the choice of the model, and the start of a program
that stands in for the agent."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mayfly_cli.agent_settings import AGENTS, NO_KEY, AgentName, ServedModel, Settings
from mayfly_cli.commands.launch import environment, past_proxy, shell_lines
from support.command_line import mayfly

KEY = "mk-launch-secret"
FOLDER = Path("/cache/mayfly/launch")
URL = "http://mac.local:8000"


def served(
    *, name: str = "org/Qwen3-4B", context: int | None = 131_072, needs_key: bool = True
) -> ServedModel:
    return ServedModel(URL, name, context, needs_key)


def made(agent: AgentName, **model: Any) -> Settings:
    return AGENTS[agent].settings(served(**model), FOLDER)


# Settings


@pytest.mark.parametrize(
    ("context", "output"),
    [
        (None, None),
        (2_048, 1_024),
        (16_000, 4_096),
        (131_072, 16_384),
        (1_000_000, 32_000),
    ],
)
def test_room_for_an_answer_depends_on_the_context(context: int | None, output: int | None) -> None:
    assert served(context=context).output == output


def test_claude_code_uses_the_model_for_everything() -> None:
    settings = made(AgentName.CLAUDE)
    models = [value for name, value in settings.variables.items() if name.endswith("_MODEL")]
    assert len(models) == 7
    assert set(models) == {"org/Qwen3-4B"}
    assert settings.variables["ANTHROPIC_BASE_URL"] == URL
    assert settings.variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    assert settings.variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "16384"
    assert settings.key_variables == ("ANTHROPIC_AUTH_TOKEN",)
    assert "ANTHROPIC_API_KEY" in settings.unset
    flag, overriding = settings.arguments
    assert flag == "--settings"
    assert json.loads(overriding) == {"env": {**settings.variables, "ANTHROPIC_API_KEY": ""}}


def test_codex_gets_a_provider_as_arguments() -> None:
    import tomllib

    settings = made(AgentName.CODEX, name='odd "name"')
    assert settings.arguments[::2] == ("-c",) * (len(settings.arguments) // 2)
    assert tomllib.loads("\n".join(settings.arguments[1::2])) == {
        "model": 'odd "name"',
        "model_provider": "mayfly-launch",
        "model_context_window": 131_072,
        "model_providers": {
            "mayfly-launch": {
                "name": "Mayfly",
                "base_url": f"{URL}/v1",
                "wire_api": "responses",
                "env_key": "MAYFLY_API_KEY",
            }
        },
    }
    assert settings.variables == {}


def test_opencode_gets_a_configuration_in_a_variable() -> None:
    config = json.loads(made(AgentName.OPENCODE).variables["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == config["small_model"] == "mayfly/org/Qwen3-4B"
    provider = config["provider"]["mayfly"]
    assert provider["options"] == {"baseURL": f"{URL}/v1", "apiKey": "{env:MAYFLY_API_KEY}"}
    assert provider["models"]["org/Qwen3-4B"]["limit"] == {"context": 131_072, "output": 16_384}


def test_pi_gets_an_extension() -> None:
    settings = made(AgentName.PI)
    ((path, text),) = settings.files.items()
    assert settings.arguments[:2] == ("-e", str(path))
    assert path.parent == FOLDER
    provider = json.loads(text[text.index('"mayfly", ') + 10 : text.rindex(");")])
    assert provider["apiKey"] == "$MAYFLY_API_KEY"
    assert provider["baseUrl"] == f"{URL}/v1"
    assert provider["models"][0]["contextWindow"] == 131_072


def test_qwen_code_gets_the_context_in_a_file() -> None:
    settings = made(AgentName.QWEN)
    ((path, text),) = settings.files.items()
    assert settings.variables["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] == str(path)
    (provider,) = json.loads(text)["modelProviders"]["openai"]
    assert provider["id"] == settings.variables["OPENAI_MODEL"] == "org/Qwen3-4B"
    assert provider["baseUrl"] == settings.variables["OPENAI_BASE_URL"]
    assert provider["generationConfig"] == {"contextWindowSize": 131_072}
    assert settings.variables["OPENAI_BASE_URL"] == f"{URL}/v1"
    assert settings.key_variables == ("OPENAI_API_KEY",)


@pytest.mark.parametrize("agent", AgentName)
def test_nothing_is_said_about_an_unknown_context(agent: AgentName) -> None:
    assert "None" not in str(asdict(made(agent, context=None)).values())
    assert "131072" not in str(made(agent, context=None))


@pytest.mark.parametrize("agent", AgentName)
def test_without_a_key_no_variable_is_the_key(agent: AgentName) -> None:
    settings = made(agent, needs_key=False)
    assert settings.key_variables == ()
    assert "MAYFLY_API_KEY" not in str(settings)
    for name, value in settings.variables.items():
        if name.endswith(("KEY", "TOKEN")):
            assert value == NO_KEY


def test_N19_an_agent_goes_past_the_proxy_to_a_server_of_this_machine() -> None:
    assert past_proxy("127.0.0.1", {"PATH": "/bin", "http_proxy": ""}) == {}
    current = {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "corp.example"}
    names = "corp.example,127.0.0.1"
    assert past_proxy("127.0.0.1", current) == {"no_proxy": names, "NO_PROXY": names}
    assert past_proxy("127.0.0.1", current | {"no_proxy": names})["NO_PROXY"] == names


def test_an_agent_gets_no_key_but_its_own() -> None:
    current = {
        "PATH": "/bin",
        "MAYFLY_API_KEY": KEY,
        "MAYFLY_ADMIN_KEY": "admin",
        "MAYFLY_API_KEYS": "all",
        "ANTHROPIC_API_KEY": "theirs",
        "ANTHROPIC_MODEL": "other",
    }
    result = environment(made(AgentName.CLAUDE), current)
    assert result["PATH"] == "/bin"
    assert result["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert result["ANTHROPIC_MODEL"] == "org/Qwen3-4B"
    assert not {"MAYFLY_ADMIN_KEY", "MAYFLY_API_KEYS", "ANTHROPIC_API_KEY"} & result.keys()


# The command


class FakeServer(BaseHTTPRequestHandler):
    """Lists models as Mayfly does, to whoever sends the right key."""

    models: ClassVar[dict[str, int | None]] = {}
    aliases: ClassVar[dict[str, str]] = {}
    key: ClassVar[str] = ""

    def do_GET(self) -> None:
        listed = [{"id": name, "max_model_len": size} for name, size in self.models.items()]
        name = self.path.removeprefix("/v1/models").lstrip("/")
        if self.key and self.headers["authorization"] != f"Bearer {self.key}":
            self._send(401, {"error": {"message": "no"}})
        elif not name:
            self._send(200, {"data": listed})
        elif name in self.aliases:
            self._send(200, next(m for m in listed if m["id"] == self.aliases[name]))
        else:
            self._send(404, {"error": {"message": "no"}})

    def _send(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("MAYFLY_API_KEY", "MAYFLY_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    FakeServer.models = {"smol": 131_072}
    FakeServer.aliases = {}
    FakeServer.key = ""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeServer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_print_starts_nothing(url: str) -> None:
    result = mayfly("launch", "claude", "--url", url, "--print", "--", "-p", "what is this?")
    assert result.exit_code == 0
    assert f"export ANTHROPIC_BASE_URL={url}\n" in result.stdout
    assert result.stdout.endswith("}' -p 'what is this?'\n")
    assert result.stderr == ""


def test_the_key_is_not_printed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAYFLY_API_KEY", KEY)
    FakeServer.key = KEY
    for agent in AgentName:
        result = mayfly("launch", agent, "--url", url, "--print")
        assert result.exit_code == 0
        assert KEY not in result.output
        assert NO_KEY not in result.output


@pytest.mark.parametrize("variable", ["MAYFLY_API_KEY", "MAYFLY_ADMIN_KEY"])
def test_a_wrong_key_and_one_for_admins_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    FakeServer.key = KEY
    monkeypatch.setenv(variable, "wrong" if variable == "MAYFLY_API_KEY" else KEY)
    result = mayfly("launch", "codex", "--url", url, "--print")
    assert result.exit_code == 1
    assert result.stderr.endswith("set MAYFLY_API_KEY\n")


def test_of_several_models_one_has_to_be_chosen(url: str) -> None:
    FakeServer.models = {"one": 65_536, "org/two": 65_536}
    FakeServer.aliases = {"second": "org/two"}
    result = mayfly("launch", "codex", "--url", url, "--print")
    assert result.exit_code == 1
    assert "choose one with --model one or --model org/two" in result.stderr
    result = mayfly("launch", "codex", "--url", url, "--model", "three", "--print")
    assert result.exit_code == 1
    assert "serves no model 'three': choose one with --model one or" in result.stderr
    for name in ("org/two", "second"):
        result = mayfly("launch", "codex", "--url", url, "--model", name, "--print")
        assert """-c 'model="org/two"'""" in result.stdout


def test_a_server_without_a_model_is_said(url: str) -> None:
    FakeServer.models = {}
    result = mayfly("launch", "codex", "--url", url)
    assert result.exit_code == 1
    assert "serves no model right now" in result.stderr


def test_no_server_is_said() -> None:
    result = mayfly("launch", "codex", "--url", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:1; `mayfly serve` starts one" in result.stderr


@pytest.mark.parametrize(
    ("context", "warning"),
    [
        (8_192, "smol has a context of 8,192 tokens. Claude Code fills about 12,500 of them"),
        (None, "has not loaded smol yet and does not know its context"),
        (48_000, ""),
    ],
)
def test_a_context_that_is_too_small_is_said(url: str, context: int | None, warning: str) -> None:
    FakeServer.models = {"smol": context}
    result = mayfly("launch", "claude", "--url", url, "--print")
    assert result.exit_code == 0
    assert warning in result.stderr
    assert bool(result.stderr) == bool(warning)


def test_a_missing_program_is_said_with_its_remedy(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = mayfly("launch", "opencode", "--url", url)
    assert result.exit_code == 1
    assert "there is no program 'opencode' on PATH" in result.stderr
    assert "`npm install -g opencode-ai` installs it" in result.stderr


# Real processes


def stand_in(folder: Path, name: str) -> Path:
    """Makes a program ``folder/bin/name`` that writes its environment, arguments, process id and
    ignored signals into ``folder/seen`` and exits with 7."""
    (folder / "bin").mkdir()
    program = folder / "bin" / name
    seen = shlex.quote(str(folder / "seen"))
    program.write_text(
        "#!/bin/sh\n"
        f'{{ env -0; printf \'\\0%s\' "$$" "$(grep SigIgn /proc/$$/status)" "$@"; }} > {seen}\n'
        "exit 7\n"
    )
    program.chmod(0o755)
    return folder / "seen"


def seen_by(stand_in: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the environment, and the process id, the ignored signals and the arguments."""
    variables, _, rest = stand_in.read_text().partition("\0\0")
    pairs = (line.partition("=") for line in variables.split("\0"))
    return {name: value for name, _, value in pairs}, rest.split("\0")


@pytest.mark.process
def test_the_agent_takes_the_place_of_the_command(url: str, tmp_path: Path) -> None:
    FakeServer.key = KEY
    seen = stand_in(tmp_path, "qwen")
    variables = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "MAYFLY_API_KEY": KEY,
        "MAYFLY_ADMIN_KEY": "admin",
        "OPENAI_MODEL": "another",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "mayfly_cli", "launch", "qwen", "--url", url]
    with subprocess.Popen(
        [*command, "--", "--yolo", "a b", "--", "--c"],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    assert output == ""
    assert "OPENAI_MODEL=smol  (it had another value)" in errors
    assert "without MAYFLY_ADMIN_KEY" in errors
    assert KEY not in errors
    assert "admin" not in errors
    found, (pid, ignored, *arguments) = seen_by(seen)
    assert pid == str(process.pid)
    assert arguments == ["--auth-type", "openai", "--model", "smol", "--yolo", "a b", "--", "--c"]
    assert found["OPENAI_API_KEY"] == KEY
    assert found["OPENAI_BASE_URL"] == f"{url}/v1"
    assert "MAYFLY_ADMIN_KEY" not in found
    defaults = Path(found["QWEN_CODE_SYSTEM_DEFAULTS_PATH"])
    assert tmp_path in defaults.parents
    assert [path.name for path in defaults.parent.iterdir()] == ["qwen.json"]
    assert json.loads(defaults.read_text())["modelProviders"]
    if ignored:  # Linux: a bit mask, signal 1 is the lowest bit
        assert not int(ignored.split()[1], 16) & 1 << (signal.SIGPIPE - 1)


@pytest.mark.parametrize("agent", AgentName)
def test_a_shell_makes_the_same_of_the_printed_lines(agent: AgentName, tmp_path: Path) -> None:
    """The lines are run by ``sh`` in place of the command."""
    seen = stand_in(tmp_path, AGENTS[agent].executable)
    settings = AGENTS[agent].settings(served(name="it's a name"), tmp_path / "a folder")
    command = [AGENTS[agent].executable, *settings.arguments, "-p", "it's"]
    variables = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "MAYFLY_API_KEY": KEY,
        "ANTHROPIC_API_KEY": "theirs",
    }
    script = "\n".join(shell_lines(settings, command))
    assert subprocess.run(["/bin/sh", "-c", script], env=variables, check=False).returncode == 7
    found, (_, _, *arguments) = seen_by(seen)
    for name in ("PWD", "OLDPWD", "_", "SHLVL"):
        found.pop(name, None)
    assert found == environment(settings, variables)
    assert arguments == command[1:]
    for path, text in settings.files.items():
        assert path.read_text() == text
