"""The pages for browsers: /login and /logout, /dashboard with its feed, /docs, /openapi.json, and files under /static.

Owns: the pages' headers, the 304 for a file that a browser has, and the layout of /docs, whose text is the OpenAPI
document's. Does not: hold the files (dashboard.page does) or sessions (auth does).
A user enters a key once; after that, a cookie identifies the session. /docs loads nothing and runs no script, so that
it works on a machine without a network.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from octavo.dashboard.page import HEADERS, NO_HTML_FROM_TEXT, asset
from octavo.server.context import Context, context_of
from octavo.server.http.auth import (
    KEY,
    SESSION,
    cookie_name,
    is_own_page,
    login_form,
    session_cookies,
    source_of,
    wants_html,
    wrong_key_error,
)
from octavo.server.http.body import read_body
from octavo.server.http.endpoints import Access, Endpoint, Limit
from octavo.server.http.errors import ApiError
from octavo.server.reply import FeedResponse

MAX_LOGIN_BYTES = 4096
_MAX_DIGITS = 9  # of a replica's number
MARKER = "octavo-signed-in"  # a cookie that shows scripts of the pages that a session exists; it gives no access
NEXT_PAGES = ("", "dashboard", "docs")  # the pages that a login may open
_NO_KEY = "this is no valid key"
_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #16202c; --link: #2457c5; --verb: #9c4413 }
@media (prefers-color-scheme: dark) { :root { --bg: #0e131a; --fg: #e6ebf2; --link: #7fa8ff; --verb: #f0a573 } }
html { background: var(--bg); color: var(--fg) }
a { color: var(--link) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { scroll-margin-top: 1rem; border-top: 1px solid #8886; padding-top: 1.5rem; margin-top: 2.5rem }
code { font-family: ui-monospace, monospace; font-size: .92em; overflow-wrap: anywhere }
nav ul { columns: 19rem; column-gap: 1.5rem; list-style: none; padding: 0 }
nav li { break-inside: avoid; padding: .15rem 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
td:last-child { min-width: 9rem }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884 }
.verb { color: var(--verb) }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {**HEADERS, "content-security-policy": _POLICY, "cache-control": "no-store"}
_CODE = re.compile(r"`([^`]+)`")


def file_response(request: Request, name: str) -> Response:
    """Return a file of the pages, or a 304 if the browser has it. Raises ApiError (404) for an unknown name."""
    found = asset(name)
    if found is None:
        raise ApiError(404, f"no file {name[:128]!r} here", code="not_found")
    content, media_type = found
    tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    headers = {**HEADERS, "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


async def dashboard(request: Request) -> Response:
    """Show the dashboard."""
    response = file_response(request, "dashboard.html")
    response.headers["content-security-policy"] += NO_HTML_FROM_TEXT
    return response


async def feed(request: Request) -> Response:
    """Stream the engine's frames as server-sent events, for the dashboard; those of one `?model=` and `?replica=`."""
    context = context_of(request).for_model(request.query_params.get("model") or None)
    replica = request.query_params.get("replica", "")
    if replica and not (replica.isdecimal() and len(replica) <= _MAX_DIGITS):
        raise ApiError(400, f"replica is {replica[:32]!r}; give its number", code="invalid_value", param="replica")
    return FeedResponse(context.feed, context.feed.watch(request.scope[KEY], replica))


async def static(request: Request) -> Response:
    """Return a file that a page uses."""
    return file_response(request, request.path_params["name"])


async def form(request: Request) -> Response:
    """Show the login form. Without keys, redirect to the first page."""
    if not context_of(request).keys.keys:
        return _away("./")
    return login_form(200, "", _next(request.query_params.get("next", "")))


async def log_in(request: Request) -> Response:
    """Start a session for a key. Browsers are redirected to a page; programs get a 204."""
    context, is_page = context_of(request), _is_page(request)
    _check_own(request)
    fields = await _fields(request, context)
    next_page = _next(fields.get("next", ""))
    response = _away(next_page or "./") if is_page else Response(status_code=204)
    if not context.keys.keys:
        return response
    session_id = context.logins.log_in(fields.get("key", "").strip().encode("utf-8", "surrogatepass"))
    if session_id is None:
        wait_s = context.logins.wrong_keys.note(source_of(request.scope))
        return _refused(wrong_key_error(_NO_KEY, wait_s), is_page, next_page)
    for old in session_cookies(request.headers):
        context.logins.log_out(old)
    is_secure = _is_secure(request)
    name = cookie_name(request.headers, is_secure)
    response.set_cookie(name, session_id, path="/", secure=is_secure, httponly=True, samesite="strict")
    response.set_cookie(MARKER, "1", path="/", secure=is_secure, samesite="strict")
    return response


