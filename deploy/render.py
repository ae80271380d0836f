"""Writes the example service files of this folder, as `mayfly service install --print` prints them
for usual paths. Run this script after a change of their templates; a test fails until then."""

from __future__ import annotations

from pathlib import Path

from mayfly_cli.services import launchd, systemd
from mayfly_cli.services.description import Role, Scope, Service, front_stop_s, node_stop_s
from mayfly_reaper.settings import Budgets
from mayfly_server.settings import FrontSettings

HERE = Path(__file__).parent
MEMORY = 64 * 10**9
MAYFLY = "/opt/mayfly/bin/mayfly"


def service(role: Role, scope: Scope = "system") -> Service:
    home = "/Users/me/Library/Application Support/mayfly" if scope == "user" else "/etc/mayfly"
    front = role == "front"
    return Service(
        name=role,
        role=role,
        scope=scope,
        command=(MAYFLY, role, "--config", f"{home}/mayfly.toml"),
        stop_s=front_stop_s(FrontSettings(())) if front else node_stop_s(MEMORY, Budgets()),
        stop_reason=f"Enough for a model that fills {MEMORY / 1e9:.0f} GB.",
        user=None if scope == "user" else "mayfly",
        listen=("127.0.0.1:8001",) if front else (),
    )


def texts() -> dict[Path, str]:
    """Returns the contents of each example service file, by its path."""
    mac = launchd.Launchd(home=Path("/Users/me"), uid=501)
    linux = systemd.Systemd(user_units=Path("/home/me/.config/systemd/user"))
    folders = {
        "launchd/agent": mac.files(service("serve", "user")),
        "launchd/daemon": mac.files(service("node")),
        "systemd": {**linux.files(service("node")), **linux.files(service("front"))},
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
