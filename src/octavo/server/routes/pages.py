"""GET /dashboard with its feed, and the pages' files under /static."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.dashboard.page import NO_HTML_FROM_TEXT
from octavo.server.auth import KEY
from octavo.server.context import context_of
from octavo.server.feed import FeedResponse
from octavo.server.http.endpoints import Endpoint, Limit
from octavo.server.pages import file_response


async def dashboard(request: Request) -> Response:
    """Show the dashboard."""
    response = file_response(request, "dashboard.html")
    response.headers["content-security-policy"] += NO_HTML_FROM_TEXT
    return response


async def feed(request: Request) -> Response:
    """Stream the engine's frames as server-sent events, for the dashboard."""
    context = context_of(request)
    return FeedResponse(context.feed, context.feed.watch(request.scope[KEY]))


async def static(request: Request) -> Response:
    """Return a file of a page."""
    return file_response(request, request.path_params["name"])


ENDPOINTS = [
    Endpoint("GET", "/dashboard", dashboard, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/dashboard/feed", feed, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/static/{name}", static, limit=Limit.NONE, is_documented=False),
]