async def log_out(request: Request) -> Response:
    """End the session that the request's cookie names."""
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
    """Refuse a form from another site's page, which would log its user in with another key."""
    if not is_own_page(request.headers, request.method) and _has_origin(request.headers):
        raise ApiError(403, "this form was sent by a page of another site", code="cross_site")


def _has_origin(headers: Headers) -> bool:
    """Return True if a browser sent the request: programs send neither Origin nor Sec-Fetch-Site."""
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
    """Return True if the browser uses TLS, to this server or to a proxy that sends X-Forwarded-Proto."""
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").lower() == "https"


def _next(path: str) -> str:
    """Return a page of NEXT_PAGES, never an address that a client chose."""
    return path if path in NEXT_PAGES else ""


def _away(page: str) -> Response:
    return Response(status_code=303, headers={"location": page, "cache-control": "no-store"})


async def docs(request: Request) -> HTMLResponse:
    """Show all endpoints and their fields."""
    return HTMLResponse(render(request.app.state.endpoints.openapi), headers=_HEADERS)


async def openapi(request: Request) -> JSONResponse:
    """Return the OpenAPI document. Its server is the root path, if one is set."""
    root_path = request.app.state.root_path
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    return JSONResponse({**request.app.state.endpoints.openapi, **servers})


def render(document: Mapping[str, Any]) -> str:
    """Return the HTML page of an OpenAPI document."""
    title = escape(document["info"]["title"])
    operations = [
        (path, verb, operation) for path, verbs in document["paths"].items() for verb, operation in verbs.items()
    ]
    contents = "".join(
        f'<li><a href="#{_anchor(path, verb)}">{_name(path, verb)}</a></li>' for path, verb, _ in operations
    )
    body = "".join(_operation(path, verb, operation) for path, verb, operation in operations)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{title}</h1>"
        "<p>OpenAI's clients work with the base URL <code>/v1</code>, Anthropic's and Ollama's with the address "
        'itself. For programs: <a href="openapi.json">'
        f'openapi.json</a>.</p><nav aria-label="Contents"><ul>{contents}</ul></nav>{body}</html>'
    )


def _operation(path: str, verb: str, operation: Mapping[str, Any]) -> str:
    paragraphs = operation.get("description", "").split("\n\n")
    words = "".join(f"<p>{_text(paragraph)}</p>" for paragraph in paragraphs if paragraph)
    head = f'<h2 id="{_anchor(path, verb)}">{_name(path, verb)}</h2>'
    content = operation.get("requestBody", {}).get("content", {})
    rows = "".join(_rows(content.get("application/json", {}).get("schema", {})))
    if not rows:
        return head + words
    table = f"<table><tr><th>field<th>type<th>default<th></tr>{rows}</table>"
    return f'{head}{words}<div class="scroll" tabindex="0">{table}</div>'


def _name(path: str, verb: str) -> str:
    return f'<code><span class="verb">{escape(verb.upper())}</span> {escape(path)}</code>'


def _anchor(path: str, verb: str) -> str:
    """Return the id of an operation's heading, built like operation ids."""
    return re.sub(r"[^\w-]", "_", f"{verb}{path}")


def _rows(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else _default(field)
        yield (
            f"<tr><td><code>{escape(name)}</code><td>{escape(_type(field))}<td>{default}"
            f"<td>{_text(field.get('description', ''))}</tr>"
        )


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        kinds = [_type(kind) for kind in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    return "" if default in (None, [], {}) else f"<code>{escape(json.dumps(default))}</code>"


def _text(words: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(words))


ENDPOINTS = [
    Endpoint("GET", "/dashboard", dashboard, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/dashboard/feed", feed, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/static/{name}", static, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/login", form, Access.OPEN, Limit.NONE, is_documented=False),
    Endpoint("POST", "/login", log_in, Access.OPEN, Limit.NONE, is_documented=False, max_body_bytes=MAX_LOGIN_BYTES),
    Endpoint("POST", "/logout", log_out, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/docs", docs, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/openapi.json", openapi, limit=Limit.NONE, is_documented=False),
    Endpoint("HEAD", "/openapi.json", openapi, limit=Limit.NONE, is_documented=False),
]
