"""What is told and kept of exceptions and stderr is not meant to hold a prompt, but Python quotes
the values that it complains of: quotations long enough to be somebody's text are cut out."""

from __future__ import annotations

import re

LINE = 1000
"""Characters."""
QUOTED = 60

_QUOTATION = re.compile(r"""(?<!\w)(?<!File )(['"])(.*?)(?:\1(?!\w)|$)""")


def redacted(text: str) -> str:
    """Without quotations long enough to be somebody's text, and without the ends of lines that are
    too long."""
    return "\n".join(_QUOTATION.sub(_shortened, line[:LINE]) for line in text.split("\n"))


def _shortened(quotation: re.Match[str]) -> str:
    length = len(quotation[2])
    return quotation[0] if length <= QUOTED else f"'({length} characters)'"
