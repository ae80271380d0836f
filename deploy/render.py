"""Writes the service files of this folder, as `mayfly service install --print` gives them for
usual places. Run it after a change to their templates; a test tells when it was forgotten."""

from __future__ import annotations

from pathlib import Path

from mayfly_reaper.settings import Budgets
from mayfly_server.cli.services import launchd, systemd
from mayfly_server.cli.services.description import Service, front_stop_s, node_stop_s
from mayfly_server.config import FrontSettings

HERE = Path(__file__).parent
MEMORY_GB = 64
MAC = "/opt/mayfly/bin/mayfly"
PYTHON = "/opt/mayfly/bin/python"


def serve(scope: str) -> Service:
    home = "/Users/me/Library/Application Support/mayfly" if scope == "user" else "/etc/mayfly"
    return Service(
        name="serve",
        role="serve",
        scope="user" if scope == "user" else "system",
        command=(MAC, "serve", "--config", f"{home}/mayfly.toml"),
        stop_s=node_stop_s(MEMORY_GB * 10**9, Budgets()),
        stop_reason=f"Enough for a model that fills {MEMORY_GB} GB.",
        user=None if scope == "user" else "mayfly",
    )


FRONT = Service(
    name="front",
    role="front",
    scope="system",
    command=(PYTHON, "-m", "mayfly_server.front", "--node", "tcp://mac-1.local:7700"),
    stop_s=front_stop_s(FrontSettings(())),
    stop_reason="A front end has no model: its streams take longest.",
    user="mayfly",
    listen=("127.0.0.1:8001",),
)


def texts() -> dict[Path, str]:
    """What each of the files should say."""
    mac = launchd.Launchd(home=Path("/Users/me"), uid=501)
    linux = systemd.Systemd(user_units=Path("/home/me/.config/systemd/user"))
    folders = {
        "launchd/agent": mac.files(serve("user")),
        "launchd/daemon": mac.files(serve("system")),
        "systemd": {**linux.files(serve("system")), **linux.files(FRONT)},
    }
    return {
        HERE / folder / path.name: text
        for folder, files in folders.items()
        for path, text in files.items()
    }


if __name__ == "__main__":
    for path, text in texts().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
