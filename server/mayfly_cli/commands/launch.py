"""``mayfly launch``: starts a coding agent with a model of a running server."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mayfly_cli.agent_settings import AGENTS, Agent, AgentName, ServedModel, Settings
from mayfly_cli.commands.client import DEFAULT_URL, Url, connect, get_json, goes_direct
from mayfly_cli.failure import fail
from mayfly_protocol.common.secrets import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    API_KEYS_VARIABLE,
)

if TYPE_CHECKING:
    import httpx

SECRETS = (ADMIN_KEY_VARIABLE, API_KEYS_VARIABLE)
"""Variables that no agent gets: the commands that it runs would get them, too."""


def launch(
    agent: Annotated[AgentName, typer.Argument(help="The coding agent to start.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGS]...", help="Arguments of the agent's own, after `--`."),
    ] = None,
    url: Url = DEFAULT_URL,
    model: Annotated[
        str,
        typer.Option("--model", help="The model's name; needed if the server has several."),
    ] = "",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--print", help="Print the settings as commands for a shell, and start nothing."
        ),
    ] = False,
) -> None:
    """Start a coding agent (Claude Code, Codex, opencode, Pi, Qwen Code) with a model of a server.

    The agent gets its settings as environment variables and arguments, for this start only: your
    own configuration of it stays as it is. An API key is read from MAYFLY_API_KEY.
    """
    import platformdirs

    chosen = AGENTS[agent]
    with connect(url, API_KEY_VARIABLE) as client:
        served = _choose_model(client, model)
        direct = goes_direct(client.base_url)
    settings = chosen.settings(served, platformdirs.user_cache_path("mayfly") / "launch")
    if direct:
        past = past_proxy(client.base_url.host, os.environ)
        settings = replace(settings, variables={**settings.variables, **past})
    command = [chosen.executable, *settings.arguments, *(arguments or ())]
    _warn_of_context(chosen, served)
    if dry_run:
        typer.echo("\n".join(shell_lines(settings, command)))
        return
    program = _find_program(chosen)
    _report(chosen, served, settings, command)
    _write_files(settings)
    _replace_process(program, command, environment(settings, os.environ))


def _choose_model(client: httpx.Client, name: str) -> ServedModel:
    """Asks the server for its models and returns the one called ``name``, or else the only one."""
    if name:
        found = _described(client, name)
    else:
        models = _listed(client)
        if len(models) > 1:
            fail(f"{client.base_url} serves several models: choose one with {_options(models)}")
        found = models[0]
    try:
        return ServedModel(
            url=str(client.base_url).rstrip("/"),
            name=str(found["id"]),
            context=found.get("max_model_len"),
            needs_key="authorization" in client.headers,
        )
    except (LookupError, TypeError, AttributeError):
        fail(f"{client.base_url} describes its models in a way that is not Mayfly's")


def _listed(client: httpx.Client) -> list[Any]:
    try:
        models = list(get_json(client, "/v1/models", API_KEY_VARIABLE)["data"])
    except (LookupError, TypeError):
        models = []
    if not models:
        fail(f"{client.base_url} serves no model right now; `mayfly status` may show why")
    return models


def _described(client: httpx.Client, name: str) -> Any:
    """Returns the server's description of the model called ``name``, which may be an alias."""
    import httpx

    models = _listed(client)
    for model in models:
        if model.get("id") == name:
            return model
    try:
        response = client.get(f"/v1/models/{name}", timeout=10.0)
    except httpx.RequestError as error:
        fail(f"the connection to {client.base_url} was lost: {error}")
    if not response.is_success:
        fail(f"{client.base_url} serves no model {name!r}: choose one with {_options(models)}")
    return response.json()


def _options(models: list[Any]) -> str:
    return " or ".join(f"--model {shlex.quote(str(model.get('id')))}" for model in models)


