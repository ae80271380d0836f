"""Command line ``python -m mayfly_worker.fetch``: finds a model or downloads it, and writes
progress and outcome to stdout as JSON lines."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

import psutil

from mayfly_protocol.lifecycle import Exit
from mayfly_worker.fetch.reporting import EventWriter, FetchError, claim_stdout
from mayfly_worker.fetch.resolve import resolve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mayfly_worker.fetch")
    parser.add_argument("model", nargs="?", default="", metavar="MODEL")
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--float32", action="store_true", help="store the demo model's weights as float32"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    events = EventWriter(claim_stdout())
    try:
        fetched = resolve(
            options.model, options.cache, float32=options.float32, report=events.progress
        )
    except FetchError as error:
        events.error(str(error))
        return Exit.CONFIGURATION
    except OSError as error:
        events.error(f"{options.model or 'The demo model'} could not be fetched: {error}")
        return Exit.CONFIGURATION
    events.done(fetched.path, fetched.name)
    return Exit.BYE


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Handles SIGTERM: exits by an exception, so that everything on the stack cleans up (pip's
    process, the scratch folder). Child processes are killed first, since a child that is just being
    started is not on the stack yet."""
    for child in psutil.Process().children():
        child.kill()
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
