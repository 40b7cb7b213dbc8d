"""GET /docs: the API's description as one plain page.

Owns: the page's form. Does not: hold any text about an endpoint; that is in the OpenAPI document it is made from.
Nothing is fetched from elsewhere and no script runs, so that the page works on a machine without a network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { border-top: 1px solid #8886; padding-top: 1.5rem; margin-top: 2.5rem }
code { font-family: ui-monospace, monospace; font-size: .92em }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8884 }
.verb { color: #b3541e }
"""
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'", "cache-control": "no-store"}
_CODE = re.compile(r"`([^`]+)`")


async def docs(request: Request) -> HTMLResponse:
    """Show the endpoints and their fields."""
    app: FastAPI = request.app
    return HTMLResponse(render(app.openapi()), headers=_HEADERS)


def render(document: Mapping[str, Any]) -> str:
    """Make the page from an OpenAPI document."""
    title = escape(document["info"]["title"])
    operations = [
        (path, verb, operation) for path, verbs in document["paths"].items() for verb, operation in verbs.items()
    ]
    body = "".join(_operation(path, verb, operation) for path, verb, operation in operations)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{title}</h1>"
        "<p>OpenAI's clients work with the base URL <code>/v1</code>, Anthropic's and Ollama's with the address "
        'itself. For programs: <a href="openapi.json">'
        f"openapi.json</a>.</p>{body}</html>"
    )


def _operation(path: str, verb: str, operation: Mapping[str, Any]) -> str:
    paragraphs = operation.get("description", "").split("\n\n")
    words = "".join(f"<p>{_text(paragraph)}</p>" for paragraph in paragraphs if paragraph)
    head = f'<h2><code><span class="verb">{escape(verb.upper())}</span> {escape(path)}</code></h2>'
    content = operation.get("requestBody", {}).get("content", {})
    rows = "".join(_rows(content.get("application/json", {}).get("schema", {})))
    if not rows:
        return head + words
    return f"{head}{words}<table><tr><th>field<th>type<th>default<th></tr>{rows}</table>"


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


def add_routes(app: FastAPI) -> None:
    """Add this module's endpoint; it does not describe itself."""
    app.add_api_route("/docs", docs, methods=["GET"], response_model=None, include_in_schema=False)
