"""GET /dashboard, and the pages' files under /static."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from octavo.server.pages import file_response


async def dashboard(request: Request) -> Response:
    """Show the dashboard."""
    return file_response(request, "dashboard.html")


async def static(request: Request) -> Response:
    """Give a file of a page."""
    return file_response(request, request.path_params["name"])


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoints; pages do not describe themselves."""
    for path, endpoint in (("/dashboard", dashboard), ("/static/{name}", static)):
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None, include_in_schema=False)
