"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.context import Context, context_of


def _card(context: Context) -> dict[str, object]:
    return {
        "id": context.model,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "max_model_len": context.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """List the one model that is served."""
    body = {"object": "list", "data": [_card(context_of(request))]}
    return Response(msgspec.json.encode(body), media_type="application/json")


async def get_model(request: Request) -> Response:
    """Describe the served model; another name is 404."""
    context = context_of(request)
    context.check_model(request.path_params["model_id"])
    return Response(msgspec.json.encode(_card(context)), media_type="application/json")


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoints."""
    app.add_api_route("/v1/models", list_models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{model_id:path}", get_model, methods=["GET"], response_model=None)
