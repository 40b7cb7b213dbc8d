"""Fetch an image from a web server that the operator allows (--allowed-media-domains).

Owns: which URLs are fetched, resolving a name once and connecting to that address, redirects, and the bounds on size
and time. Does not: decode, or keep anything.
Invariants: no connection is opened to an address that is not public, unless the operator allows it. Each redirect is
checked as the first URL was. Nothing that a server sends is decompressed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx

from octavo.config import MediaConfig
from octavo.errors import InvalidRequestError

MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class _Target:
    """A checked URL."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The host as a Host header has it."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return shown if self.port == _PORTS[self.scheme] else f"{shown}:{self.port}"


class ImageFetcher:
    """Fetches images for one server. The client is made at the first fetch, and belongs to one event loop."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config
        self._allowed = frozenset(domain.lower() for domain in config.allowed_media_domains)
        self._client: httpx.AsyncClient | None = None

    async def fetch(self, url: str) -> bytes:
        """Return the body of a URL's answer. Raises InvalidRequestError."""
        try:
            async with asyncio.timeout(self._config.media_timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(self._read(url))
                    if isinstance(found, bytes):
                        return found
                    url = urljoin(url, found)
        except TimeoutError:
            reason = f"the image did not arrive within {self._config.media_timeout_s:g} s"
            raise InvalidRequestError(f"{reason} (--media-timeout)") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InvalidRequestError(f"the image cannot be fetched ({type(error).__name__})") from None
        raise InvalidRequestError(f"the image's URL redirects more than {MAX_REDIRECTS} times")

    def _read(self, url: str) -> _Target:
        """Return the parts of an allowed URL. Raises InvalidRequestError."""
        if len(url) > MAX_URL_CHARACTERS or _UNSAFE.search(url):
            raise InvalidRequestError("the image's URL is too long, or has spaces or other characters to escape")
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme.lower(), (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise InvalidRequestError("the image's URL is malformed") from None
        if scheme not in _PORTS or not host or parts.username is not None or parts.password is not None:
            raise InvalidRequestError("the image's URL must be a data URL, or http(s)://host/path without a password")
        try:
            host = host if ":" in host else host.encode("idna").decode("ascii").lower()
        except UnicodeError:
            raise InvalidRequestError("the image's URL has no valid host name") from None
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        target = _Target(scheme, host, port or _PORTS[scheme], path)
        is_any = "*" in self._allowed and target.port == _PORTS[scheme]
        if not is_any and target.authority not in self._allowed:
            remedy = f"send the image as a data URL, or start with --allowed-media-domains {target.authority}"
            raise InvalidRequestError(f"images are not fetched from {target.authority}; {remedy}")
        return target

    async def _address(self, target: _Target) -> str:
        """Return the address to connect to. Raises InvalidRequestError if any address of the host is not public."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise InvalidRequestError(f"{target.host} cannot be resolved") from None
        addresses = [str(entry[4][0]) for entry in found]
        if not self._config.allow_private_media and not all(map(is_public, addresses)):
            raise InvalidRequestError(f"{target.host} has an address that is not public; images are not fetched there")
        return addresses[0]

    async def _get(self, target: _Target) -> bytes | str:
        """Return the body, or the location of a redirect."""
        address = await self._address(target)
        shown = f"[{address}]" if ":" in address else address
        if self._client is None:  # without kept connections: one address may serve several names
            limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(trust_env=False, limits=limits, timeout=self._config.media_timeout_s)
        request = self._client.build_request(
            "GET",
            f"{target.scheme}://{shown}:{target.port}{target.path}",
            headers={"Host": target.authority, "Accept": "image/*", "Accept-Encoding": "identity"},
            extensions={"sni_hostname": target.host},
        )
        response = await self._client.send(request, stream=True, follow_redirects=False)
        try:
            if response.status_code in _REDIRECTS:
                return str(response.headers.get("location", ""))
            return await self._body(response)
        finally:
            await response.aclose()

    async def _body(self, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            raise InvalidRequestError(f"the image's server answered {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequestError("the image's server sent a compressed answer")
        max_bytes = self._config.max_media_bytes
        too_large = InvalidRequestError(f"the image has more than {max_bytes} bytes (--max-media-bytes)")
        length = response.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:19]) > max_bytes:
            raise too_large
        data = bytearray()
        async for part in response.aiter_raw():
            data += part
            if len(data) > max_bytes:
                raise too_large
        return bytes(data)

    async def close(self) -> None:
        """Close the client. Idempotent."""
        if self._client is not None:
            await self._client.aclose()


def is_public(text: str) -> bool:
    """Return True for an address of the public internet, also if it is inside an IPv6 address."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            address = inner
    return address.is_global and not address.is_multicast
