"""Ollama's endpoints for models, and `/`, where browsers get a page.

Models can be listed and described; none is fetched, made or removed over HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.server.api.pages import file_response
from octavo.server.bodies.checks import Body, Refused, read
from octavo.server.context import context_of
from octavo.server.http.auth import wants_html
from octavo.server.http.body import read_json
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.http.errors import ApiError, bad_field
from octavo.server.model_card import ollama_card, ollama_running, ollama_show

API_VERSION = "0.12.11"  # of Ollama's API that this follows: clients compare it with what they need
_REFUSED_NAMED: Refused = {"system": ("",), "template": ("",), "options": ({},)}
_IGNORED_NAMED = {"verbose", "stream", "insecure", "keep_alive"}
_NO_HTML_FROM_TEXT = "; require-trusted-types-for 'script'; trusted-types 'none'"  # a model's text never becomes HTML
_ELSEWHERE = {
    "/api/push": "no registry is written to",
    "/api/create": "models are made elsewhere, and served by starting octavo with them",
    "/api/copy": "a server has the one model that it was started with; --served-model-name gives it another name",
    "/api/delete": "nothing is removed over HTTP; delete its files where they are kept",
}


class Named(Body):
    """A body with a model's name, in the new field or the old one."""

    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str:
        """The model's name, without the tag that Ollama's clients add. Raises ApiError."""
        name = self.model or self.name
        if not name:
            raise bad_field("model", "model is missing", "missing_field")
        return name.removesuffix(":latest")


async def version(request: Request) -> Response:
    """Return the version of Ollama's API that this server follows."""
    return _json({"version": API_VERSION, "server": "octavo"})


async def tags(request: Request) -> Response:
    """List the model that is served, under each of its names."""
    context = context_of(request)
    return _json({"models": [ollama_card(context, name) for name in context.models]})


async def running(request: Request) -> Response:
    """List the model that is loaded, under each of its names."""
    context = context_of(request)
    return _json({"models": [ollama_running(context, name) for name in context.models]})


async def show(request: Request) -> Response:
    """Describe the served model; another name is 404."""
    context = context_of(request)
    name = context.check_model((await _named(request)).asked)
    return _json(ollama_show(context, name))


async def pull(request: Request) -> Response:
    """Answer success for the served model; no other model is fetched."""
    context = context_of(request)
    context.check_model((await _named(request)).asked)
    return Response(b'{"status":"success"}\n', media_type="application/x-ndjson")


async def refuse(request: Request) -> Response:
    """Refuse an operation that a server of one model does not have."""
    path = request.url.path
    raise ApiError(400, f"{path} is not done here: {_ELSEWHERE[path]}", code="unsupported_endpoint")


async def root(request: Request) -> Response:
    """Return the chat page to browsers, and a line of text to other clients: Ollama's request it first."""
    if not wants_html(request.headers.get("accept", "")):
        return PlainTextResponse("Octavo is running", headers={"vary": "Accept"})
    page = file_response(request, "chat.html")
    page.headers["content-security-policy"] += _NO_HTML_FROM_TEXT
    page.headers["vary"] = "Accept"
    return page


async def _named(request: Request) -> Named:
    def check(fields: dict[str, object]) -> Named:
        return read(Named, {k: v for k, v in fields.items() if k not in _IGNORED_NAMED}, _REFUSED_NAMED)

    return await read_json(request, context_of(request).limits, check)


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


_READ = (("/api/version", version), ("/api/tags", tags), ("/api/ps", running))
ENDPOINTS = [
    *(Endpoint("GET", path, handler, limit=Limit.NONE) for path, handler in _READ),
    *(Endpoint("HEAD", path, handler, limit=Limit.NONE, is_documented=False) for path, handler in _READ),
    Endpoint("POST", "/api/show", show),
    Endpoint("POST", "/api/pull", pull),
    *(Endpoint("POST", path, refuse, is_documented=False) for path in ("/api/push", "/api/create", "/api/copy")),
    Endpoint("DELETE", "/api/delete", refuse, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/", root, limit=Limit.NONE, is_documented=False),
    Endpoint("HEAD", "/", root, limit=Limit.NONE, is_documented=False),
]
