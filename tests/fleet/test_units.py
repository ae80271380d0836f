"""A front end under a running systemd, in each of its scopes that this process may use."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mayfly_cli.services import systemd
from mayfly_cli.services.description import Scope, Service
from mayfly_cli.services.manager import ServiceError, run
from support.server import free_port, wait_for

pytestmark = pytest.mark.fleet

PATIENCE_S = 60.0


def why_not(scope: Scope) -> str:
    """The reason why no service can be started in a scope; empty where one can."""
    if scope == "system" and os.geteuid() != 0:
        return "only root may start services of the system"
    if scope == "system" and "SUDO_USER" not in os.environ:
        return "there is no other user to run it as: this was not started by sudo"
    of = ("--user",) if scope == "user" else ()
    try:
        asked = run(("systemctl", *of, "show", "--property=Version"))
    except ServiceError:
        return "there is no systemctl"
    return f"no systemd runs: {asked.stderr.strip()}" if asked.code else ""


@pytest.fixture(params=["user", "system"])
def front(request: pytest.FixtureRequest) -> Iterator[tuple[Service, systemd.Systemd, int]]:
    """An installed front end with a node that does not exist, and the port on which systemd
    listens."""
    scope: Scope = request.param
    if reason := why_not(scope):
        pytest.skip(reason)
    port = free_port()
    service = Service(
        name=f"test-{os.getpid()}-{secrets.token_hex(2)}",
        role="front",
        scope=scope,
        command=(
            *(sys.executable, "-m", "mayfly_cli", "front"),
            *("--node", f"tcp://127.0.0.1:{free_port()}"),
        ),
        stop_s=20,
        stop_reason="Because.",
        user=os.environ.get("SUDO_USER") if scope == "system" else None,
        listen=(f"127.0.0.1:{port}",),
    )
    manager = systemd.make_systemd()
    try:
        manager.install(service)
        yield service, manager, port
    finally:
        manager.uninstall(service.name, scope)


def test_it_is_replaced_and_nobody_is_refused(
    front: tuple[Service, systemd.Systemd, int],
) -> None:
    service, manager, port = front

    def alive() -> bool:
        url = f"http://127.0.0.1:{port}/livez"
        return httpx.get(url, timeout=PATIENCE_S).status_code == 200

    def pid() -> int | None:
        return manager.status(service.name, service.scope).pid

    assert alive()
    first = pid()
    assert first is not None
    os.kill(first, 9)
    assert alive(), "its socket takes the connection"
    wait_for(lambda: pid() not in (None, first), "the next one")

    of = ("--user",) if service.scope == "user" else ()
    unit = f"{systemd.PREFIX}{service.name}.service"
    restarting = subprocess.Popen(["systemctl", *of, "restart", unit])
    while restarting.poll() is None:
        assert alive()
    assert restarting.returncode == 0


def test_all_of_it_is_gone_afterwards(front: tuple[Service, systemd.Systemd, int]) -> None:
    service, manager, port = front
    assert all(path.exists() for path in manager.files(service))
    assert manager.uninstall(service.name, service.scope)
    assert not any(Path(path).exists() for path in manager.files(service))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not manager.status(service.name, service.scope).installed
