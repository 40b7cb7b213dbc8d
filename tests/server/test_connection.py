"""Connections that keep to no rule, over real sockets: each is cut or answered, an honest one beside it is served."""

import asyncio
import contextlib
import gc
import gzip
import json
import logging
import re
import resource
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from octavo.config import Config
from octavo.server.http.connection import CUT as CUT_KEY
from octavo.server.http.connection import BoundedConnection, connection_class
from octavo.server.http.limits import HttpLimits
from octavo.server.http.listener import new_event_loop
from tests.server.test_run import Running, running

QUICK = HttpLimits(
    head_timeout_s=0.3, body_timeout_s=0.3, body_grace_s=0.2, max_connections=8, max_pipelined=4, max_body_bytes=65_536
)
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One that outlives what each test does to it."""
    with running(config=Config(), limits=QUICK) as made:
        yield made


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def head(path: str = "/v1/chat/completions", method: str = "POST", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode()


def rest(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65_536):
            received += data
    return received


def send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # cut already
        sock.sendall(data)


def is_served(server: Running) -> bool:
    with httpx.Client(timeout=60) as client:
        chat = client.post(server.url + "/v1/chat/completions", content=BODY)
        return chat.status_code == 200 and client.get(server.url + "/livez").status_code == 200


def failures(server: Running) -> dict[str, float]:
    text = httpx.get(server.url + "/metrics").text
    found = re.findall(r'^octavo_requests_failed_total\{code="(\w+)".*\} (.*)$', text, re.MULTILINE)
    return {code: float(count) for code, count in found}


CUT = {
    "slow head": head()[:20],
    "no head": b"",
    "endless header": b"GET /livez HTTP/1.1\r\nx: " + b"y" * 200_000,
    "endless url": b"GET /" + b"y" * 200_000,
    "many headers": b"GET /livez HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(20_000)),
    "slow body": head(content_length="100") + b"{",
    "slow body that nobody reads": head("/livez", "GET", content_length="100000") + b"x",
    "slow chunks": head(transfer_encoding="chunked") + b"5\r\nab",
    "endless extension": head(transfer_encoding="chunked") + b"5;" + b"x" * 200_000,
    "endless trailers": head(transfer_encoding="chunked") + b"0\r\n" + b"x: y\r\n" * 40_000,
    "too much that nobody reads": head("/livez", "GET", content_length="90000000") + b"x" * 3_000_000,
    "chunks that nobody reads": head("/livez", "GET", transfer_encoding="chunked") + b"10000\r\n" + b"x" * 3_000_000,
}


@pytest.mark.parametrize("name", CUT)
def test_row_29_what_does_not_end_is_cut(name: str, server: Running) -> None:
    with connect(server) as sock:
        send(sock, CUT[name])
        received = rest(sock)
        assert b" 500 " not in received
        assert is_served(server)


INVALID = {
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "absurd chunk": head(transfer_encoding="chunked") + b"FFFFFFFFFFFFFFFFFF\r\nx",
    "negative chunk": head(transfer_encoding="chunked") + b"-5\r\nhello\r\n",
    "negative length": head(content_length="-1") + BODY,
    "absurd length": head(content_length="9" * 40) + BODY,
    "no length": head(content_length="ten") + BODY,
    "two lengths": head()[:-2] + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + BODY,
    "both ways": head(content_length="5", transfer_encoding="chunked") + b"0\r\n\r\n",
    "unknown way": head(transfer_encoding="zip") + BODY,
    "zero in a header": b"GET /livez HTTP/1.1\r\nx: a\x00b\r\n\r\n",
    "space in a name": b"GET /livez HTTP/1.1\r\nx y : a\r\n\r\n",
    "bare line ends": b"GET /livez HTTP/1.1\nhost: x\n x: y\r\r\n\n",
    "url of bytes": b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "wrong version": b"GET /livez HTTP/9.9\r\n\r\n",
}


@pytest.mark.parametrize("name", INVALID)
def test_row_29_what_is_no_http_is_refused(name: str, server: Running) -> None:
    with connect(server) as sock:
        send(sock, INVALID[name])
        received = rest(sock)
        assert b" 200 " not in received.split(b"\r\n")[0] and b" 500 " not in received
        if received:
            assert b" 400 " in received.split(b"\r\n")[0] and b'"error"' in received
        assert is_served(server)


def test_pipelined_requests_are_served_up_to_a_bound() -> None:
    with running(config=Config(), limits=QUICK) as server:
        with connect(server) as sock:
            send(sock, head("/livez", "GET") * 3 + head("/livez", "GET", connection="close"))
            assert rest(sock).count(b"200 OK") == 4
        with connect(server) as sock:
            send(sock, head("/livez", "GET") * 5000)
            assert rest(sock).count(b"200 OK") < 100
        assert is_served(server)


def test_a_client_that_waits_for_100_continue_gets_it_only_when_its_body_is_wanted() -> None:
    with running(config=Config(), limits=QUICK) as server:
        with connect(server) as sock:
            send(sock, head(expect="100-continue", content_length=str(len(BODY))))
            assert sock.recv(1000).startswith(b"HTTP/1.1 100 ")
            send(sock, BODY)
            assert b" 200 " in sock.recv(1000)
        with connect(server) as sock:
            send(sock, head(expect="100-continue", content_length="99999999"))
            assert b" 413 " in sock.recv(1000)


def test_a_body_of_tiny_chunks_is_honest() -> None:
    with running(config=Config(), limits=QUICK) as server, connect(server) as sock:
        long = json.dumps({"messages": [{"role": "user", "content": "x" * 3000}]}).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in long)
        send(sock, head(transfer_encoding="chunked", connection="close") + chunks + b"0\r\n\r\n")
        assert b" 200 " in rest(sock)


def until(sock: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        received += sock.recv(65_536)
    return received


def resets(sock: socket.socket) -> None:
    """Close with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_resets_and_pipelined_chats_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """uvicorn told the newest request of a connection alone that the client is gone; the older ones wrote on."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    chat = head(content_length=str(len(body))) + body
    with running(config=Config(), loop_factory=new_event_loop) as server:
        for num in (1, 2, 3, 20):
            for pause_s in (0.0, 0.001, 0.003, 0.01):
                sock = connect(server)
                send(sock, chat * num)
                time.sleep(pause_s)
                resets(sock)
        with connect(server) as sock:
            send(sock, chat * 20)
            rest(sock)
        assert is_served(server)
        deadline = time.monotonic() + 60
        while server.context.lifecycle.num_open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert server.context.lifecycle.num_open == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_connections_leave_nothing_to_the_garbage_collector() -> None:
    """Each left a cycle through its request's scope; to collect those of ten seconds took 28 ms at once."""
    with running(config=Config(), limits=QUICK, loop_factory=new_event_loop) as server:
        assert is_served(server)
        gc.collect()
        gc.disable()
        try:
            for sent in (b"", head()[:20], head(content_length="9"), head() * 20, b"garbage\r\n\r\n"):
                with connect(server) as sock:
                    send(sock, sent)
                    rest(sock)
            assert is_served(server)
            deadline = time.monotonic() + 60
            while (left := [x for x in gc.get_objects() if issubclass(type(x), BoundedConnection)]) and (
                time.monotonic() < deadline
            ):
                del left
                time.sleep(0.05)
            assert left == []
        finally:
            gc.enable()


