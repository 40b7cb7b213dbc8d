"""GET and POST /login, POST /logout: a browser's user gives a key once, and a cookie identifies the session then."""

from __future__ import annotations

from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.auth import SESSION, login_form, source_of, wrong_key_error
from octavo.server.context import Context, context_of
from octavo.server.faults import ApiError
from octavo.server.http.endpoints import Access, Endpoint, Limit
from octavo.server.json_body import read_body
from octavo.server.logins import cookie_name, is_own_page, session_cookies
from octavo.server.pages import wants_html

MAX_LOGIN_BYTES = 4096
MARKER = "octavo-signed-in"  # shows pages that there is a session to end; it gives no access
NEXT_PAGES = ("", "dashboard", "docs")  # the pages that a login may lead to
_NO_KEY = "this is no valid key"


async def form(request: Request) -> Response:
    """Show the login form; redirect to the first page if no keys are set."""
    if not context_of(request).keys.keys:
        return _away("./")
    return login_form(200, "", _next(request.query_params.get("next", "")))


async def log_in(request: Request) -> Response:
    """Start a session for a key; redirect a browser to its page, answer a program 204."""
    context, is_page = context_of(request), _is_page(request)
    _check_own(request)
    fields = await _fields(request, context)
    next_page = _next(fields.get("next", ""))
    if not context.keys.keys:
        return _away(next_page or "./") if is_page else Response(status_code=204)
    session_id = context.logins.log_in(fields.get("key", "").strip().encode("utf-8", "surrogatepass"))
    if session_id is None:
        wait_s = context.logins.wrong_keys.note(source_of(request.scope))
        return _refused(wrong_key_error(_NO_KEY, wait_s), is_page, next_page)
    for old in session_cookies(request.headers):
        context.logins.log_out(old)
    response = _away(next_page or "./") if is_page else Response(status_code=204)
    is_secure = _is_secure(request)
    name = cookie_name(request.headers, is_secure)
    response.set_cookie(name, session_id, path="/", secure=is_secure, httponly=True, samesite="strict")
    response.set_cookie(MARKER, "1", path="/", secure=is_secure, samesite="strict")
    return response


async def log_out(request: Request) -> Response:
    """End the session of the request's cookie."""
    context, is_page = context_of(request), _is_page(request)
    session_id = request.scope.get(SESSION)
    if session_id is not None:
        context.logins.log_out(session_id)
    response = _away("login") if is_page else Response(status_code=204)
    is_secure = _is_secure(request)
    name = cookie_name(request.headers, is_secure)
    response.delete_cookie(name, path="/", secure=is_secure, httponly=True, samesite="strict")
    response.delete_cookie(MARKER, path="/", secure=is_secure, samesite="strict")
    return response


def _check_own(request: Request) -> None:
    """Refuse a form that another site's page sent: it would log its user in with another key."""
    if not is_own_page(request.headers, request.method) and _has_origin(request.headers):
        raise ApiError(403, "this form was sent by a page of another site", code="cross_site")


def _has_origin(headers: Headers) -> bool:
    """Return True if a browser sent the request: programs send neither header."""
    return "origin" in headers or "sec-fetch-site" in headers


async def _fields(request: Request, context: Context) -> dict[str, str]:
    body = await read_body(request, context.limits)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        try:
            return msgspec.json.decode(body, type=dict[str, str])
        except msgspec.MsgspecError:
            raise ApiError(400, 'give {"key": "..."}', code="invalid_json") from None
    try:
        return {name: values[0] for name, values in parse_qs(body.decode(), max_num_fields=8).items()}
    except ValueError:
        raise ApiError(400, "give the field key, as a form sends it", code="invalid_value", param="key") from None


def _refused(error: ApiError, is_page: bool, next_page: str) -> Response:
    if not is_page:
        raise error
    return login_form(error.status, error.message, next_page, error.headers())


def _is_page(request: Request) -> bool:
    return wants_html(request.headers.get("accept", ""))


def _is_secure(request: Request) -> bool:
    """Return True if the browser uses TLS, to this server or to a proxy that says so."""
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").lower() == "https"


def _next(asked: str) -> str:
    """Return one of our pages, never an address of a client's choice."""
    return asked if asked in NEXT_PAGES else ""


def _away(page: str) -> Response:
    return Response(status_code=303, headers={"location": page, "cache-control": "no-store"})


ENDPOINTS = [
    Endpoint("GET", "/login", form, Access.OPEN, Limit.NONE, is_documented=False),
    Endpoint("POST", "/login", log_in, Access.OPEN, Limit.NONE, is_documented=False, max_body_bytes=MAX_LOGIN_BYTES),
    Endpoint("POST", "/logout", log_out, limit=Limit.NONE, is_documented=False),
]
