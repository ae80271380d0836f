"""The ASGI application of a front end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mayfly_protocol.addresses import node_address
from mayfly_protocol.identity import read_pair
from mayfly_server.api import (
    chat,
    completions,
    document,
    errors,
    events,
    health,
    models,
    page,
    status,
    tokenize,
    unserved,
)
from mayfly_server.api.anthropic import routes as anthropic
from mayfly_server.api.body import BodyLimit
from mayfly_server.api.front import Front, FrontDep
from mayfly_server.api.request_id import RequestId
from mayfly_server.api.responses import routes as responses
from mayfly_server.api.schemas.errors import ANTHROPIC_FAILURES, FAILURES
from mayfly_server.config import FrontSettings
from mayfly_server.edge.counting import Counting
from mayfly_server.edge.expectations import Expectations
from mayfly_server.edge.gate import Gate
from mayfly_server.edge.hosts import HostPolicy, Hosts, own_names
from mayfly_server.edge.keyring import Keyring
from mayfly_server.edge.keys import Key
from mayfly_server.edge.origins import Origins, with_cors
from mayfly_server.edge.redirects import Redirects
from mayfly_server.fleet_metrics import FleetMetrics
from mayfly_server.metrics import Metrics
from mayfly_server.pool.dialling import Dialler
from mayfly_server.pool.fleet import Fleet
from mayfly_server.pool.node_list import NodeList

_log = structlog.get_logger(__name__)


def create_app(settings: FrontSettings, keys: Sequence[Key] = ()) -> FastAPI:
    """Listens to its nodes for as long as its lifespan lasts; ``app.state.front`` is what it knows
    meanwhile. ``keys`` open it beside those of the settings' file.

    Raises:
        KeysError: the file cannot be used.
        IdentityError: this front end's own key cannot be.
        AddressError: one of the nodes cannot be dialled.
    """
    dialler = Dialler(read_pair(settings.state_dir) if settings.state_dir else None)
    for address in settings.nodes:
        dialler.control(node_address(address))
    keyring = Keyring(tuple(keys), settings.api_keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(_unforeseen)
        metrics = Metrics()
        fleet = Fleet(settings, metrics, dialler)
        metrics.registry.register(FleetMetrics(fleet))
        fleet.start()
        watching = [asyncio.create_task(keyring.watch(), name="watch the keys file")]
        if settings.nodes_file is not None:
            nodes = NodeList(settings.nodes_file, fleet.follow)
            watching.append(asyncio.create_task(nodes.watch(), name="watch the nodes' file"))
        app.state.front = Front(settings, metrics, fleet, int(time.time()))
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
            await fleet.close()

    app = FastAPI(
        title="Mayfly",
        description=document.DESCRIPTION,
        version=document.package_version(),
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
        docs_url=None,  # they would load their scripts from elsewhere
        redoc_url=None,
        separate_input_output_schemas=False,
        strict_content_type=False,  # bodies are checked by StrictRoute
    )
    errors.install(app)
    for routes in (chat, completions, responses, tokenize, models, unserved, status):
        app.include_router(routes.router, responses=FAILURES)
    app.include_router(anthropic.router, responses=ANTHROPIC_FAILURES)
    app.include_router(health.router, responses={"4XX": FAILURES["4XX"]})
    document.install(app, locked=keyring.locked)
    for untold in (events, page):
        app.include_router(untold.router)
    if settings.metrics != "off":
        app.add_api_route("/metrics", metrics_page, include_in_schema=False)
    # The one that is added last sees a request first: see the drawing in edge.
    app.add_middleware(Redirects)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(Gate, keyring=keyring, metrics=settings.metrics)
    app.add_middleware(Origins, allowed=settings.cors_origins)
    if settings.cors_origins:
        app.add_middleware(with_cors, origins=settings.cors_origins)
    if settings.allowed_hosts or not keyring.locked:
        app.add_middleware(Hosts, policy=HostPolicy(settings.allowed_hosts, own_names()))
    app.add_middleware(Expectations)
    app.add_middleware(RequestId)
    app.add_middleware(Counting)
    return app


async def metrics_page(front: FrontDep) -> Response:
    """What this front end counts, and if the settings say so what its nodes do."""
    pages = [front.metrics.exposition()]
    if front.settings.node_metrics:
        pages += await front.fleet.node_metrics()
    return Response(b"".join(pages), media_type=CONTENT_TYPE_LATEST)


def _unforeseen(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Instead of asyncio's own words, which quote what a task was about."""
    _log.error(
        "an error nobody foresaw, in the background",
        what=str(context["message"]).partition(" callback ")[0],
        exc_info=context.get("exception"),
        rid=None,
    )