def _warn_of_context(agent: Agent, model: ServedModel) -> None:
    if model.context is None:
        warning = (
            f"the server has not loaded {model.name} yet and does not know its context: "
            f"{agent.title} assumes one of its own. Start it again once `mayfly status` shows a "
            "worker as ready"
        )
    elif model.context < agent.least_context:
        warning = (
            f"{model.name} has a context of {model.context:,} tokens. {agent.title} fills about "
            f"{agent.own_prompt:,} of them with its own prompt and tools, and works well from "
            f"{agent.least_context:,} on: expect it to summarize often, or to stop with a full "
            "context"
        )
    else:
        return
    typer.secho(f"mayfly: {warning}.", fg=typer.colors.YELLOW, err=True)


def shell_lines(settings: Settings, command: list[str]) -> list[str]:
    """Returns the settings and the command as lines for a POSIX shell. The API key is not in them:
    they refer to MAYFLY_API_KEY."""
    lines = [f"unset {' '.join(settings.unset)}"] if settings.unset else []
    for path, text in settings.files.items():
        lines.append(f"mkdir -p {shlex.quote(str(path.parent))}")
        lines.append(f"cat > {shlex.quote(str(path))} <<'END'\n{text}END")
    for name, value in settings.variables.items():
        lines.append(f"export {name}={shlex.quote(value)}")
    for name in settings.key_variables:
        lines.append(f'export {name}="${API_KEY_VARIABLE}"')
    return [*lines, shlex.join(command)]


def environment(settings: Settings, current: Mapping[str, str]) -> dict[str, str]:
    """Returns the agent's environment, made from Mayfly's own one."""
    dropped = {*SECRETS, *settings.unset}
    kept = {name: value for name, value in current.items() if name not in dropped}
    keys = dict.fromkeys(settings.key_variables, current.get(API_KEY_VARIABLE, ""))
    return {**kept, **settings.variables, **keys}


def past_proxy(host: str, current: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which an agent sends nothing for ``host`` to the proxy that the
    environment ``current`` names; none if it names no proxy."""
    if not any(name.lower().endswith("_proxy") and current[name] for name in current):
        return {}
    names = current.get("no_proxy") or current.get("NO_PROXY") or ""
    joined = names if host in names.split(",") else ",".join(filter(None, (names, host)))
    return {"no_proxy": joined, "NO_PROXY": joined}


def _find_program(agent: Agent) -> str:
    import shutil

    program = shutil.which(agent.executable)
    if program is None:
        fail(
            f"{agent.title} is not installed: there is no program {agent.executable!r} on PATH. "
            f"`{agent.install}` installs it"
        )
    return program


def _report(agent: Agent, model: ServedModel, settings: Settings, command: list[str]) -> None:
    """Prints the settings on stderr, so that the agent's own output stays as it is. The value of a
    variable that holds the API key is not printed."""

    def line(text: str) -> None:
        typer.secho(text, dim=True, err=True)

    def replaced(name: str, value: str | None) -> str:
        return "  (it had another value)" if os.environ.get(name, value) != value else ""

    context = f", {model.context:,} tokens of context" if model.context else ""
    line(f"mayfly: starting {agent.title} with {model.name} of {model.url}{context}")
    for name in (*SECRETS, *settings.unset):
        if name in os.environ:
            line(f"  without {name}")
    for name, value in settings.variables.items():
        line(f"  {name}={value}{replaced(name, value)}")
    for name in settings.key_variables:
        if name != API_KEY_VARIABLE:
            line(f"  {name}=(the key in {API_KEY_VARIABLE})")
    for path in settings.files:
        line(f"  {path} written")
    line(f"  {shlex.join(command)}")


def _write_files(settings: Settings) -> None:
    """Writes each file under another name first, so that an agent that starts at the same time
    reads a whole one."""
    for path, text in settings.files.items():
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError as error:
            fail(f"cannot write {path}: {error.strerror or error}")


def _replace_process(program: str, command: list[str], variables: dict[str, str]) -> NoReturn:
    """Runs the program in the place of this process: the terminal and signals are then its own."""
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores these, and a program inherits what is ignored.
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execve(program, command, variables)  # noqa: S606  the program that the user asked for
    except OSError as error:
        fail(f"cannot start {program}: {error.strerror or error}")
