"""Imports mlx-lm without its change to this process's limit of open files.

``mlx_lm.utils`` sets the limit, the hard one included, to 4096 in any process that imports it. All
processes that tests start would inherit it, and a front end would have fewer files than it has
elsewhere. This module has to be imported before any other that imports mlx-lm.
"""

from unittest.mock import patch

with patch("resource.setrlimit"):
    import mlx_lm.utils  # noqa: F401
