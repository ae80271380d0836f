"""Gives a chat template the request's date in place of the worker's clock.

A prompt has to render the same on every worker and at every attempt. Templates ask for the date
with ``strftime_now(format)``, which transformers answers from the clock and does not let a caller
replace; a macro of that name in front of the template does, with nothing but Jinja.
"""

from __future__ import annotations

from datetime import date

DATE_VARIABLE = "mayfly_date"

_MACRO = (
    "{%- macro strftime_now(format) -%}"
    "{%- set text = namespace(value=format) -%}"
    "{%- for directive, meaning in " + DATE_VARIABLE + ".items() -%}"
    "{%- set text.value = text.value.replace(directive, meaning) -%}"
    "{%- endfor -%}"
    "{{- text.value -}}"
    "{%- endmacro -%}"
    # So that the template's own first whitespace is not the block's to trim.
    "{{ '' }}"
)

_DIRECTIVES = (
    *("%-d", "%-m", "%-j", "%-H", "%-I", "%-M", "%-S"),  # glibc's, without padding
    *("%a", "%A", "%b", "%B", "%c", "%d", "%D", "%e", "%F", "%G", "%h", "%H", "%I", "%j"),
    *("%m", "%M", "%p", "%S", "%T", "%u", "%U", "%V", "%w", "%x", "%X", "%y", "%Y"),
)


def dated(template: str) -> str:
    """The template with a ``strftime_now`` that reads :data:`DATE_VARIABLE`."""
    return _MACRO + template


def directives(day: date) -> dict[str, str]:
    """What each directive of a format means on a day (its time is midnight)."""
    return {directive: day.strftime(directive) for directive in _DIRECTIVES}
