"""Fetching images: allowed hosts only, public addresses only, few redirects, bounded sizes and times."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octavo.config import MediaConfig
from octavo.errors import InvalidRequestError
from octavo.server.images import MAX_REDIRECTS, ImageFetcher, is_public

BODY = b"an image" * 100
_OK = b"HTTP/1.1 200 OK\r\n"
FIXED = {
    "/image?a=1": _OK + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY,
    "/large": _OK + b"Content-Length: 999999999\r\n\r\n",
    "/packed": _OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    "/noise": b"\x00\x01 this is not HTTP\r\n\r\n",
}


class WebServer:
    """A server on loopback whose paths behave badly."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.seen.append(head)
        path = head.split(" ")[1]
        try:
            await self.answer(path, writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def answer(self, path: str, writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\n"
        if path in FIXED:
            writer.write(FIXED[path])
        elif path == "/endless":
            writer.write(f"{head}\r\n".encode())
            for _ in range(100):
                writer.write(bytes(1000))
        elif path == "/slow":
            writer.write(f"{head}Content-Length: 50\r\n\r\n".encode())
            for _ in range(50):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.1)
        elif path == "/silent":
            await asyncio.sleep(5)
        elif path.startswith("/to="):
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {path[4:]}\r\nContent-Length: 0\r\n\r\n".encode())
        elif path.startswith("/hops/"):
            left = int(path.removeprefix("/hops/"))
            place = f"/hops/{left - 1}" if left else "/image?a=1"
            writer.write(f"HTTP/1.1 307 Go\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())
        else:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


@pytest.fixture
async def web() -> AsyncIterator[WebServer]:
    server = WebServer()
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    yield server
    listening.close()


def fetcher(port: int, **fields: Any) -> ImageFetcher:
    settings = {"allowed_media_domains": (f"127.0.0.1:{port}", f"LocalHost:{port}"), "allow_private_media": True}
    return ImageFetcher(MediaConfig(**{**settings, "media_timeout_s": 1.0, "max_media_bytes": 5000, **fields}))


async def test_an_allowed_host_is_fetched_by_its_address(web: WebServer) -> None:
    images = fetcher(web.port)
    assert await images.fetch(f"http://127.0.0.1:{web.port}/image?a=1") == BODY
    assert await images.fetch(f"HTTP://localhost:{web.port}/hops/{MAX_REDIRECTS - 1}") == BODY
    assert f"Host: 127.0.0.1:{web.port}" in web.seen[0] and "Accept-Encoding: identity" in web.seen[0]
    assert f"Host: localhost:{web.port}" in web.seen[1]
    await images.close()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/nothing", "answered 404"),
        ("/large", "more than 5000 bytes"),
        ("/endless", "more than 5000 bytes"),
        ("/packed", "compressed"),
        ("/slow", "did not arrive within 1 s"),
        ("/silent", "did not arrive within 1 s"),
        ("/noise", "cannot be fetched"),
        (f"/hops/{MAX_REDIRECTS + 1}", "redirects more than 3 times"),
        ("/to=http://169.254.169.254/latest/meta-data", "images are not fetched from 169.254.169.254"),
        ("/to=http://example.com/a.png", "images are not fetched from example.com"),
        ("/to=file:///etc/passwd", "must be a data URL, or http"),
        ("/to=gopher://127.0.0.1/", "must be a data URL, or http"),
        ("/to=http://127.0.0.1:1/a", "images are not fetched from 127.0.0.1:1"),
    ],
)
async def test_what_a_server_may_not_do(web: WebServer, path: str, why: str) -> None:
    images = fetcher(web.port)
    with pytest.raises(InvalidRequestError) as caught:
        await images.fetch(f"http://127.0.0.1:{web.port}{path}")
    assert why in str(caught.value)
    await images.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://user:x@images.test/a", "http://images.test\\@127.0.0.1/a", "http:///a", "http://images.test:x/a",
        "http://images.test/a b", "http://images.test/\x00", "ftp://images.test/a", "//images.test/a", "images.test/a",
        "http://images.test.evil.test/a", "http://evil.test/images.test", "http://images.test:8080/a",
        "http://[::1/a", "http://" + "a" * 9000, "http://xn--\udcff.test/",
    ],
)  # fmt: skip
async def test_urls_that_are_not_allowed_reach_no_resolver(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> object:
        raise AssertionError("resolved")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with pytest.raises(InvalidRequestError):
        await ImageFetcher(MediaConfig(allowed_media_domains=("images.test",))).fetch(url)


PRIVATE = [
    "127.0.0.1", "127.8.9.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "239.1.1.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1%eth0", "fc00::1",
    "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2001:db8::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
async def test_private_addresses_are_refused_also_beside_public_ones(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, 1, 6, "", (each, port)) for each in ("93.184.216.34", address)]

    assert not is_public(address)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    for allowed in ("images.test", "*"):
        with pytest.raises(InvalidRequestError, match="not public"):
            await ImageFetcher(MediaConfig(allowed_media_domains=(allowed,))).fetch("https://images.test/a.png")


async def test_literal_private_addresses_are_refused_under_a_star() -> None:
    images = ImageFetcher(MediaConfig(allowed_media_domains=("*",)))
    for host in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "localhost"):
        with pytest.raises(InvalidRequestError, match="not public"):
            await images.fetch(f"http://{host}/a.png")
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1:248:1893:25c8:1946")


async def test_a_name_is_resolved_once(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    async def resolve(host: str, port: int, **_: object) -> list[Any]:
        calls.append(host)
        return [(socket.AF_INET, 1, 6, "", ("127.0.0.1" if len(calls) == 1 else "10.255.255.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    images = fetcher(web.port, allowed_media_domains=(f"images.test:{web.port}",))
    assert await images.fetch(f"http://images.test:{web.port}/image?a=1") == BODY and calls == ["images.test"]
    await images.close()
