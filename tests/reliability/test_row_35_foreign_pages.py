"""Row 35: a server without keys answers no foreign Host, Origin or site, whatever the route, method or spelling."""

import itertools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from octavo.config import BatchConfig, Config, WebConfig
from octavo.server.http.endpoints import find_endpoints
from tests.reliability.scorecard import Score
from tests.reliability.test_row_24_auth import METHODS, ODD, SPELLINGS, exchange
from tests.server.fakes import Harness
from tests.server.test_run import running

Headers = list[tuple[bytes, bytes]]
OWN = (b"host", b"localhost:8000")
EVIL = (b"origin", b"https://evil.example")
HOSTS: list[Headers] = [
    [],
    [(b"host", b"evil.example")],
    *(
        [(b"host", host)]
        for host in (
            b"evil.example:8000", b"", b".", b"localhost.evil.example", b"evil.example.", b"127.0.0.1.evil.example",
            b"127.0.0.1@evil.example", b"10.9.8.7", b"[::2]", b"127.1", b"2130706433", b"localhost, evil.example",
            b"local\xffhost", b"localhost\x00", b"localhost/evil", b"[localhost]", b"::1",
        )
    ),
    [OWN, OWN],
    [OWN, (b"host", b"evil.example")],
    [(b"host", b"evil.example"), (b"x-forwarded-host", b"localhost"), (b"forwarded", b"host=localhost")],
    [(b"host", b"evil.example"), (b"origin", b"http://evil.example"), (b"sec-fetch-site", b"same-origin")],
]  # fmt: skip
SITES: list[Headers] = [
    [OWN, EVIL],
    [OWN, (b"origin", b"null")],
    [OWN, (b"origin", b"")],
    [OWN, (b"origin", b"http://localhost:3000")],
    [OWN, (b"origin", b"http://127.0.0.1:8000")],
    [OWN, (b"origin", b"file://localhost:8000")],
    [OWN, EVIL, (b"origin", b"http://localhost:8000")],
    [OWN, (b"sec-fetch-site", b"cross-site")],
    [OWN, (b"sec-fetch-site", b"same-site")],
    [OWN, (b"sec-fetch-site", b"")],
    [OWN, (b"sec-fetch-site", b"same-origin"), (b"sec-fetch-site", b"cross-site")],
    [OWN, (b"sec-fetch-site", b"same-origin"), EVIL],
    [OWN, (b"sec-fetch-site", b"none"), EVIL],
    [OWN, EVIL, (b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"content-type")],
    [OWN, EVIL, (b"content-type", b"text/plain")],
    [OWN, EVIL, (b"authorization", b"Bearer x"), (b"cookie", b"octavo-session=x")],
]  # fmt: skip
BARE = {"/livez": {"status": "alive"}, "/readyz": {"status": "ready"}, "/health": {"status": "ready"}}


def concrete(path: str) -> str:
    return re.sub(r"\{.*?\}", "x", path)


