"""Which other sites' pages may use the server from a browser."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from octavo.config import Config, WebConfig
from octavo.errors import ConfigError
from octavo.server.http.endpoints import Access, find_endpoints
from octavo.server.http.listener import check_web
from tests.server.fakes import Harness, events, keyed

APP = "https://app.example.com"
OTHER = "https://other.example.com"


def harness(*origins: str, keys: tuple[str, ...] = (), **web: Any) -> Harness:
    config = keyed(*keys) if keys else Config()
    return Harness(config=dataclasses.replace(config, web=WebConfig(allowed_origins=origins, **web)))


async def preflight(
    server: Harness, path: str = "/v1/chat/completions", origin: str = APP, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST", **(headers or {})}
    return await server.request("OPTIONS", path, headers=asked)


def granted(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


async def test_nothing_is_said_of_origins_unless_some_are_allowed() -> None:
    open_to_all, keyed_server = harness(), harness(keys=("k",))
    answers = [
        await open_to_all.chat(headers={"origin": APP}),
        await preflight(open_to_all),
        await keyed_server.chat(headers={"origin": APP, "authorization": "Bearer k"}),
        await preflight(keyed_server),
    ]
    assert [response.status_code for response in answers] == [403, 403, 200, 401]
    for response in answers:
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_allowed_origins_are_named_and_others_are_not() -> None:
    server = harness(APP)
    response = await server.chat(headers={"origin": APP})
    assert granted(response) == APP and response.headers["vary"] == "Origin"
    assert "X-Request-Id" in response.headers["access-control-expose-headers"]
    for origin in (OTHER, APP + ":8443", APP.upper(), "null", APP + ".evil.com"):
        response = await server.chat(headers={"origin": origin})
        assert granted(response) is None and response.status_code == 403
    response = await harness(APP, keys=("k",)).chat(headers={"origin": OTHER, "authorization": "Bearer k"})
    assert granted(response) is None and response.headers["vary"] == "Origin" and response.status_code == 200
    assert granted(await server.chat()) is None and len(server.engine.requests) == 2
    assert granted(await harness("*").chat(headers={"origin": OTHER})) == "*"


async def test_a_preflight_needs_no_key_and_gives_nothing_away() -> None:
    server = harness(APP, keys=("k",))
    asked = {"access-control-request-headers": "authorization, content-type"}
    answers = [
        await preflight(server, path, headers=asked) for path in ("/v1/chat/completions", "/metrics", "/nowhere")
    ]
    for response in answers:
        assert response.status_code == 200 and response.text == "OK"
        assert granted(response) == APP
        assert response.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["x-request-id"]
    shown = [{k: v for k, v in response.headers.items() if k != "x-request-id"} for response in answers]
    assert shown[0] == shown[1] == shown[2], "the same of every path, be there an endpoint or not"
    refused = await preflight(server, origin=OTHER)
    assert refused.status_code == 400 and granted(refused) is None
    assert not server.engine.requests


async def test_every_route_still_needs_its_key() -> None:
    server = harness("*", keys=("k",))
    for path, access in find_endpoints().access.items():
        if access is not Access.KEY:
            continue
        for method in ("GET", "POST", "OPTIONS"):
            response = await server.request(method, path, headers={"origin": APP})
            assert response.status_code == 401, (method, path)


async def test_a_refusal_can_be_read_by_the_page() -> None:
    server = harness(APP, keys=("k",))
    response = await server.chat(headers={"origin": APP})
    assert (response.status_code, granted(response)) == (401, APP)
    malformed = await server.chat(headers={"origin": APP, "authorization": "Bearer k"}, temperature=-1)
    assert (malformed.status_code, granted(malformed)) == (400, APP)


async def test_streams_have_the_headers_too() -> None:
    response = await harness(APP).chat(headers={"origin": APP}, stream=True)
    assert granted(response) == APP and events(response.text)[-1] == "[DONE]"


async def test_methods_and_headers_may_be_named() -> None:
    server = harness(APP, allowed_methods=("POST",), allowed_headers=("Authorization", "X-Mine"))
    response = await preflight(server, headers={"access-control-request-headers": "authorization"})
    assert response.status_code == 200 and response.headers["access-control-allow-methods"] == "POST"
    named = response.headers["access-control-allow-headers"].split(", ")
    assert {"Authorization", "X-Mine"} < set(named) and "anything" not in named
    refused = await preflight(server, headers={"access-control-request-headers": "anything"})
    assert refused.status_code == 400 and "anything" not in refused.headers["access-control-allow-headers"]
    assert (await preflight(server, headers={"access-control-request-method": "DELETE"})).status_code == 400


async def test_credentials_go_with_named_origins_only() -> None:
    response = await harness(APP, allow_credentials=True).chat(headers={"origin": APP})
    assert response.headers["access-control-allow-credentials"] == "true"
    assert "access-control-allow-credentials" not in (await harness(APP).chat(headers={"origin": APP})).headers
    for origins in (("*",), (), ("*", APP)):
        with pytest.raises(ConfigError, match="--allow-credentials needs --allowed-origins"):
            check_web(WebConfig(allowed_origins=origins, allow_credentials=True))


@pytest.mark.parametrize(
    "origin", ["app.example.com", APP + "/", APP + "/path", "https://*.example.com", "null", '["*"]']
)
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-origins is .*; give scheme://host"):
        check_web(WebConfig(allowed_origins=(origin,)))


def test_names_of_methods_and_headers_are_names() -> None:
    for web in (WebConfig(allowed_methods=("P OST",)), WebConfig(allowed_headers=("a\nb",))):
        with pytest.raises(ConfigError, match="give names with commas"):
            check_web(web)


async def test_two_origins_in_one_request_are_none() -> None:
    server = harness(APP)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://localhost") as client:
        response = await client.get("/v1/models", headers=[("origin", APP), ("origin", APP)])
    assert response.status_code == 403 and granted(response) is None
