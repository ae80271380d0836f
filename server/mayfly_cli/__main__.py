"""The console script ``mayfly``, also ``python -m mayfly_cli``.

This module is separate from :mod:`mayfly_cli.app`, so that Ctrl-C ends the process without a
traceback even while :mod:`mayfly_cli.app` is being imported.
"""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from mayfly_cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
