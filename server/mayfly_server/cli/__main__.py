"""``python -m mayfly_server.cli``: the ``mayfly`` command where no script was installed."""

from mayfly_server.cli import main

main()
