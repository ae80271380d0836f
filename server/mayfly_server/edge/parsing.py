"""Requests that ask for another protocol than HTTP/1.1, as Java's own client does with each one by
default (``Upgrade: h2c``).

A server may go on as if nothing had been asked (RFC 9110, 7.8), and this one does. Its parser takes
what follows the head of such a request, its body included, for the other protocol's. So the head is
read once more, without that field::

    head, Upgrade --> HttpParserUpgrade --> another parser: the same head, less one field
                                                 |
                      what followed the head ----+--> body, next request ...
"""

from __future__ import annotations

from collections.abc import Callable

import httptools


class PersistentParser:
    """A parser for one connection, with the methods of httptools' that Uvicorn uses.

    ``callbacks`` is told what is parsed. While :meth:`should_upgrade` it has to ignore the ends of
    head and message; the ``head`` that it then gives comes again, and with it the message.
    """

    def __init__(self, callbacks: object, head: Callable[[], bytes]) -> None:
        self._callbacks = callbacks
        self._head = head
        self._begin()

    def _begin(self) -> None:
        parser = httptools.HttpRequestParser(self._callbacks)
        # As Uvicorn has it: what is behind a request that closes the connection is no error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.get_method = parser.get_method
        self.get_http_version = parser.get_http_version
        self.should_keep_alive = parser.should_keep_alive
        self.should_upgrade = parser.should_upgrade
        self._feed = parser.feed_data

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError."""
        left = memoryview(data)
        while True:
            try:
                self._feed(left)
                return
            except httptools.HttpParserUpgrade as asked:
                left = left[asked.args[0] :]
                head = self._head()
                self._begin()
                self._feed(head)
