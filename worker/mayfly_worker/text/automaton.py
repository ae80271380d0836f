"""Aho-Corasick automaton: finds any of several strings in a text that comes in pieces.

Stop strings (:mod:`mayfly_worker.text.choice`) and markers (:mod:`mayfly_worker.text.markers`) are
found with it.

After A. V. Aho and M. J. Corasick, "Efficient string matching" (1975): a trie of the strings, in
which each node has a link to the node of its own longest proper suffix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

ROOT = 0
NONE = -1


class Automaton:
    """Finds any of several strings in a text (the Aho-Corasick automaton). A node, an integer, is
    the state after the text read so far; a text begins at ``ROOT``.

    Building takes time and memory proportional to the strings' length, matching takes time
    proportional to the text's.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Builds the automaton. Empty strings match nothing."""
        self.strings = tuple(strings)
        self.depth = [0]
        """By node, the number of characters at the end of the text read that could still become a
        match."""
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [ROOT]
        self._match = [NONE]
        for index, string in enumerate(self.strings):
            self._insert(index, string)
        self._link()
        self._firsts = frozenset(self._goto[ROOT])

    def _insert(self, index: int, string: str) -> None:
        node = ROOT
        for depth, character in enumerate(string, start=1):
            child = self._goto[node].get(character)
            if child is None:
                child = len(self._goto)
                self._goto[node][character] = child
                self._goto.append({})
                self._fail.append(ROOT)
                self._match.append(NONE)
                self.depth.append(depth)
            node = child
        if node != ROOT and self._match[node] == NONE:
            self._match[node] = index

    def _link(self) -> None:
        queue = deque(self._goto[ROOT].values())
        while queue:
            node = queue.popleft()
            for character, child in self._goto[node].items():
                queue.append(child)
                self._fail[child] = self._step(self._fail[node], character)
                if self._match[child] == NONE:
                    self._match[child] = self._match[self._fail[child]]

    def _step(self, node: int, character: str) -> int:
        while node != ROOT and character not in self._goto[node]:
            node = self._fail[node]
        return self._goto[node].get(character, ROOT)

    def no_match_begins_in(self, text: str) -> bool:
        """True if none of the strings can begin in ``text``, so that reading ``text`` from the
        state ``ROOT`` would end in ``ROOT``."""
        return self._firsts.isdisjoint(text)

    def walk(self, node: int, text: str, start: int = 0) -> tuple[int, int, int]:
        """Reads ``text[start:]`` from the state ``node`` up to the end of the first match.

        Returns the node that was reached, the position after the last character that was read, and
        the index of the string that ends at this position (the longest, if several do), or ``NONE``
        if the text has ended without a match.
        """
        goto, fail, match = self._goto, self._fail, self._match
        for at in range(start, len(text)):
            character = text[at]
            while node != ROOT and character not in goto[node]:
                node = fail[node]
            node = goto[node].get(character, ROOT)
            if match[node] != NONE:
                return node, at + 1, match[node]
        return node, len(text), NONE
