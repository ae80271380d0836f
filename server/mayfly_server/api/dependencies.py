"""FastAPI dependencies that routes declare: the front end's shared objects, and the name of the
caller's API key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from mayfly_server.dispatch.fleet import Fleet, ServedModel
from mayfly_server.errors import InvalidRequest, ModelNotFound, Unavailable
from mayfly_server.http.ignored_fields import IgnoredFieldsLog
from mayfly_server.metrics import Metrics
from mayfly_server.settings import FrontSettings


@dataclass(frozen=True, slots=True)
class Front:
    """The objects that all routes of a front end share. ``started`` is the process's start in
    seconds since 1970."""

    settings: FrontSettings
    metrics: Metrics
    fleet: Fleet
    started: int
    ignored_fields: IgnoredFieldsLog = field(default_factory=IgnoredFieldsLog)

    async def model(self, asked: str | None) -> ServedModel:
        """Finds the served model that a request names by its full name, an alias, or the last part
        of its name (after the last slash). Without a name, finds the only served model. Models that
        are not served, such as files on disk, are not searched.

        Raises:
            ModelNotFound: no served model has the name, or several have.
            InvalidRequest: the request names no model, and several are served.
            Unavailable: nodes that may serve the model have not reported to this front end yet.
        """
        if not await self.fleet.wait_for_roster(self.settings.queue_wait_s):
            raise Unavailable("No node has reported to this front end yet.", retry_after_s=1.0)
        served = self.fleet.models()
        if asked is None:
            if len(served) == 1:
                return served[0]
            raise InvalidRequest(
                "model: Field required, since several models are served; see /v1/models.",
                param="model",
                code="missing_required_parameter",
            )
        name = self.settings.aliases.get(asked, asked)
        exact = [model for model in served if model.name == name]
        short = [model for model in served if model.name.rpartition("/")[2] == name]
        found = exact or short
        if not found and self.fleet.partly_known:
            raise Unavailable(
                f"The model {asked[:200]!r} is served by none of the nodes that have reported to "
                "this front end; others have not reported yet.",
                retry_after_s=1.0,
            )
        if len(found) != 1:
            raise ModelNotFound(
                f"The model {asked[:200]!r} is not served here; see /v1/models.", param="model"
            )
        return found[0]

    async def chat_model(self, asked: str | None) -> ServedModel:
        """Finds the served model that a chat request names. Raises the errors of :meth:`model`, and
        InvalidRequest for a model without a chat template."""
        model = await self.model(asked)
        if model.card is not None and not model.card.chat:
            raise InvalidRequest(
                f"{model.name} has no chat template; use /v1/completions.", param="messages"
            )
        return model


# These functions are async although they await nothing: FastAPI would run plain functions in
# threads.
async def _front(request: Request) -> Front:
    return cast(Front, request.app.state.front)


async def _tenant(request: Request) -> str:
    tenant: str = getattr(request.state, "tenant", "")
    return tenant


FrontDep = Annotated[Front, Depends(_front)]
TenantDep = Annotated[str, Depends(_tenant)]
"""The name of the caller's API key; empty where the server needs no keys."""
