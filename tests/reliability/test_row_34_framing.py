"""Row 34: requests that two programs on the way could read in two ways are refused, and no body is ever read as a head.

Every exchange is sent whole, in its parts with a pause between them, and byte by byte.
"""

import contextlib
import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reliability.hostile_clients import CHAT, PATH
from tests.reliability.lag_api import Api, watched_api
from tests.reliability.scorecard import Score

KEY = "sk-row-34"
BEARER = b"Authorization: Bearer %b\r\n" % KEY.encode()
HOST = b"Host: localhost\r\n"
BODY = json.dumps(CHAT).encode()
HIDDEN = b"GET /v1/models HTTP/1.1\r\n" + HOST + BEARER + b"\r\n"  # a body that would be answered as a request
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
Parts = tuple[bytes, ...]


def length(body: bytes = BODY) -> bytes:
    return b"Content-Length: %d\r\n" % len(body)


def head(fields: bytes, *, host: bytes = HOST, version: bytes = b"1.1", url: bytes = PATH.encode()) -> bytes:
    """The head of a POST that comes with the key."""
    return b"POST %b HTTP/%b\r\n%b%b%b\r\n" % (url, version, host, BEARER, fields)


def chunks(body: bytes = BODY, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"%x\r\n%b\r\n%b" % (len(body), body, end)


# Taken like any other request, and answered once: by 200 for a chat, by 400 where the body is `HIDDEN`.
TAKEN: dict[str, tuple[Parts, int]] = {
    "a chat": ((head(length()), BODY), 200),
    "a chat in chunks": ((head(CHUNKED), chunks()), 200),
    "h2c": ((head(H2C + length()), BODY), 200),
    "h2c, in chunks": ((head(H2C + CHUNKED), chunks()), 200),
    "h2c, hidden request": ((head(H2C + length(HIDDEN)), HIDDEN), 400),
    "h2c, hidden request in chunks": ((head(H2C + CHUNKED), chunks(HIDDEN)), 400),
    "h2c, in HTTP/1.0": ((head(H2C + length(), version=b"1.0"), BODY), 200),
    "websocket": ((head(WEBSOCKET + length()), BODY), 200),
    "websocket, hidden request": ((head(WEBSOCKET.lower() + length(HIDDEN)), HIDDEN), 400),
    "another protocol": ((head(b"Connection: close, Upgrade\r\nUpgrade: TLS/1.2\r\n" + length(HIDDEN)), HIDDEN), 400),
    "trailers": ((head(CHUNKED), chunks(end=b"0\r\nx-y: z\r\nAuthorization: Bearer other\r\n\r\n")), 200),
    "the URL's own host": ((head(length(), url=b"http://localhost" + PATH.encode()), BODY), 200),
    "HTTP/1.0 without a Host": ((head(length(), host=b"", version=b"1.0"), BODY), 200),
}  # fmt: skip
# No key came in the head, so none came.
NOT_LET_IN: dict[str, Parts] = {
    "key as a trailer": (head(CHUNKED).replace(BEARER, b""), chunks(end=b"0\r\n" + BEARER + b"\r\n")),
    "key as a trailer, in the same segment": (
        head(CHUNKED).replace(BEARER, b"") + chunks(end=b"0\r\nx-api-key: " + KEY.encode() + b"\r\n\r\n"),
    ),
    "key in a chunk's extension": (head(CHUNKED).replace(BEARER, b""), b"1;" + BEARER + b"{\r\n0\r\n\r\n"),
    "key in a body that is read as a head": (head(H2C + length(HIDDEN)).replace(BEARER, b""), HIDDEN),
}
REFUSED: dict[str, Parts] = {
    "no Host": (head(length(), host=b""), BODY),
    "two Hosts": (head(length(), host=HOST + b"Host: other\r\n"), BODY),
    "the same Host twice": (head(length(), host=HOST * 2), BODY),
    "a Host with a blank": (head(length(), host=b"Host: a b\r\n"), BODY),
    "a Host with a path": (head(length(), host=b"Host: localhost/livez\r\n"), BODY),
    "another host in the URL": (head(length(), url=b"http://other" + PATH.encode()), BODY),
    "HTTP/0.9": (b"GET /v1/models\r\n\r\n",),
    "HTTP/1.2": (head(length(), version=b"1.2"), BODY),
    "HTTP/2.0": (head(length(), version=b"2.0"), BODY),
    "chunked under HTTP/1.0": (head(CHUNKED, version=b"1.0"), chunks()),
    "gzip, chunked": (head(b"Transfer-Encoding: gzip, chunked\r\n"), chunks()),
    "chunked, gzip": (head(b"Transfer-Encoding: chunked, gzip\r\n"), chunks()),
    "gzip, then chunked": (head(b"Transfer-Encoding: gzip\r\n" + CHUNKED), chunks()),
    "chunked twice": (head(CHUNKED * 2), chunks()),
    "chunked, chunked": (head(b"Transfer-Encoding: chunked, chunked\r\n"), chunks()),
    "chunked, identity": (head(b"Transfer-Encoding: chunked, identity\r\n"), b"0\r\n\r\n" + HIDDEN),
    "identity": (head(b"Transfer-Encoding: identity\r\n" + length()), BODY),
    "xchunked": (head(b"Transfer-Encoding: xchunked\r\n"), b"0\r\n\r\n" + HIDDEN),
    "chunked behind a vertical tab": (head(b"Transfer-Encoding: \x0bchunked\r\n"), b"0\r\n\r\n" + HIDDEN),
    "chunked in quotes": (head(b'Transfer-Encoding: "chunked"\r\n'), b"0\r\n\r\n" + HIDDEN),
    "a blank before the colon": (head(b"Transfer-Encoding : chunked\r\n" + length()), b"0\r\n\r\n" + HIDDEN),
    "length, chunked": (head(length() + CHUNKED), b"0\r\n\r\n" + HIDDEN),
    "chunked, length": (head(CHUNKED + length()), b"0\r\n\r\n" + HIDDEN),
    "h2c, length and chunked": (head(H2C + length() + CHUNKED), b"0\r\n\r\n" + HIDDEN),
    "h2c, gzip, chunked": (head(H2C + b"Transfer-Encoding: gzip, chunked\r\n"), chunks()),
    "h2c, two Hosts": (head(H2C + length(), host=HOST * 2), BODY),
    "two lengths": (head(length() + b"Content-Length: 0\r\n"), BODY + HIDDEN),
    "the same length twice": (head(length() * 2), BODY),
    "a list of lengths": (head(b"Content-Length: 5, 5\r\n"), b"hello"),
    "+5": (head(b"Content-Length: +5\r\n"), b"hello"),
    "0x5": (head(b"Content-Length: 0x5\r\n"), b"hello"),
    "5_0": (head(b"Content-Length: 5_0\r\n"), b"hello" * 10),
    "-5": (head(b"Content-Length: -5\r\n"), HIDDEN),
    "a length beyond 64 bits": (head(b"Content-Length: 18446744073709551617\r\n"), b"{" + HIDDEN),
    "a folded header": (head(b"X: a\r\n Content-Length: 0\r\n" + length()), BODY),
    "bare line feeds": (head(length()).replace(b"\r\n", b"\n"), BODY),
    "a bare carriage return": (head(b"X: a\rContent-Length: 0\r\n" + length()), BODY),
    "a NUL": (head(b"X: a\x00b\r\n" + length()), BODY),
    "chunks with bare line feeds": (head(CHUNKED), b"5\nhello\n0\n\n"),
    "an extension with a bare line feed": (head(CHUNKED), b"5;a\nhello\r\n0\r\n\r\n"),
    "a chunk of 0x5": (head(CHUNKED), b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk of -5": (head(CHUNKED), b"-5\r\nhello\r\n0\r\n\r\n"),
    "a chunk beyond 64 bits": (head(CHUNKED), b"10000000000000005\r\nhello\r\n0\r\n\r\n"),
    "a chunk without its line end": (head(CHUNKED), b"5\r\nhelloXX0\r\n\r\n" + HIDDEN),
    "a chunk longer than it says": (head(CHUNKED), b"1\r\nhello\r\n0\r\n\r\n"),
    "CONNECT": (b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + BEARER + b"\r\n", HIDDEN),
    "CONNECT to a path": (b"CONNECT /v1/models HTTP/1.1\r\n" + HOST + BEARER + b"\r\n", HIDDEN),
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,),
}
# As curl 7.88 and the HttpClient of Java 17 send them, the latter in two segments.
CURL = (
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:9401\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    b"Authorization: Bearer %b\r\nContent-Length: %d\r\nContent-Type: application/x-www-form-urlencoded\r\n\r\n"
) % (PATH.encode(), KEY.encode(), len(BODY))
JAVA = (
    b"POST %b HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\nHost: 127.0.0.1:9555\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/17.0.15\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n\r\n"
) % (PATH.encode(), len(BODY), KEY.encode())
JAVA_SOURCE = """
import java.net.URI;
import java.net.http.*;

public class Ask {
    public static void main(String[] words) throws Exception {
        var client = HttpClient.newHttpClient();
        for (int i = 0; i < 2; i++) {
            var request = HttpRequest.newBuilder(URI.create(words[0])).header("Authorization", "Bearer " + words[1])
                .POST(HttpRequest.BodyPublishers.ofString(words[2])).build();
            System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).statusCode());
        }
    }
}
"""


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    limits = {"head_timeout_s": 1.0, "body_timeout_s": 1.0, "body_grace_s": 0.5, "unauthenticated_body_timeout_s": 1.0}
    with watched_api(limits, api_key=[KEY]) as made:
        yield made


def exchange(port: int, parts: Parts, pause_s: float) -> tuple[list[int], bool]:
    """Send the parts with pauses; the statuses of all answers, and whether the server closed."""
    found, is_closed = b"", False
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for number, part in enumerate(parts):
                if number:
                    connection.settimeout(max(pause_s, 1e-4))
                    with contextlib.suppress(TimeoutError):
                        found += connection.recv(65_536)
                connection.settimeout(5)
                connection.sendall(part)
            connection.settimeout(0.25)
            while data := connection.recv(65_536):
                found += data
            is_closed = True
        except TimeoutError:
            pass
        except ConnectionError:
            is_closed = True
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", found)], is_closed


def spellings(parts: Parts, every: bool) -> Iterator[tuple[Parts, float]]:
    """The same bytes: whole, in parts, byte by byte."""
    yield (b"".join(parts),), 0.0
    yield parts, 0.3
    if every:
        whole = b"".join(parts)
        yield tuple(whole[at : at + 1] for at in range(len(whole))), 0.0


@pytest.mark.timeout(600)
def test_row_34_what_can_be_read_in_two_ways_is_refused(api: Api, score: Score) -> None:
    every = score.dose(False, True)
    let_in: list[str] = []
    left_open: list[str] = []
    num = 0
    for name, parts in REFUSED.items():
        for sent, pause_s in spellings(parts, every):
            statuses, is_closed = exchange(api.port, sent, pause_s)
            num += 1
            if any(status < 400 for status in statuses) or len(statuses) > 1:
                let_in.append(f"{name}: {statuses}")
            if not is_closed or statuses not in ([400], []):
                left_open.append(f"{name}: {statuses}, {is_closed}")
    score.tell("crafted exchanges", num)
    score.count(f"let in {let_in or ''}".strip(), len(let_in))
    score.count(f"not refused and closed {left_open or ''}".strip(), len(left_open))


@pytest.mark.timeout(600)
def test_row_34_bodies_are_never_requests_and_upgrades_are_ignored(api: Api, score: Score) -> None:
    every = score.dose(False, True)
    wrong: list[str] = []
    for name, (parts, status) in TAKEN.items():
        for sent, pause_s in spellings(parts, every):
            statuses, _ = exchange(api.port, sent, pause_s)
            if statuses != [status]:
                wrong.append(f"{name}: {statuses}")
    num_let_in = 0
    for name, parts in NOT_LET_IN.items():
        for sent, pause_s in spellings(parts, every):
            statuses, _ = exchange(api.port, sent, pause_s)
            num_let_in += any(status < 400 for status in statuses)
            if len(statuses) > 1:
                wrong.append(f"{name}: {statuses}")
    score.count(f"bodies parsed as requests, or requests not served {wrong or ''}".strip(), len(wrong))
    score.count("accepted without a key in the head", num_let_in)


@pytest.mark.timeout(120)
def test_row_34_an_upgrade_between_other_requests_changes_nothing_for_them(api: Api, score: Score) -> None:
    """On one connection, in one segment and in many: each is answered once, in order."""
    livez = b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n"
    whole = livez + head(H2C + length(HIDDEN)) + HIDDEN + head(H2C + length()) + BODY + livez
    cuts = range(1, len(whole), score.dose(97, 7))
    found = [exchange(api.port, (whole[:at], whole[at:]), 0.02)[0] for at in cuts]
    score.share("pipelines answered 200, 400, 200, 200", found.count([200, 400, 200, 200]), len(found))


@pytest.mark.timeout(120)
def test_row_34_clients_that_ask_for_h2c_are_served(api: Api, score: Score, tmp_path: Path) -> None:
    replayed = [exchange(api.port, (CURL + BODY,), 0.0), exchange(api.port, (JAVA, BODY), 0.3)]
    statuses = [status for found, _ in replayed for status in found]
    url = f"http://127.0.0.1:{api.port}{PATH}"
    commands = []
    if shutil.which("curl"):
        words = ["curl", "-s", "-m", "5", "-o", str(tmp_path / "answer"), "-w", "%{http_code} ", "--http2"]
        commands += [[*words, "-H", f"Authorization: Bearer {KEY}", "-d", BODY.decode(), url]] * 2
    if shutil.which("java"):
        (tmp_path / "Ask.java").write_text(JAVA_SOURCE)
        commands.append(["java", str(tmp_path / "Ask.java"), url, KEY, BODY.decode()])
    for command in commands:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        statuses += map(int, told.split())
    score.share("requests of curl --http2 and Java's HttpClient served", statuses.count(200), len(statuses))
    score.least("such requests", len(statuses), 2)
