"""GET /docs, the API's description as one plain page, and GET /openapi.json.

Owns: the page's form. Does not: hold any text about an endpoint; that is in the OpenAPI document it is made from.
Nothing is fetched from elsewhere and no script runs, so that the page works on a machine without a network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse

from octavo.dashboard.page import HEADERS
from octavo.server.http.endpoints import Endpoint, Limit

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


async def docs(request: Request) -> HTMLResponse:
    """Show the endpoints and their fields."""
    return HTMLResponse(render(request.app.state.endpoints.openapi), headers=_HEADERS)


async def openapi(request: Request) -> JSONResponse:
    """Return the OpenAPI document, with the root path as its server."""
    root_path = request.app.state.root_path
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    return JSONResponse({**request.app.state.endpoints.openapi, **servers})


def render(document: Mapping[str, Any]) -> str:
    """Make the page from an OpenAPI document."""
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
    """Return the id of an operation's heading, like the operation ids."""
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
    Endpoint("GET", "/docs", docs, limit=Limit.NONE, is_documented=False),
    Endpoint("GET", "/openapi.json", openapi, limit=Limit.NONE, is_documented=False),
    Endpoint("HEAD", "/openapi.json", openapi, limit=Limit.NONE, is_documented=False),
]
