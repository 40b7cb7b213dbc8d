"""The API's description as a page: everything is there, and nothing comes from elsewhere."""

from __future__ import annotations

import re

from octavo.server.api.completions.bodies import ChatBody, CompletionBody
from octavo.server.api.pages import render
from tests.server.fakes import Harness


async def test_the_page_lists_every_endpoint_and_field_and_loads_nothing() -> None:
    harness = Harness()
    page = await harness.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for path in harness.app.state.endpoints.openapi["paths"]:
        assert f"</span> {path}</code>" in page.text
    for field in (*ChatBody.model_fields, *CompletionBody.model_fields):
        assert f"<td><code>{field}</code>" in page.text
    assert "<script" not in page.text
    links = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert [link for link in links if not link.startswith("#")] == ["openapi.json"]
    headings = re.findall(r'<h2 id="([^"]*)"', page.text)
    assert [link[1:] for link in links if link.startswith("#")] == headings, "a contents list of all endpoints"
    assert len(set(headings)) == sum(map(len, harness.app.state.endpoints.openapi["paths"].values()))
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_no_body_is_said_to_have_no_other_fields_as_they_are_ignored_and_told() -> None:
    paths = Harness().app.state.endpoints.openapi["paths"].values()
    posted = [path["post"] for path in paths if "requestBody" in path.get("post", {})]
    schemas = [body["schema"] for post in posted for body in post["requestBody"]["content"].values()]
    assert len(schemas) >= 20
    assert [schema["title"] for schema in schemas if schema.get("additionalProperties") is False] == []


def test_what_the_document_says_is_escaped() -> None:
    field = {"type": "string", "default": "<y>", "description": "<z>"}
    body = {"content": {"application/json": {"schema": {"properties": {"<x>": field}}}}}
    operation = {"description": "a <b> and `c<d`", "requestBody": body}
    page = render({"info": {"title": "<t>"}, "paths": {"/<q>": {"post": operation}}})
    assert not re.search("<[bxyzq]>|<t>", page)
    assert "a &lt;b&gt; and <code>c&lt;d</code>" in page
