"""``--metrics-port``: a node's metrics over HTTP, on a thread of its own.

A slow or hostile client costs a thread and never the reaper's time: the page is made of snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server

from mayfly_reaper.errors import StartError
from mayfly_reaper.metrics import NodeMetrics
from mayfly_reaper.settings import Address


@contextmanager
def metrics_served(metrics: NodeMetrics, address: Address) -> Iterator[None]:
    """Raises StartError where the address cannot be listened on."""
    try:
        server, thread = start_http_server(address.port, address.host, metrics.registry)
    except OSError as error:
        raise StartError(
            f"cannot serve metrics on {address.host} port {address.port}: "
            f"{error.strerror or error}; choose another one with --metrics-port"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
