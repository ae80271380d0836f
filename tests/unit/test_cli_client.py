"""The API key that commands send to a running server."""

from __future__ import annotations

import pytest

from mayfly_cli.commands.client import connect


@pytest.mark.parametrize(
    ("environment", "sent"),
    [
        ({}, None),
        ({"MAYFLY_API_KEY": "one"}, "Bearer one"),
        ({"MAYFLY_ADMIN_KEY": "all"}, "Bearer all"),
        ({"MAYFLY_API_KEY": "one", "MAYFLY_ADMIN_KEY": "all"}, "Bearer all"),
        ({"MAYFLY_API_KEY": "one", "MAYFLY_ADMIN_KEY": ""}, "Bearer one"),
    ],
)
def test_the_key_that_opens_most(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sent: str | None
) -> None:
    for name in ("MAYFLY_API_KEY", "MAYFLY_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with connect("127.0.0.1:1") as client:
        assert client.headers.get("authorization") == sent
