"""Downloads a wheel with pip.

pip knows this machine's package index, proxies, certificates and credentials. From version 24.1 on,
pip can write its progress in plain lines.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from mayfly_worker.fetch.reporting import FetchError

_RAW_PROGRESS_SINCE = (24, 1)
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def download(requirement: str, folder: Path, report: Callable[[int, int], None]) -> Path:
    """Downloads the wheel of a requirement ``name==version`` into an empty ``folder``, without its
    dependencies, and returns the wheel's path. ``report`` takes the bytes done, and the bytes in
    all.

    Raises:
        FetchError: pip is not installed, or could not download the wheel.
    """
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", requirement),
        *("--dest", str(folder), "--no-deps", "--only-binary", ":all:"),
        *("--progress-bar", _progress_bar(), "--no-input", "--disable-pip-version-check"),
    ]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as child:
        assert child.stdout is not None
        try:
            output = _follow(child.stdout, report)
        except BaseException:
            child.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise FetchError(f"{requirement} could not be downloaded. {complaint(output)}")
    return wheels[0]


def verify(path: Path, sha256: str) -> None:
    """Checks that a file has this SHA-256 digest (hexadecimal).

    Raises:
        FetchError: the file has another digest.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise FetchError(
            f"{path.name} is not the file that was expected, and was thrown away: its SHA-256 is "
            f"{found}, not {sha256}. Something between here and the package index altered it."
        )


def complaint(output: Iterable[str]) -> str:
    """Returns an explanation for the user of why a download failed, from the lines that pip
    wrote."""
    lines = [line.strip() for line in output]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = f"pip said: {errors[-1]}" if errors else "pip gave no reason."
    if any("connection broken" in line for line in lines):
        return f"The package index cannot be reached: check the network. {reason}"
    return reason


def _progress_bar() -> str:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError as error:
        raise FetchError(
            "pip is needed to download the demo model, and this Python has none. Install it with: "
            f"{sys.executable} -m ensurepip  or name another model."
        ) from error
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return "raw" if numbers >= _RAW_PROGRESS_SINCE else "off"


def _follow(lines: Iterable[str], report: Callable[[int, int], None]) -> list[str]:
    """Passes pip's lines of progress to ``report``, and returns its other lines."""
    others = []
    for line in lines:
        if match := _PROGRESS.match(line):
            report(int(match[1]), int(match[2]))
        else:
            others.append(line)
    return others