def test_garbage_after_a_request_is_no_answer_to_it() -> None:
    """It was answered 400 in the place of the request before it, or in the midst of that one's answer."""
    with running(config=Config(), limits=QUICK) as server:
        server.engine.is_held = True
        with connect(server) as sock:
            send(sock, head(content_length=str(len(BODY))) + BODY)
            while not server.engine.requests:
                time.sleep(0.01)
            send(sock, b"garbage\r\n\r\n")
            assert rest(sock) == b""
        server.engine.is_held = False
        assert is_served(server)
    with running(limits=QUICK) as server:  # with keys, a request is answered before its body came
        with connect(server) as sock:
            send(sock, head("/livez", "GET", content_length="5"))
            until(sock, b"}")
            send(sock, b"hello" + b"garbage\r\n\r\n")
            assert b" 400 " in rest(sock), "it is the next request then"
        with connect(server) as sock:
            send(sock, head("/livez", "GET", transfer_encoding="chunked"))
            until(sock, b"}")
            send(sock, b"garbage\r\n\r\n")
            assert rest(sock) == b"", "the request was answered before"


async def test_a_request_reaches_the_application_with_its_body_and_never_when_it_is_cut() -> None:
    """What never sends its body cost as much as a request: the application was run for it, twice with its refusal."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 3000}]}).encode()
    whole = head(content_length=str(len(body))) + body
    with running(config=Config(), limits=QUICK) as server:
        opened = server.context.lifecycle.opened
        num_opened = 0

        def counted() -> Any:
            nonlocal num_opened
            num_opened += 1
            return opened()

        server.context.lifecycle.opened = counted
        for sent in (head(content_length="100"), head(content_length="100") + b"{", whole[:-1], whole * 20):
            with connect(server) as sock:
                send(sock, sent)
                rest(sock)
        assert num_opened == 0
        with connect(server) as sock:
            for at in range(0, len(whole), 1000):
                send(sock, whole[at : at + 1000])
                time.sleep(0.01)
            assert b" 200 " in sock.recv(1000)
        with connect(server) as sock:
            send(sock, whole[:-1])
            received = rest(sock)
            assert b" 408 " in received and b"body_timeout" in received
        assert num_opened == 1


def test_a_body_with_a_content_coding_is_refused_by_name() -> None:
    """It was read as if it had none: 400 invalid_json for bytes of gzip."""
    packed = gzip.compress(BODY)
    with running(config=Config()) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"):
            for coding in ("gzip", "deflate", "br", "zstd", "GZIP, identity", "x"):
                refused = client.post(path, content=packed, headers={"content-encoding": coding})
                assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "identity"), (path, coding)
                assert "Content-Encoding" in refused.text and "identity" in refused.text
        chat = client.post("/v1/chat/completions", content=BODY, headers={"content-encoding": "identity"})
        assert chat.status_code == 200
        error = client.post("/v1/chat/completions", content=packed, headers={"content-encoding": "gzip"}).json()
        assert error["error"]["code"] == "unsupported_content_encoding"


def test_refusals_of_heads_say_why() -> None:
    heads = {
        b"GET /livez HTTP/1.1\r\n\r\n": b"give one Host header, got 0",
        b"GET /livez HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n": b"give one Host header, got 2",
        head(transfer_encoding="gzip, chunked"): b"Transfer-Encoding may only be chunked",
        b"GET http://a/livez HTTP/1.1\r\nhost: b\r\n\r\n": b"names another host",
        b"GET /livez\r\n\r\n": b"HTTP/1.1",
    }
    with running(config=Config(), limits=QUICK) as server:
        for sent, reason in heads.items():
            with connect(server) as sock:
                send(sock, sent)
                received = rest(sock)
                assert b" 400 " in received and reason in received and b"connection: close" in received
        with connect(server) as sock:
            send(sock, head("/livez?next=http://elsewhere/", "GET"))
            assert b" 200 " in sock.recv(1000), "no host is named in a query"


def test_when_all_places_are_taken_the_longest_idle_one_goes() -> None:
    limits = HttpLimits(head_timeout_s=30, max_connections=4)
    with running(config=Config(), limits=limits) as server:
        idle = [connect(server) for _ in range(4)]
        time.sleep(0.1)
        assert is_served(server)
        assert idle[0].recv(10) == b"", "the first one was cut"
        idle[3].sendall(head("/livez", "GET"))
        assert b" 200 " in idle[3].recv(1000), "the last one was not"
        assert failures(server)["idle_connection"] >= 1
        for sock in idle:
            sock.close()


def test_without_keys_withheld_bodies_go_before_newer_connections() -> None:
    """Connections that had sent nothing yet were cut first, so that bodies which never came kept the newest out."""
    limits = HttpLimits(head_timeout_s=30, max_connections=4)
    with running(config=Config(), limits=limits) as server:
        held = [connect(server) for _ in range(4)]
        for sock in held:
            send(sock, head(content_length="100"))
        time.sleep(0.1)
        honest = connect(server)
        others = [connect(server) for _ in range(2)]
        time.sleep(0.1)
        send(honest, head("/livez", "GET"))
        assert b" 200 " in honest.recv(1000)
        assert [rest(sock) for sock in held[:3]] == [b""] * 3
        for sock in (*held, *others, honest):
            sock.close()


def test_when_all_places_are_at_work_the_next_connection_is_told_to_come_later() -> None:
    with running(config=Config(), limits=HttpLimits(max_connections=3)) as server:
        server.engine.is_held = True
        url = server.url + "/v1/chat/completions"
        threads = [threading.Thread(target=lambda: httpx.post(url, content=BODY, timeout=60)) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(server.engine.requests) < 3:
            time.sleep(0.01)
        with connect(server) as sock:
            received = rest(sock)
            assert b" 503 " in received and b"too_many_connections" in received and b"retry-after: 5" in received
        server.engine.is_held = False
        for request in list(server.engine.requests):
            server.loop.call_soon_threadsafe(server.engine.answer, request)
        for thread in threads:
            thread.join(60)
        assert is_served(server)


def test_connections_leave_files_to_the_rest_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_files, most in ((1024, 768), (256, 128), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, num=num_files: (num, num))
        assert connection_class(HttpLimits(), print).table.limits.max_connections == most


async def test_every_request_can_be_cut_also_one_without_headers() -> None:
    """What cuts an answer was put into the scope with each header once, so that a head without any had none."""
    seen: list[bool] = []

    async def app(scope: dict[str, Any], receive: object, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        seen.append(callable(scope.get(CUT_KEY)))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, http=connection_class(QUICK, str), ws="none", lifespan="off", log_config=None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        for head_bytes in (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.0\r\nA: b\r\nC: d\r\n\r\n"):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(head_bytes)
            assert b" 204 " in await reader.read()
            writer.close()
        server.should_exit = True
        await serving
    assert seen == [True, True]
