"""A compressed radix tree over token sequences.

Each edge holds a run of token ids and each node at which a stored sequence ends holds
its value:

    (root)
      +-- [7 7 1 4] ------- value A        A = 7 7 1 4
            +-- [9 2] ----- value B        B = 7 7 1 4 9 2
            +-- [3] ------- (none)
                  +-- [5] - value C        C = 7 7 1 4 3 5
                  +-- [8] - value D        D = 7 7 1 4 3 8

A node without a value has at least two children, so a tree of n sequences has fewer
than 2n nodes, and every point on an edge is a prefix of at least one stored sequence.
Edges are compared as arrays: a match takes O(len(query)) however many sequences are
stored. (Morrison, "PATRICIA", JACM 15(4), 1968; SGLang's RadixAttention uses the same
structure over KV pages.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

V = TypeVar("V")
Tokens: TypeAlias = NDArray[np.int32]


def as_tokens(ids: Sequence[int] | Tokens) -> Tokens:
    """Converts token ids to an int32 array, without a copy if ``ids`` is such an array already."""
    return np.asarray(ids, dtype=np.int32)


class Node(Generic[V]):
    """A point in the radix tree; the handle of a stored sequence while ``value`` is not None.

    ``edge`` holds the tokens between the parent and this node, ``length`` is the number of tokens
    from the root to this node. A handle stays valid, and stays the same object, until its sequence
    is removed.
    """

    __slots__ = ("children", "edge", "length", "parent", "value")

    def __init__(self, edge: Tokens, parent: Node[V] | None, length: int) -> None:
        self.edge = edge
        self.parent = parent
        self.length = length
        self.children: dict[int, Node[V]] = {}
        self.value: V | None = None


@dataclass(frozen=True, slots=True)
class Match(Generic[V]):
    """Result of matching a query, a token sequence, against the sequences stored in a radix tree.

    ``common`` is the greatest number of leading tokens that the query shares with any stored
    sequence, ``nearest`` a stored sequence that shares ``common`` tokens (None if ``common`` is 0),
    and ``prefixes`` all stored sequences that are prefixes of the query, shortest first.
    """

    common: int
    nearest: Node[V] | None
    prefixes: list[Node[V]]


class RadixTree(Generic[V]):
    """Map from token sequences to values that finds shared prefixes. No sequence is empty and no
    value is None."""

    def __init__(self) -> None:
        self._root: Node[V] = Node(as_tokens([]), None, 0)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def match(self, query: Tokens) -> Match[V]:
        """Finds the stored sequences that share a prefix with ``query``."""
        path = self._path(query)
        if not path:
            return Match(0, None, [])
        last, shared = path[-1]
        common = last.length - len(last.edge) + shared
        prefixes = [node for node, _ in path if node.value is not None and node.length <= common]
        nearest = last
        while nearest.value is None:
            nearest = next(iter(nearest.children.values()))
        return Match(common, nearest, prefixes)

    def insert(self, tokens: Tokens, value: V) -> Node[V]:
        """Stores ``value`` under ``tokens``, replacing the value that is stored under the same
        tokens, and returns the handle of the stored sequence.

        Raises:
            ValueError: ``tokens`` is empty.
        """
        if len(tokens) == 0:
            raise ValueError("an empty token sequence cannot be stored")
        node = self._root
        for entered, shared in self._path(tokens):
            node = entered if shared == len(entered.edge) else self._split(entered, shared)
        if node.length < len(tokens):
            # A copy, so that the tree does not keep the caller's whole array alive.
            rest = tokens[node.length :].copy()
            leaf: Node[V] = Node(rest, node, len(tokens))
            node.children[int(rest[0])] = leaf
            node = leaf
        if node.value is None:
            self._size += 1
        node.value = value
        return node

    def remove(self, node: Node[V]) -> None:
        """Removes the stored sequence whose handle is ``node``.

        Raises:
            KeyError: no sequence is stored at ``node`` any more.
        """
        if node.value is None:
            raise KeyError("this sequence is not stored")
        node.value = None
        self._size -= 1
        if not node.children and node.parent is not None:
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        if node.value is None and len(node.children) == 1:
            self._fuse(node)

    def _path(self, tokens: Tokens) -> list[tuple[Node[V], int]]:
        """Returns the nodes along ``tokens``, from the root, each with the number of tokens of its
        edge that ``tokens`` shares.

        All nodes except the last share their whole edge.
        """
        path: list[tuple[Node[V], int]] = []
        node = self._root
        while node.length < len(tokens):
            child = node.children.get(int(tokens[node.length]))
            if child is None:
                break
            shared = _common_length(child.edge, tokens[node.length :])
            path.append((child, shared))
            if shared < len(child.edge):
                break
            node = child
        return path

    def _split(self, lower: Node[V], at: int) -> Node[V]:
        """Splits the edge above ``lower`` after ``at`` tokens by a new node, and returns the new
        node; ``lower`` remains a valid handle."""
        above = lower.parent
        assert above is not None
        upper: Node[V] = Node(lower.edge[:at].copy(), above, above.length + at)
        lower.edge = lower.edge[at:].copy()
        lower.parent = upper
        upper.children[int(lower.edge[0])] = lower
        above.children[int(upper.edge[0])] = upper
        return upper

    def _fuse(self, node: Node[V]) -> None:
        """Removes a node, other than the root, that has no value and only one child: the child
        takes its place, with the edges of both joined."""
        above = node.parent
        if above is None:
            return
        (child,) = node.children.values()
        child.edge = np.concatenate([node.edge, child.edge])
        child.parent = above
        above.children[int(child.edge[0])] = child


def _common_length(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
