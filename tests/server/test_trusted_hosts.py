"""A server without keys answers its own machine's Hosts and its own pages only: no DNS rebinding, no blind posts."""

import dataclasses
import json
import socket
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from octavo.config import Config, ServingConfig, WebConfig
from octavo.errors import ConfigError
from octavo.server.http.endpoints import find_endpoints
from octavo.server.http.listener import check_web
from tests.server.fakes import Harness, keyed
from tests.server.test_run import running

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
EVIL = "https://evil.example"
PROBES = ("/livez", "/readyz", "/health")
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evil-localhost",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.example#localhost",
    "localhost/evil",
    "localhost, evil.example",
    "localhost:80:80",
    "localhost:x",
    "localhost..",
    " localhost",
    "[localhost]",
    "::1",
    "[::2]",
    "10.9.8.7",
    "127.1",
    "2130706433",
    "0x7f.0.0.1",
    "local\u017fhost",
    ".",
    ":8000",
    "",
]
OWN_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "localhost.:8000",
    "localhost:",
    "127.0.0.1",
    "127.0.0.1:1234",
    "127.9.9.9",
    "[::1]:8000",
    "[::ffff:127.0.0.1]",
    "[0:0:0:0:0:0:0:1]",
    socket.gethostname(),
]


def harness(host: str = "127.0.0.1", keys: tuple[str, ...] = (), **web: Any) -> Harness:
    serving = ServingConfig(host=host, api_key=keys, insecure=True)
    return Harness(config=Config(serving=serving, web=WebConfig(**web)))


async def status_of(server: Harness, host: str, path: str = "/v1/models", local: str = "192.0.2.7") -> int:
    """One request with this Host, over a connection to an address of this machine."""
    answers: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", host.encode())], "server": (local, 8000), "client": ("192.0.2.9", 1),
    }  # fmt: skip
    await server.app(scope, receive, send)
    return answers[0]


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
async def test_a_foreign_host_is_refused_with_the_remedy(host: str) -> None:
    server = harness()
    assert await status_of(server, host) == 403
    assert await status_of(server, host, "/nothing") == 403, "before routing"
    for path in PROBES:
        assert await status_of(server, host, path) == 200
    response = await server.get("/v1/models", headers={"host": host.encode()})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (403, "host_not_allowed", "permission_error")
    assert "--allowed-hosts" in error["message"] and "OCTAVO_API_KEY" in error["message"]
    assert not server.engine.requests


@pytest.mark.parametrize("host", OWN_HOSTS)
async def test_this_machines_own_names_are_answered(host: str) -> None:
    assert await status_of(harness(), host) == 200


async def test_the_address_that_was_connected_to_is_this_machines() -> None:
    server = harness()
    assert await status_of(server, "192.0.2.7:8000") == 200 and await status_of(server, "192.0.2.8") == 403
    assert await status_of(server, "[2001:db8::1]:8000", local="2001:db8::1") == 200
    assert await status_of(server, "[fe80::1]", local="fe80::1%eth0") == 200
    assert await status_of(server, "192.0.2.7", local="::ffff:192.0.2.7") == 200
    assert await status_of(server, "evil.example", local="evil.example") == 403, "a name is no address"
    assert await status_of(harness("me.example"), "ME.example:80") == 200, "what --host says"
    assert await status_of(harness("2001:DB8:0::9"), "[2001:db8::9]") == 200


async def test_listed_hosts_are_answered_and_a_star_switches_the_check_off() -> None:
    server = harness(allowed_hosts=("chat.example.com", "10.0.0.5", "2001:db8::5"))
    for host in ("chat.example.com", "CHAT.example.com.:443", "10.0.0.5:80", "[2001:DB8::5]", "localhost"):
        assert await status_of(server, host) == 200, host
    for host in ("example.com", "x.chat.example.com", "chat.example.com.evil.example"):
        assert await status_of(server, host) == 403, host
    assert await status_of(harness(allowed_hosts=("*",)), "evil.example") == 200
    response = await harness(allowed_hosts=("*",)).chat(headers={"origin": EVIL})
    assert response.status_code == 403, "hosts are not origins"


