"""Stop strings, found in the text however the tokens cut it."""

from __future__ import annotations

from collections.abc import Sequence

from mayfly_worker.text.automaton import NONE, ROOT, Automaton


class Stops:
    """The stop strings of one request, compiled once for all of its choices."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Empty strings are ignored: they would stop everything before it begins."""
        self.automaton = Automaton(strings)

    def matcher(self, *, include_stop: bool = False) -> StopMatcher:
        return StopMatcher(self.automaton, include_stop)


class StopMatcher:
    """Follows one text. The stop that is completed first ends it; of several that are completed
    by the same character, the longest. Only what could still become a stop is held back.

    ``matched`` is the stop that has ended it.
    """

    __slots__ = ("_automaton", "_held", "_include", "_node", "matched")

    def __init__(self, automaton: Automaton, include_stop: bool) -> None:
        self._automaton = automaton
        self._include = include_stop
        self._node = ROOT
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop has ended it.

        At a stop that is the text before it (or with it, if it is to be included); what follows
        is dropped, and the matcher is not to be fed again. Stops that are completed while it is
        not ``armed`` are passed over.
        """
        if not self._held and self._automaton.clear_of(text):
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
        """What was held back, once the text has ended without a stop."""
        held, self._held, self._node = self._held, "", ROOT
        return held
