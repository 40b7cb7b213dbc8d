"""GET /v1/models and /v1/models/{id}, in Anthropic's form for its clients."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import Context, context_of
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.model_card import anthropic_card

ANTHROPIC_VERSION = "anthropic-version"  # the header by which Anthropic's clients are recognized


def _card(context: Context, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.text.name,
        "parent": None,
        "max_model_len": context.max_model_len,
    }


async def list_models(request: Request) -> Response:
    """List the model that is served, under each of its names."""
    context = context_of(request)
    names = context.models
    if ANTHROPIC_VERSION in request.headers:
        cards = [anthropic_card(context, name) for name in names]
        body: dict[str, object] = {"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    else:
        body = {"object": "list", "data": [_card(context, name) for name in names]}
    return Response(msgspec.json.encode(body), media_type="application/json")


async def get_model(request: Request) -> Response:
    """Describe the served model; another name is 404."""
    context = context_of(request)
    name = context.check_model(request.path_params["model_id"])
    card = anthropic_card(context, name) if ANTHROPIC_VERSION in request.headers else _card(context, name)
    return Response(msgspec.json.encode(card), media_type="application/json")


ENDPOINTS = [
    Endpoint("GET", "/v1/models", list_models, limit=Limit.NONE),
    Endpoint("GET", "/v1/models/{model_id:path}", get_model, limit=Limit.NONE),
]