async def test_no_host_and_two_are_refused_and_forwarded_ones_are_not_looked_at() -> None:
    server = harness(allowed_hosts=("good.example",))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://localhost") as client:
        for headers in ([("host", "localhost"), ("host", "localhost")], [("host", "localhost"), ("host", "evil")]):
            assert (await client.get("/v1/models", headers=headers)).status_code == 403
        request = client.build_request("GET", "/v1/models")
        del request.headers["host"]
        assert (await client.send(request)).status_code == 403
    for name in ("x-forwarded-host", "x-host", "x-original-host", "x-forwarded-server", "forwarded"):
        refused = await server.get("/v1/models", headers={"host": "evil.example", name: "good.example"})
        assert refused.status_code == 403, name
        taken = await server.get("/v1/models", headers={"host": "good.example", name: "evil.example"})
        assert taken.status_code == 200, name


FOREIGN_SITES: list[dict[str, str]] = [
    {"origin": EVIL},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://localhost:3000"},
    {"origin": "http://localhost.evil.example"},
    {"origin": "http://127.0.0.1"},
    {"origin": "file://"},
    {"origin": "file://localhost"},
    {"origin": f"{EVIL}, http://localhost"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "SAME-ORIGIN"},
    {"sec-fetch-site": ""},
    {"sec-fetch-site": "none, same-origin"},
    {"sec-fetch-site": "cross-site", "origin": "http://localhost"},
    {"sec-fetch-site": "same-origin", "origin": EVIL},
    {"sec-fetch-site": "none", "origin": EVIL},
]
OWN_SITES: list[dict[str, str]] = [
    {},
    {"sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "same-origin", "origin": "http://localhost"},
    {"origin": "http://localhost"},
    {"origin": "https://LOCALHOST"},
    {"origin": "http://localhost:8000", "host": "localhost:8000"},
    {"origin": "http://[::1]:8000", "host": "[::1]:8000", "sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("headers", FOREIGN_SITES, ids=str)
async def test_another_sites_page_is_refused(headers: dict[str, str]) -> None:
    server = harness()
    for response in (await server.chat(headers=headers), await server.get("/v1/models", headers=headers)):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (403, "cross_site"), headers
        assert "--allowed-origins" in error["message"]
    assert not server.engine.requests
    for path in PROBES:
        assert (await server.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("headers", OWN_SITES, ids=str)
async def test_this_servers_own_pages_are_answered(headers: dict[str, str]) -> None:
    server = harness()
    assert (await server.chat(headers=headers)).status_code == 200
    assert (await server.get("/v1/models", headers=headers)).status_code == 200


async def test_an_address_that_was_typed_is_answered_and_posts_nothing() -> None:
    server = harness()
    typed = {"sec-fetch-site": "none", "sec-fetch-mode": "navigate", "accept": "text/html"}
    for path in ("/", "/dashboard", "/docs"):
        assert (await server.get(path, headers=typed)).status_code == 200
    assert (await server.chat(headers=typed)).status_code == 403


async def test_over_tls_a_page_without_it_is_another_origin() -> None:
    server = harness()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="https://localhost") as client:
        for origin, status in (("https://localhost", 200), ("http://localhost", 403)):
            assert (await client.get("/v1/models", headers={"origin": origin})).status_code == status


async def test_listed_origins_are_answered_wherever_they_are() -> None:
    app, plugin = "https://app.example.com", "vscode-webview://abc"
    server = harness(allowed_origins=(app, plugin))
    for origin in (app, plugin):
        for site in ("cross-site", "same-site", "none"):
            headers = {"origin": origin, "sec-fetch-site": site}
            assert (await server.chat(headers=headers)).status_code == 200, headers
    assert (await server.chat(headers={"origin": EVIL})).status_code == 403
    assert (await server.get("/v1/models", headers={"sec-fetch-site": "cross-site"})).status_code == 403, "which one?"
    preflight = {"origin": app, "access-control-request-method": "POST", "sec-fetch-site": "cross-site"}
    assert (await server.request("OPTIONS", "/v1/chat/completions", headers=preflight)).status_code == 200
    foreign = {**preflight, "host": "evil.example"}
    assert (await server.request("OPTIONS", "/v1/chat/completions", headers=foreign)).status_code == 403
    anyone = harness(allowed_origins=("*",))
    assert (await anyone.chat(headers={"origin": EVIL, "sec-fetch-site": "cross-site"})).status_code == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("text/plain;charset=UTF-8", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain; application/json", 415),
        ("application/json, text/plain", 415),
        ("application/jsonx", 415),
        ("", 415),
        (None, 415),
    ],
)
async def test_in_a_browser_only_json_types_are_json(content_type: str | None, status: int) -> None:
    declared = {} if content_type is None else {"content-type": content_type}
    for keys in ((), ("sk-right",)):
        server = harness(keys=keys)
        plain = {"authorization": "Bearer sk-right", **declared}
        for said in ({"sec-fetch-site": "same-origin"}, {"origin": "http://localhost"}):
            response = await server.request("POST", "/v1/chat/completions", content=CHAT, headers={**plain, **said})
            assert response.status_code == status, response.text
            if status == 415:
                assert response.json()["error"]["code"] == "unsupported_media_type"
        response = await server.request("POST", "/v1/chat/completions", content=CHAT, headers=plain)
        assert response.status_code == 200, "curl -d declares a form"


async def test_with_keys_the_key_decides_and_listed_hosts_still_count() -> None:
    server = Harness(config=keyed("sk-right"))
    right = {"authorization": "Bearer sk-right"}
    for headers in ({"host": "evil.example"}, {"origin": EVIL}, {"sec-fetch-site": "cross-site"}):
        assert (await server.chat(headers={**right, **headers})).status_code == 200
        assert (await server.chat(headers=headers)).status_code == 401
    listed = harness(keys=("sk-right",), allowed_hosts=("chat.example.com",))
    assert (await listed.chat(headers={**right, "host": "evil.example"})).status_code == 403
    assert (await listed.chat(headers={**right, "host": "chat.example.com", "origin": EVIL})).status_code == 200


async def test_a_probe_by_a_foreign_name_gets_the_bare_status() -> None:
    server = harness()
    assert (await server.get("/health")).json()["model"] == "tiny"
    for headers in ({"host": "evil.example"}, {"origin": EVIL}, {"sec-fetch-site": "cross-site"}):
        assert (await server.get("/health", headers=headers)).json() == {"status": "ready"}
    for path in ("/health/", "/livez/", "//livez", "/%6civez", "/login"):
        assert (await server.get(path, headers={"host": "evil.example"})).status_code == 403, path


async def test_every_html_page_keeps_out_of_frames_and_other_types() -> None:
    accept = {"accept": "text/html", "sec-fetch-site": "none"}
    pages = 0
    for server in (Harness(), Harness(config=keyed("sk-right"))):
        for path in find_endpoints().access:
            response = await server.get(path.partition("{")[0], headers=accept)
            if not response.headers.get("content-type", "").startswith("text/html"):
                continue
            pages += 1
            policy = response.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in policy and "default-src" in policy and "base-uri 'none'" in policy, path
            assert response.headers["x-content-type-options"] == "nosniff", path
            assert response.headers["referrer-policy"] == "same-origin", path
            assert response.headers["cross-origin-opener-policy"] == "same-origin", path
    assert pages == 7, "three pages, three forms in their place, the form"


@pytest.mark.parametrize(
    "name", ["", "https://a.example", "a.example:80", "a/b", "*.example.com", "[::1]", "a b", ".."]
)
def test_what_is_no_host_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-hosts is .*; give names or addresses without"):
        check_web(WebConfig(allowed_hosts=(name,)))
    check_web(WebConfig(allowed_hosts=("a.example", "localhost.", "host-1", "my_host", "::1", "10.0.0.1", "*")))


def test_on_a_real_connection_the_local_address_counts() -> None:
    """The Host is compared with the socket's own address, which no client can choose."""

    def asked(server: Any, headers: Mapping[str, str]) -> int:
        return httpx.get(server.url + "/v1/models", headers=dict(headers)).status_code

    with running(dataclasses.replace(Config(), web=WebConfig())) as server:
        assert asked(server, {}) == 200
        assert asked(server, {"host": "evil.example"}) == 403
        assert asked(server, {"host": "10.9.8.7"}) == 403
        assert asked(server, {"host": "evil.example", "x-forwarded-host": "localhost"}) == 403
