"""A worker's stderr on a disk without room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mayfly_worker.process import LossyText


def test_what_is_written_arrives_at_once(tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    text = LossyText(descriptor)
    assert text.fileno() == descriptor
    assert text.write("ä\n") == 2
    assert path.read_text(encoding="utf-8") == "ä\n"
    text.write("\udcff")
    assert path.read_text() == "ä\n\\udcff"
    del text
    os.close(descriptor)  # it was left open


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_loses_the_text_and_nothing_else() -> None:
    code = (
        "import sys; from mayfly_worker.process import LossyText;"
        "sys.stderr = LossyText(2);"
        "print('a line', file=sys.stderr, flush=True); sys.stderr.write('x' * 100_000);"
        "import warnings; warnings.warn('odd'); sys.stderr.flush(); print('goes on')"
    )
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", code], stderr=full, stdout=subprocess.PIPE, text=True, check=True
        )
    assert ran.stdout == "goes on\n"
