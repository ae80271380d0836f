"""The breadcrumb: a record of the last forward pass, read after its worker died."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mayfly_protocol.breadcrumb import HALF, Breadcrumb, BreadcrumbWriter, read

rids = st.lists(st.text(max_size=40), max_size=40, unique=True)
passes = st.builds(
    lambda phase, step, requests, young: (phase, step, requests, requests[:young]),
    st.sampled_from(["prefill", "decode", "idle", "canary"]),
    st.integers(0, 2**60),
    rids,
    st.integers(0, 5),
)


def crumb_of(written: tuple[str, int, list[str], list[str]]) -> Breadcrumb:
    phase, step, requests, young = written
    return Breadcrumb(phase, step, tuple(requests), tuple(young))


@settings(deadline=None)
@given(st.lists(passes, min_size=1, max_size=5))
def test_the_last_announcement_is_read(
    written: list[tuple[str, int, list[str], list[str]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "crumb"
        writer = BreadcrumbWriter(path)
        assert read(path) is None
        for each in written:
            writer.write(*each)
            assert read(path) == crumb_of(each)
        writer.close()


@settings(deadline=None)
@given(passes, passes, st.data())
def test_a_torn_write_is_never_taken_for_the_truth(
    before: tuple[str, int, list[str], list[str]],
    torn: tuple[str, int, list[str], list[str]],
    data: st.DataObject,
) -> None:
    """Whichever bytes of a write have arrived: it counts whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "crumb"
        writer = BreadcrumbWriter(path)
        writer.write("prefill", 0, ["older"])
        writer.write(*before)
        old = path.read_bytes()
        writer.write(*torn)
        writer.close()
        new = path.read_bytes()
        changed = [at for at in range(2 * HALF) if old[at] != new[at]]
        arrived = data.draw(st.sets(st.sampled_from(changed)))
        path.write_bytes(bytes((new if at in arrived else old)[at] for at in range(2 * HALF)))
        whole = len(arrived) == len(changed)
        assert read(path) == crumb_of(torn if whole else before)


def test_young_requests_are_named_before_old_ones_where_there_is_no_room(tmp_path: Path) -> None:
    writer = BreadcrumbWriter(tmp_path / "crumb")
    many = [f"request-{number:032d}" for number in range(1000)]
    writer.write("decode", 1, many, many[-20:])
    writer.close()
    crumb = read(tmp_path / "crumb")
    assert crumb is not None
    assert list(crumb.young) == many[-20:]
    assert set(crumb.requests) < set(many)
    assert len(crumb.requests) > 100


def test_suspects_are_those_of_a_prefill_or_the_young_of_a_decode_step() -> None:
    assert Breadcrumb("prefill", 1, ("a", "b")).suspects == ("a", "b")
    assert Breadcrumb("decode", 1, ("b", "a"), ("b",)).suspects == ("b",)
    old = Breadcrumb("decode", 1, ("a", "b"))
    assert (old.suspects, old.marked) == ((), ("a", "b"))
    assert Breadcrumb("decode", 1, ("b", "a"), ("b",)).marked == ("a",)
    assert Breadcrumb("decode", 1, ("a", "c", "b"), ("b",)).marked == ("a", "c")
    assert Breadcrumb("idle", 1, ("a",)).suspects == ()


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\xff" * (2 * HALF), b"\x01" * HALF])
def test_what_is_no_breadcrumb_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "crumb").write_bytes(content)
    assert read(tmp_path / "crumb") is None
    assert read(tmp_path / "missing") is None


@pytest.mark.process
def test_it_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path;"
        "from mayfly_protocol.breadcrumb import BreadcrumbWriter;"
        "writer = BreadcrumbWriter(Path(sys.argv[1]));"
        "writer.write('decode', 3, ['a', 'b'], ['b']);"
        "os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "crumb"
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert read(path) == Breadcrumb("decode", 3, ("b", "a"), ("b",))
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_no_room_is_an_error_where_it_is_made() -> None:
    with pytest.raises(OSError):
        BreadcrumbWriter(Path("/dev/full"))
