"""add_post: a POST endpoint whose body is one JSON object.

Owns: its place in the API's description. Does not: read the body (each endpoint does).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from octavo.server.bodies.checks import inline_schema

Endpoint = Callable[[Request], Awaitable[Response]]


def add_post(
    app: FastAPI,
    path: str,
    endpoint: Endpoint,
    body: type[BaseModel] | Mapping[str, object],
    *description: str,
) -> None:
    """Add an endpoint. `body` is its model or schema; `description` has paragraphs, by default the docstring."""
    schema = inline_schema(body) if isinstance(body, type) else body
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_model=None,
        description="\n\n".join(description or (str(endpoint.__doc__),)),
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    )
