"""Pages and their files as responses.

Owns: the headers they go with, and telling a browser that it has a file already. Does not: hold the files
(dashboard.page does) or decide who gets them (auth does).
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.responses import Response

from octavo.dashboard.page import HEADERS, asset
from octavo.server.faults import ApiError


def file_response(request: Request, name: str) -> Response:
    """A file of the pages; 304 where the browser has it, 404 where there is none."""
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
    """Whether whoever asks is a browser that shows a page: clients of APIs do not name text/html."""
    return "text/html" in accept.lower()
