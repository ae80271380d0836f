"""The ASGI application of a front end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mayfly_server.api import chat, completions, errors, health, models, status
from mayfly_server.api.body import BodyLimit
from mayfly_server.api.front import Front, FrontDep
from mayfly_server.api.request_id import RequestId
from mayfly_server.config import FrontSettings
from mayfly_server.metrics import Metrics
from mayfly_server.pool.fleet import Fleet


def create_app(settings: FrontSettings) -> FastAPI:
    """Listens to its nodes for as long as its lifespan lasts; ``app.state.front`` is what it knows
    meanwhile."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        metrics = Metrics()
        fleet = Fleet(settings, metrics)
        fleet.start()
        app.state.front = Front(settings, metrics, fleet, int(time.time()))
        try:
            yield
        finally:
            await fleet.close()

    app = FastAPI(
        title="Mayfly",
        lifespan=lifespan,
        docs_url=None,  # they would load their scripts from elsewhere
        redoc_url=None,
        strict_content_type=False,  # bodies are checked by StrictRoute
    )
    errors.install(app)
    for routes in (chat, completions, models, health, status):
        app.include_router(routes.router)
    app.add_api_route("/metrics", metrics_page, include_in_schema=False)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(RequestId)
    return app


async def metrics_page(front: FrontDep) -> Response:
    return Response(front.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
