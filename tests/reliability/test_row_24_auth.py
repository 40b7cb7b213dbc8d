"""Row 24: nobody gets in without a key, whatever the route, the method, the header, the Host or the path's spelling."""

import hashlib
import itertools
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from octavo.config import Config, ServingConfig
from octavo.server.http.endpoints import Access, find_endpoints
from tests.reliability.scorecard import Score
from tests.server.fakes import Harness, keyed
from tests.server.test_run import running

Headers = list[tuple[bytes, bytes]]
KEY = "sk-right-and-long"
ACCESS = find_endpoints().access
METHODS = ("GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
BAD_KEYS: list[Headers] = [
    [],
    [(b"authorization", b"")],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"Bearer ")],
    [(b"authorization", b"Bearer \x00")],
    [(b"authorization", b"Bearer \xff\xfe")],
    [(b"authorization", b"Bearer " + b"A" * 8000)],
    [(b"authorization", f"Bearer {KEY}x".encode())],
    [(b"authorization", f"Bearer {KEY[:-1]}".encode())],
    [(b"authorization", f"Bearer {KEY.upper()}".encode())],
    [(b"authorization", f"Bearer {KEY} {KEY}".encode())],
    [(b"authorization", f"Bearer,{KEY}".encode())],
    [(b"authorization", f"Basic {KEY}".encode())],
    [(b"authorization", KEY.encode())],
    [(b"authorization", b"Bearer " + hashlib.sha256(KEY.encode()).hexdigest().encode())],
    [(b"authorization", b"Bearer x"), (b"authorization", f"Bearer {KEY}".encode())],
    [(b"x-api-key", f"{KEY}x".encode())],
    [(b"x-api-key", KEY.encode()), (b"x-api-key", KEY.encode())],
    [(b"x-api-key", KEY.encode()), (b"authorization", b"Bearer x")],
    [(b"cookie", f"authorization=Bearer {KEY}".encode())],
    [(b"proxy-authorization", f"Bearer {KEY}".encode())],
    [(b"cookie", f"octavo-session={KEY}; octavo-signed-in=1".encode()), (b"sec-fetch-site", b"same-origin")],
    [(b"cookie", b"__Host-octavo-session-80=" + hashlib.sha256(KEY.encode()).hexdigest().encode())],
]
HOSTS: list[Headers] = [
    [],
    [(b"host", b"localhost")],
    [(b"host", b"127.0.0.1/livez")],
    [(b"host", b"x/livez?")],
    [(b"host", b"a"), (b"host", b"b")],
    [(b"host", b"\xff\x00")],
    [(b"x-forwarded-for", b"127.0.0.1"), (b"x-forwarded-prefix", b"/livez"), (b"x-real-ip", b"::1")],
    [(b"x-original-url", b"/livez"), (b"x-rewrite-url", b"/livez"), (b"x-http-method-override", b"GET")],
]
SPELLINGS = [
    "/livez/../{}", "//{}", "/{}/", "/{}//", "/./{}", "/%2e/{}", "/livez%2f..%2f{}", "/livez;/{}", "/{};x=/livez",
    "/{}%00", "/{}?/livez", "/{}#/livez", "/{}%3f", "/LIVEZ/../{}", "/readyz/%2e%2e/{}", "http://x/{}", "/\\{}",
]  # fmt: skip
ODD = [
    "", "*", "/", "//", "livez", "/livez/", "//livez", "/livez%20", "/livez%00", "/%6civez", "/LIVEZ", "/livez;",
    "/readyz/x", "/livez/..", "/readyz%2f", "/nothing", "/v1", "/static/../livez", "/.well-known/x", "/admin", "/debug",
]  # fmt: skip


def concrete(path: str) -> str:
    return path.replace("{model_id:path}", "tiny").replace("{request_id}", "r")


def harness(tmp_path: Path) -> Harness:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: [{{name: a, key: {KEY}, metrics: true}}]")
    path.chmod(0o600)
    return Harness(config=Config(serving=ServingConfig(api_key=("sk-other",), api_key_file=str(path))))


