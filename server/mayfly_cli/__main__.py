"""The console script ``mayfly``, also ``python -m mayfly_cli``.

It is apart from :mod:`mayfly_cli.app` so that Ctrl-C ends the process quietly from the first
moment, while that module is still being imported.
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
