"""The settings with which coding agents use a model of a Mayfly server: environment variables,
arguments, and files of Mayfly's own.

No setting is written to a file of the user's: each agent has variables or arguments that override
its files. The names were checked against the released versions in ``docs/clients.md``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from mayfly_protocol.common.secrets import API_KEY_VARIABLE

NO_KEY = "unused"
"""Value of a key's variable for an agent that does not start without one, if the server needs
none."""
CODEX_PROVIDER = "mayfly-launch"
"""Codex's name for the server. It is one that no user's file has, because Codex merges entries of
the same name."""
LEAST_OUTPUT = 4_096
"""Tokens that a single answer should have room for: that of a small file."""
MAX_OUTPUT = 32_000
"""Tokens of one answer that agents ask for at most, by their own defaults."""


class AgentName(StrEnum):
    CLAUDE = "claude"
    CODEX = "codex"
    OPENCODE = "opencode"
    PI = "pi"
    QWEN = "qwen"


@dataclass(frozen=True)
class ServedModel:
    """A model and the server that serves it."""

    url: str
    """The server's address, without a path and without a slash at its end."""
    name: str
    context: int | None
    """Tokens that the model's context holds; None if the server does not know it yet."""
    needs_key: bool
    """True if requests have to be sent with the user's API key."""

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def output(self) -> int | None:
        """Tokens to keep free for one answer: agents summarize their conversation when the rest of
        the context is full."""
        if not self.context:
            return None
        return min(self.context // 2, max(LEAST_OUTPUT, min(MAX_OUTPUT, self.context // 8)))


@dataclass(frozen=True)
class Settings:
    """Changes of an agent's environment and command line. None of them contains the API key."""

    variables: Mapping[str, str] = field(default_factory=dict)
    key_variables: tuple[str, ...] = ()
    """Variables whose value is the API key."""
    unset: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """Arguments before those of the user."""
    files: Mapping[Path, str] = field(default_factory=dict)
    """Files of Mayfly's own that the variables or arguments name, with their text."""


@dataclass(frozen=True)
class Agent:
    title: str
    executable: str
    install: str
    """Command that installs it."""
    own_prompt: int
    """Tokens of its first request: prompt and tools, without instructions of the user's or the
    project's, counted with the tokenizer of SmolLM2."""
    least_context: int
    """Tokens of context below which its own prompt and the room that it keeps free for an answer
    and for a summary leave little for the work."""
    settings: Callable[[ServedModel, Path], Settings]
    """Makes the settings for a model. The path is the folder for files."""


def _claude(model: ServedModel, folder: Path) -> Settings:
    variables = {
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_MODEL": model.name,
        # The models that Claude Code would use for sub-agents, titles and summaries.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model.name,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model.name,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model.name,
        "ANTHROPIC_DEFAULT_FABLE_MODEL": model.name,
        "ANTHROPIC_SMALL_FAST_MODEL": model.name,
        "CLAUDE_CODE_SUBAGENT_MODEL": model.name,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if model.context:
        # Without it a model that Claude Code does not know has a context of 200,000 tokens or more.
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(model.context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(model.output)
    if not model.needs_key:
        variables["ANTHROPIC_AUTH_TOKEN"] = NO_KEY
    return Settings(
        variables=variables,
        key_variables=("ANTHROPIC_AUTH_TOKEN",) if model.needs_key else (),
        # Variables in the user's and the project's settings.json have a higher rank than those of
        # the environment, and these settings a still higher one.
        arguments=("--settings", json.dumps({"env": {**variables, "ANTHROPIC_API_KEY": ""}})),
        # Claude Code would send this key too, or ask about it, or use another provider.
        unset=(
            "ANTHROPIC_API_KEY",
            "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_VERTEX",
            "CLAUDE_CODE_USE_FOUNDRY",
        ),
    )


def _codex(model: ServedModel, folder: Path) -> Settings:
    values: dict[str, str | int] = {
        "model": model.name,
        "model_provider": CODEX_PROVIDER,
        f"model_providers.{CODEX_PROVIDER}.name": "Mayfly",
        f"model_providers.{CODEX_PROVIDER}.base_url": model.openai_url,
        f"model_providers.{CODEX_PROVIDER}.wire_api": "responses",
    }
    if model.needs_key:
        values[f"model_providers.{CODEX_PROVIDER}.env_key"] = API_KEY_VARIABLE
    if model.context:
        values["model_context_window"] = model.context
    return Settings(
        key_variables=(API_KEY_VARIABLE,) if model.needs_key else (),
        # A string of JSON is one of TOML, too.
        arguments=tuple(
            argument
            for name, value in values.items()
            for argument in ("-c", f"{name}={json.dumps(value)}")
        ),
    )


def _opencode(model: ServedModel, folder: Path) -> Settings:
    entry: dict[str, object] = {"name": model.name, "tool_call": True}
    if model.context:
        entry["limit"] = {"context": model.context, "output": model.output}
    options = {"baseURL": model.openai_url}
    if model.needs_key:
        options["apiKey"] = f"{{env:{API_KEY_VARIABLE}}}"
    config = {
        "provider": {
            "mayfly": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Mayfly",
                "options": options,
                "models": {model.name: entry},
            }
        },
        "model": f"mayfly/{model.name}",
        "small_model": f"mayfly/{model.name}",
    }
    return Settings(
        variables={"OPENCODE_CONFIG_CONTENT": json.dumps(config)},
        key_variables=(API_KEY_VARIABLE,) if model.needs_key else (),
    )


def _pi(model: ServedModel, folder: Path) -> Settings:
    entry: dict[str, object] = {
        "id": model.name,
        "name": model.name,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    if model.context:
        entry["contextWindow"] = model.context
        entry["maxTokens"] = model.output
    provider = {
        "name": "Mayfly",
        "baseUrl": model.openai_url,
        "apiKey": f"${API_KEY_VARIABLE}" if model.needs_key else NO_KEY,
        "api": "openai-completions",
        "models": [entry],
    }
    # Pi reads providers from the user's models.json, and from extensions.
    extension = (
        "// Written by `mayfly launch pi`.\n"
        "export default function (pi) {\n"
        f'  pi.registerProvider("mayfly", {json.dumps(provider, indent=2)});\n'
        "}\n"
    )
    path = folder / "pi.mjs"
    return Settings(
        key_variables=(API_KEY_VARIABLE,) if model.needs_key else (),
        arguments=("-e", str(path), "--provider", "mayfly", "--model", model.name),
        files={path: extension},
    )


def _qwen(model: ServedModel, folder: Path) -> Settings:
    variables = {"OPENAI_BASE_URL": model.openai_url, "OPENAI_MODEL": model.name}
    if not model.needs_key:
        variables["OPENAI_API_KEY"] = NO_KEY
    entry: dict[str, object] = {
        "id": model.name,
        "name": model.name,
        "baseUrl": model.openai_url,
        "envKey": "OPENAI_API_KEY",
    }
    if model.context:
        entry["generationConfig"] = {"contextWindowSize": model.context}
        variables["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(model.output)
    # Qwen Code takes the context from settings files only. This one has the rank of the defaults of
    # the machine's administrator, and what it says about the model goes before the user's settings.
    path = folder / "qwen.json"
    variables["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] = str(path)
    settings = {"modelProviders": {"openai": [entry]}}
    return Settings(
        variables=variables,
        key_variables=("OPENAI_API_KEY",) if model.needs_key else (),
        arguments=("--auth-type", "openai", "--model", model.name),
        files={path: json.dumps(settings, indent=2) + "\n"},
    )


AGENTS = {
    AgentName.CLAUDE: Agent(
        title="Claude Code",
        executable="claude",
        install="npm install -g @anthropic-ai/claude-code",
        own_prompt=12_500,
        least_context=48_000,
        settings=_claude,
    ),
    AgentName.CODEX: Agent(
        title="Codex",
        executable="codex",
        install="npm install -g @openai/codex",
        own_prompt=9_500,
        least_context=32_000,
        settings=_codex,
    ),
    AgentName.OPENCODE: Agent(
        title="opencode",
        executable="opencode",
        install="npm install -g opencode-ai",
        own_prompt=7_500,
        least_context=32_000,
        settings=_opencode,
    ),
    AgentName.PI: Agent(
        title="Pi",
        executable="pi",
        install="npm install -g --ignore-scripts @earendil-works/pi-coding-agent",
        own_prompt=1_500,
        least_context=32_000,
        settings=_pi,
    ),
    AgentName.QWEN: Agent(
        title="Qwen Code",
        executable="qwen",
        install="npm install -g @qwen-code/qwen-code",
        own_prompt=14_000,
        least_context=48_000,
        settings=_qwen,
    ),
}