async def status_of(app: Any, method: str, path: str, headers: Headers, root: str = "") -> int:
    """One request as an HTTP server would hand it over, in a spelling that a client library would not send."""
    raw, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(raw), "raw_path": raw.encode(), "query_string": query.encode(), "root_path": root,
        "headers": headers, "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip
    statuses: list[int] = []
    sent = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> Any:
        return next(sent, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    assert len(statuses) == 1
    return statuses[0]


async def test_row_24_nobody_gets_in_without_a_key(tmp_path: Path, score: Score) -> None:
    played = harness(tmp_path)
    routes = [concrete(path) for path, access in ACCESS.items() if access is Access.KEY]
    paths = [*routes, *(spelling.format(route[1:]) for spelling in SPELLINGS for route in routes), *ODD]
    asked: Iterable[tuple[str, str, Headers, Headers]] = itertools.product(METHODS, paths, BAD_KEYS, HOSTS)
    if score.dose(True, False):  # some of each on every spelling, all of each on every route
        asked = [
            (method, path, key, host)
            for number, path in enumerate(paths)
            for method, key, host in zip(METHODS, BAD_KEYS[number % 9 :], itertools.cycle(HOSTS), strict=False)
        ]
        asked += itertools.product(METHODS[:3], routes, BAD_KEYS, HOSTS[:1])
        asked += itertools.product(["POST"], routes, BAD_KEYS[:1], HOSTS)
    num_asked = 0
    let_in = others = 0
    for method, path, key, host in asked:
        status = await status_of(played.app, method, path, [*key, *host])
        num_asked += 1
        let_in += 200 <= status < 300
        others += status not in (401, 429, 431)
    score.tell("requests", num_asked)
    score.count("unauthenticated 2xx", let_in)
    score.count("answers other than 401, 429 and 431", others)
    score.count("requests that reached the engine", len(played.engine.requests))
    roots = [await status_of(played.app, "GET", path, [], root) for path in routes for root in ("/livez", "/v1", "/")]
    score.count("accepted by a root path", sum(status != 401 for status in roots))


async def test_row_24_the_open_routes_and_the_right_key_do_get_in(tmp_path: Path, score: Score) -> None:
    played = harness(tmp_path)
    right = [(b"authorization", f"Bearer {KEY}".encode())]
    opened = [await status_of(played.app, "GET", path, []) for path in ("/livez", "/readyz", "/health")]
    keyed = [await status_of(played.app, "GET", path, right) for path in ("/health", "/metrics", "/docs", "/v1/models")]
    score.share("open routes and the right key answer 200", [*opened, *keyed].count(200), 7)


def undeclared(app: Starlette) -> list[str]:
    """Paths of the application's routes, mounts included, that no endpoint declares."""
    return [path for path in paths_of(app.routes) if path not in ACCESS]


def paths_of(routes: Iterable[Any], prefix: str = "") -> Iterator[str]:
    for route in routes:
        path = prefix + getattr(route, "path", repr(route))
        inner = getattr(route, "routes", None)
        if inner:
            yield from paths_of(inner, path)
        else:
            yield path


def test_row_24_every_route_that_is_served_is_declared(tmp_path: Path, score: Score) -> None:
    """By the route tables that are served with and without keys."""
    tables = [harness(tmp_path).app, Harness().app]
    served = [set(paths_of(app.routes)) for app in tables]
    score.share("endpoints that are served", min(len(ACCESS.keys() & paths) for paths in served), len(ACCESS))
    score.count("routes served that no endpoint declares", len({path for app in tables for path in undeclared(app)}))


async def test_row_24_an_undeclared_route_is_counted_and_needs_a_key(tmp_path: Path) -> None:
    async def page(request: Request) -> Response:
        return Response()

    planted = harness(tmp_path)
    planted.app.add_route("/v1/new", page)
    assert undeclared(planted.app) == ["/v1/new"]
    assert await status_of(planted.app, "GET", "/v1/new", []) == 401


HEAD = b" HTTP/1.1\r\nhost: x\r\n"
# Bytes as sent, and how many 200 may come back: the open routes are open.
RAW: list[tuple[bytes, int]] = [
    (b"GET /livez" + HEAD + b"\r\n", 1),
    (b"GET /livez" + HEAD + b"\r\nGET /v1/models" + HEAD + b"connection: close\r\n\r\n", 1),
    (b"GET /livez" + HEAD + b"content-length: 40\r\n\r\nGET /v1/models" + HEAD + b"\r\n", 1),
    (b"POST /livez" + HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\nGET /v1" + HEAD, 0),
    (b"GET http://localhost/v1/models" + HEAD + b"\r\n", 0),
    (b"GET http://localhost/livez/../v1/models" + HEAD + b"\r\n", 0),
    (b"GET /v1/models HTTP/1.0\r\n\r\n", 0),
    (b"GET /v1/models HTTP/1.1\r\n\r\n", 0),
    (b"GET /v1/models" + HEAD + b"host: y\r\nhost: localhost\r\n\r\n", 0),
    (b"GET /v1/models" + HEAD + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n", 0),
    (b"GET /v1/models" + HEAD + b"connection: upgrade\r\nupgrade: h2c\r\nhttp2-settings: AAAA\r\n\r\n", 0),
    (b"GET /v1/models" + HEAD + b"authorization: Bearer\r\n " + KEY.encode() + b"x\r\n\r\n", 0),
    (b"GET\t/v1/models" + HEAD + b"\r\n", 0),
    (b"GET /v1/models?x=/livez" + HEAD + b"\r\n", 0),
    (b"GET /v1/models#/livez" + HEAD + b"\r\n", 0),
    (b"GET /livez\x00/v1/models" + HEAD + b"\r\n", 0),
    (b"CONNECT /v1/models" + HEAD + b"\r\n", 0),
    (b"OPTIONS *" + HEAD + b"\r\n", 0),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 0),
]  # fmt: skip


def exchange(port: int, data: bytes) -> bytes:
    """Send bytes and read until the server is silent or gone."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        connection.settimeout(0.25)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except (TimeoutError, ConnectionError):
            pass
    return found


def test_row_24_nothing_on_the_wire_gets_in_either(score: Score) -> None:
    with running(keyed(KEY)) as server:
        port, beyond = int(server.url.rpartition(":")[2]), 0
        for data, allowed in RAW:
            answered = [int(code) for code in re.findall(rb"HTTP/1\.[01] (\d{3})", exchange(port, data))]
            let_in = sum(200 <= code < 300 for code in answered) + answered.count(101)
            beyond += max(0, let_in - allowed)
        reached = len(server.engine.requests)
    score.tell("crafted exchanges", len(RAW))
    score.count("accepted by crafted bytes", beyond + reached)
