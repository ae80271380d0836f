"""The ASGI application of a front end: its routes, its middleware and its background tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI

from mayfly_protocol.transport.addresses import node_address
from mayfly_protocol.transport.keys import read_pair
from mayfly_server.api import openapi
from mayfly_server.api.admin import health, metrics_page, page, status
from mayfly_server.api.anthropic import messages
from mayfly_server.api.dependencies import Front
from mayfly_server.api.openai import chat, completions, models, tokenize
from mayfly_server.api.responses import responses
from mayfly_server.dispatch.connector import Connector
from mayfly_server.dispatch.fleet import Fleet
from mayfly_server.dispatch.node_list import NodeList
from mayfly_server.http.api_keys import Key, Keyring
from mayfly_server.http.auth import AuthMiddleware
from mayfly_server.http.errors import install_handlers
from mayfly_server.http.hosts import HostPolicy, TrustedHosts, own_names
from mayfly_server.http.middleware import (
    BodyLimit,
    Expect100,
    HeadAsGet,
    HttpMetrics,
    RelativeRedirects,
    RequestId,
)
from mayfly_server.http.origins import OriginCheck, with_cors
from mayfly_server.metrics import Metrics
from mayfly_server.settings import FrontSettings

FILE_WATCH_INTERVAL_S = 1.0

_log = structlog.get_logger(__name__)


def create_app(settings: FrontSettings, keys: Sequence[Key] = ()) -> FastAPI:
    """Makes the application. During its lifespan, it is connected to its nodes, and
    ``app.state.front`` holds the parts of the front end. The API keys ``keys`` are valid in
    addition to those in the settings' keys file.

    Raises:
        KeysError: the keys file cannot be used.
        IdentityError: this front end's own key pair cannot be used.
        AddressError: a node's address cannot be used.
    """
    connector = Connector(read_pair(settings.state_dir) if settings.state_dir else None)
    for address in settings.nodes:
        connector.control(node_address(address))
    keyring = Keyring(tuple(keys), settings.api_keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(_log_unhandled)
        metrics = Metrics()
        fleet = Fleet(settings, metrics, connector)
        metrics.registry.register(metrics_page.FleetMetrics(fleet))
        fleet.start()
        tasks = [asyncio.create_task(_watch_keys(keyring), name="watch the keys file")]
        if settings.nodes_file is not None:
            nodes = NodeList(settings.nodes_file, fleet.use_nodes)
            tasks.append(asyncio.create_task(_watch_nodes(nodes), name="watch the nodes file"))
        app.state.front = Front(settings, metrics, fleet, int(time.time()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await fleet.close()

    app = FastAPI(
        title="Mayfly",
        description=openapi.DESCRIPTION,
        version=openapi.package_version(),
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from another site
        redoc_url=None,
        separate_input_output_schemas=False,
        strict_content_type=False,  # bodies are checked by StrictRoute
    )
    install_handlers(app)
    for routes in (chat, completions, responses, tokenize, models, status):
        app.include_router(routes.router, responses=openapi.FAILURES)
    app.include_router(messages.router, responses=openapi.ANTHROPIC_FAILURES)
    app.include_router(health.router, responses={"4XX": openapi.FAILURES["4XX"]})
    openapi.install(app, locked=keyring.required, strict_fields=settings.strict_fields)
    for undocumented in (
        models.not_served_router,
        responses.not_stored_router,
        status.events_router,
        page.router,
    ):
        app.include_router(undocumented)
    if settings.metrics != "off":
        app.include_router(metrics_page.router)
    # The middleware added last sees a request first: see the drawing in mayfly_server.http.
    app.add_middleware(RelativeRedirects)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(
        AuthMiddleware, keyring=keyring, metrics=settings.metrics, open_paths=page.PATHS
    )
    app.add_middleware(OriginCheck, allowed=settings.cors_origins)
    if settings.cors_origins:
        app.add_middleware(with_cors, origins=settings.cors_origins)
    if settings.allowed_hosts or not keyring.required:
        app.add_middleware(TrustedHosts, policy=HostPolicy(settings.allowed_hosts, own_names()))
    app.add_middleware(Expect100)
    app.add_middleware(RequestId)
    app.add_middleware(HttpMetrics)
    app.add_middleware(HeadAsGet)
    return app


async def _watch_keys(keyring: Keyring) -> None:
    """Reloads the API keys file whenever it changes, in a thread, because reading may take a
    while."""
    while True:
        await asyncio.sleep(FILE_WATCH_INTERVAL_S)
        await asyncio.to_thread(keyring.reload_if_changed)


async def _watch_nodes(nodes: NodeList) -> None:
    """Reloads the list of nodes whenever its file changes. It runs on the event loop, because the
    connections to new nodes are made there."""
    while True:
        await asyncio.sleep(FILE_WATCH_INTERVAL_S)
        nodes.reload_if_changed()


def _log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an unhandled exception of a background task. Asyncio's own log line is not used, because
    it shows the arguments of the task, which may hold a client's text."""
    _log.error(
        "unhandled exception in the background",
        what=str(context["message"]).partition(" callback ")[0],
        exc_info=context.get("exception"),
        rid=None,
    )
