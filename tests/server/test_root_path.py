"""A path in front of every endpoint: with it, without it, and no way around keys through it."""

import dataclasses
from typing import Any

import httpx
import pytest

from octavo.config import Config, WebConfig
from octavo.errors import ConfigError
from octavo.server.http.listener import check_web
from tests.server.fakes import Harness, keyed


def harness(path: str = "/octavo", keys: tuple[str, ...] = ()) -> Harness:
    config = keyed(*keys) if keys else Config()
    return Harness(config=dataclasses.replace(config, web=WebConfig(root_path=path)))


async def asgi(server: Harness, path: str, raw: bytes, method: str = "GET") -> int:
    """The status of a request whose two paths are as told."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
        "raw_path": raw, "query_string": b"", "root_path": "", "scheme": "http", "headers": [],
        "server": ("test", 80), "client": ("test", 1),
    }  # fmt: skip
    await server.app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_endpoints_are_found_with_the_path_and_without() -> None:
    server = harness("/a/b")
    for path in ("/a/b/v1/models", "/v1/models", "/a/b/livez", "/livez", "/a/b/docs"):
        assert (await server.get(path)).status_code == 200, path
    for path in ("/a/v1/models", "/a/bv1/models", "/a/b", "/a/b/a/b/v1/models"):
        assert (await server.get(path)).status_code == 404, path
    assert (await server.request("POST", "/a/b/v1/completions", json={"prompt": "hi"})).status_code == 200


async def test_the_description_and_the_page_say_where_they_are() -> None:
    server = harness()
    document = (await server.get("/octavo/openapi.json")).json()
    assert document["servers"] == [{"url": "/octavo"}] and "/v1/models" in document["paths"]
    assert 'href="openapi.json"' in (await server.get("/octavo/docs")).text


async def test_keys_are_asked_for_whatever_the_spelling() -> None:
    server = harness(keys=("k",))
    for path in ("/octavo/v1/models", "/octavo/metrics", "/octavo", "/octavo/", "/octavo/nowhere", "/octavo//livez"):
        assert (await server.get(path)).status_code == 401, path
    assert (await server.get("/octavo/livez")).status_code == 200
    good = {"authorization": "Bearer k"}
    assert (await server.get("/octavo/v1/models", headers=good)).status_code == 200


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        ("/octavo/livez", b"/octav%6f/livez"),  # another spelling is another path
        ("/octavo/livez", b"/octavo%2flivez"),
        ("/octavo/livez", b"/octavo/live%7a"),
        ("/octavo/livez/../metrics", b"/octavo/livez/../metrics"),
        ("/octavo/livez/", b"/octavo/livez/"),
        ("/octavo/octavo/livez", b"/octavo/octavo/livez"),
        ("/octavo/metrics", b"/octavo/livez"),
        ("/octavo/metrics", b"/livez"),
    ],
)
async def test_what_is_not_byte_for_byte_open_needs_a_key(path: str, raw: bytes) -> None:
    assert await asgi(harness(keys=("k",)), path, raw) == 401


async def test_work_is_gated_behind_the_path_too() -> None:
    server = harness(keys=("k",))
    server.context.lifecycle.refuse()
    headers = {"authorization": "Bearer k"}
    response = await server.request("POST", "/octavo/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert response.status_code == 503, "refused before its body is looked at"


@pytest.mark.parametrize("path", ["octavo", "/octavo/", "/", "//a", "/a b", "/a/../b", "/%61", "/a?b", "/."])
def test_what_is_no_path_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(ConfigError, match="--root-path is"):
        check_web(WebConfig(root_path=path))


async def test_request_ids_come_back_on_every_answer() -> None:
    server = harness(keys=("k",))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://localhost") as client:
        for path in ("/octavo/livez", "/octavo/v1/models", "/nowhere", "/v1/chat/completions"):
            for method in ("GET", "POST", "PUT"):
                given = await client.request(method, path, headers={"x-request-id": "mine-1"})
                assert given.headers.get_list("x-request-id") == ["mine-1"], (method, path)
                made = await client.request(method, path)
                assert len(made.headers["x-request-id"]) == 32
