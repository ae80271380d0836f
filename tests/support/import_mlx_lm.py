"""Imports mlx-lm, and keeps its hands off this process's limit of open files.

``mlx_lm.utils`` sets that to 4096, the hard limit included, for whatever process imports it. All
that tests start would inherit it, and a front end would be short of files that nobody else lacks.
To be imported before anything that imports mlx-lm.
"""

from unittest.mock import patch

with patch("resource.setrlimit"):
    import mlx_lm.utils  # noqa: F401
