"""Stop strings, searched for in a text while it is generated."""

from __future__ import annotations

from collections.abc import Sequence

from mayfly_worker.text.automaton import NONE, ROOT, Automaton


class StopMatcher:
    """Searches one text for stop strings while the text is generated. The stop string that is
    completed first ends the text; of several that are completed by the same character, the longest
    counts. Only text that could still become a stop string is held back.

    ``matched`` is the stop string that has ended the text, None before.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node", "matched")

    def __init__(self, strings: Sequence[str], *, include_stop: bool = False) -> None:
        """With ``include_stop`` the stop string stays in the text. Empty stop strings are ignored:
        they would end every text before it begins."""
        self._automaton = Automaton(strings)
        self._include = include_stop
        self._node = ROOT
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Takes the next text. Returns the text that is certain not to belong to a stop string, and
        True if a stop string has ended the text.

        At a stop string, the certain text ends before the string (or after it, with
        ``include_stop``); text after the string is dropped, and the matcher is not to be fed again.
        Stop strings that are completed while the matcher is not ``armed`` (before the answer has
        the request's ``min_tokens``) are ignored.
        """
        if not self._held and self._automaton.no_match_begins_in(text):
            return text, False
        buffer = self._held + text
        node, read = self._node, len(self._held)
        while True:
            node, read, match = self._automaton.walk(node, buffer, read)
            if match == NONE:
                break
            if armed:
                self._held = ""
                stop = self.matched = self._automaton.strings[match]
                return buffer[: read if self._include else read - len(stop)], True
        self._node = node
        certain = len(buffer) - self._automaton.depth[node]
        self._held = buffer[certain:]
        return buffer[:certain], False

    def flush(self) -> str:
        """Returns the text that was held back, once the text has ended without a stop string."""
        held, self._held, self._node = self._held, "", ROOT
        return held