async def answer_of(app: Any, method: str, path: str, headers: Headers) -> tuple[int, bytes]:
    raw, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(raw), "raw_path": raw.encode(), "query_string": query.encode(), "root_path": "",
        "headers": headers, "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1),
    }  # fmt: skip
    status, body = 0, b""
    sent = iter([{"type": "http.request", "body": b'{"prompt": "hi", "model": "tiny"}', "more_body": False}])

    async def receive() -> Any:
        return next(sent, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        nonlocal status, body
        if message["type"] == "http.response.start":
            status = message["status"]
        body += message.get("body", b"")

    await app(scope, receive, send)
    return status, body


def is_answered(method: str, path: str, status: int, body: bytes) -> bool:
    """Whether a request got more than a refusal, or than a probe's bare status."""
    bare = BARE.get(path.partition("?")[0])
    if bare is None or status in (204, 403):
        return status != 403
    if method == "OPTIONS" and (status, body) == (400, b"Disallowed CORS origin"):
        return False  # a preflight's refusal, where other origins are allowed; probes have no other check of origins
    return status != 405 and not (method in ("GET", "HEAD") and json.loads(body) == bare)


async def test_row_35_foreign_hosts_and_pages_are_answered_nothing(tmp_path: Path, score: Score) -> None:
    """By the route table that is served, with files and batches on; and with origins and hosts of others allowed."""
    listed = WebConfig(allowed_hosts=("chat.example.com",), allowed_origins=("https://app.example.com",))
    served = [
        Harness(config=Config(batch=BatchConfig(batch_dir=str(tmp_path / name)), web=web))
        for name, web in (("plain", WebConfig()), ("listed", listed))
    ]
    routes = sorted({concrete(route.path) for route in served[0].app.routes})  # type: ignore[attr-defined]
    paths = [*routes, *(spelling.format(route[1:]) for spelling in SPELLINGS for route in routes), *ODD]
    foreign = [*HOSTS, *SITES]
    methods, per_path = score.dose((("GET", "POST"), 1), (METHODS, len(METHODS)))
    asked = itertools.chain(
        itertools.product(methods, routes, foreign),
        (
            (METHODS[number % len(METHODS)], path, foreign[number % len(foreign)])
            for number, path in enumerate(path for path in paths for _ in range(per_path))
        ),
    )
    num_asked = num_answered = 0
    for method, path, headers in asked:
        for harness in served:
            status, body = await answer_of(harness.app, method, path, headers)
            num_asked += 1
            num_answered += is_answered(method, path, status, body)
    score.tell("requests", num_asked)
    score.tell("routes", len(routes))
    score.share("routes with a policy that were requested", len(routes), len(find_endpoints().access))
    score.count("answered", num_answered)
    score.count("requests that reached the engine", sum(len(harness.engine.requests) for harness in served))


async def test_row_35_own_hosts_and_pages_and_programs_are_answered(score: Score) -> None:
    typed, page = (b"sec-fetch-site", b"none"), (b"sec-fetch-site", b"same-origin")
    asked: list[tuple[str, str, Headers]] = [
        ("GET", "/", [OWN, typed]),
        ("GET", "/dashboard", [(b"host", b"127.0.0.1:8000"), page]),
        ("GET", "/static/chat.js", [(b"host", b"[::1]:8000"), page]),
        ("GET", "/v1/models", [(b"host", b"LOCALHOST.:8000")]),
        ("POST", "/v1/completions", [OWN, (b"content-type", b"application/x-www-form-urlencoded")]),
        (
            "POST",
            "/v1/completions",
            [OWN, page, (b"origin", b"http://localhost:8000"), (b"content-type", b"application/json")],
        ),
    ]
    harness = Harness()
    statuses = [(await answer_of(harness.app, *request))[0] for request in asked]
    score.share("own pages, own names and a bare curl -d are answered 200", statuses.count(200), len(asked))


def test_row_35_nothing_on_the_wire_is_answered_either(score: Score) -> None:
    with running(Config()) as server:
        port, num_asked, num_answered = int(server.url.rpartition(":")[2]), 0, 0
        own = b"localhost:%d" % port
        for headers in [*HOSTS, *SITES]:
            lines = b"".join(b"%b: %b\r\n" % (name, own if (name, value) == OWN else value) for name, value in headers)
            for request in (
                b"GET /v1/models HTTP/1.1\r\n%bconnection: close\r\n\r\n" % lines,
                b'POST /v1/completions HTTP/1.1\r\n%bcontent-length: 16\r\n\r\n{"prompt": "hi"}' % lines,
            ):
                codes = [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3})", exchange(port, request))]
                num_asked += 1
                num_answered += any(code not in (400, 403) for code in codes)
        reached = len(server.engine.requests)
        honest = exchange(port, b"GET /v1/models HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % own)
    score.tell("exchanges", num_asked)
    score.count("answered on the wire", num_answered + reached)
    score.share("the valid exchange among them", int(b" 200 " in honest), 1)
