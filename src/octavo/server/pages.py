"""Responses with pages and their files.

Owns: their headers, and the 304 for a file that a browser has already. Does not: hold the files (dashboard.page does)
or check access (auth does).
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.responses import Response

from octavo.dashboard.page import HEADERS, asset
from octavo.server.faults import ApiError


def file_response(request: Request, name: str) -> Response:
    """Return a file of the pages, or a 304 if the browser has it. Raises ApiError (404) for any other name."""
    found = asset(name)
    if found is None:
        raise ApiError(404, f"no file {name[:128]!r} here", code="not_found")
    content, media_type = found
    tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    headers = {**HEADERS, "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


def wants_html(accept: str) -> bool:
    """Return True if the client is a browser that shows a page: API clients do not accept text/html by name."""
    return "text/html" in accept.lower()
