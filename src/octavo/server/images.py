"""From the images of a request to MediaItems: data URLs are decoded, other URLs fetched, and all are processed.

Owns: the number of images, the bound on bytes, and the items of the last data URLs; which URLs are fetched
(--allowed-media-domains), resolving a name once and connecting to that address, redirects, and the bounds on time.
Does not: decode and process (a process of the sandbox does).
Invariants: no connection is opened to an address that is not public, unless the operator allows it. Each redirect is
checked as the first URL was. Nothing that a web server sends is decompressed.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import importlib.util
import ipaddress
import json
import re
import socket
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

import httpx
import msgspec

from octavo.config import MediaConfig
from octavo.errors import ConfigError, InvalidRequestError, OctavoError, RequestError
from octavo.media.item import MediaItem
from octavo.sandbox.pool import Sandbox, SandboxLimits
from octavo.sandbox.wire import PROCESS_IMAGE, ProcessImage
from octavo.server.http.body import off_loop
from octavo.server.http.errors import bad_field, from_exception

if TYPE_CHECKING:
    from octavo.artifacts.vision_spec import VisionSpec

COMMAND = (sys.executable, "-m", "octavo.sandbox.media_child")
PROCESS_LIMIT_S = 10.0
MAX_KEPT_BYTES = 64 << 20  # of items of data URLs: a conversation sends its images again with each turn
_DATA = re.compile(r"data:[^,]{0,256};base64,", re.IGNORECASE)
_NUM_AT_ONCE = 8
_WHITESPACE = str.maketrans("", "", " \t\r\n")
MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\]")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def read_image_limit(text: str) -> int:
    """Return the most images of a request, from --limit-mm-per-prompt in vLLM's forms. Raises ConfigError."""
    value: object = None
    try:
        if text.lstrip().startswith("{"):
            given = json.loads(text)
            value = given.get("image") if given.keys() == {"image"} else None
        elif text.startswith("image="):
            value = int(text.removeprefix("image="))
    except ValueError:
        value = None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1024:
        raise ConfigError(f"limit-mm-per-prompt is {text!r}; give image=N with 0 to 1024")
    return value


class ImageReader:
    """Reads images for all models of one server."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config
        self._max_images = read_image_limit(config.limit_mm_per_prompt)
        self._fetcher = ImageFetcher(config)
        self._sandbox = Sandbox(SandboxLimits(job_s=PROCESS_LIMIT_S), COMMAND)
        self._at_once = asyncio.Semaphore(_NUM_AT_ONCE)
        self._kept: OrderedDict[bytes, list[MediaItem]] = OrderedDict()
        self._kept_bytes = 0

    async def read(self, urls: Sequence[tuple[str, str]], vision: VisionSpec) -> list[list[MediaItem]]:
        """Return the items of each image; `urls` has each image's field, and its URL. Raises ApiError."""
        if len(urls) > self._max_images:
            message = f"the request has {len(urls)} images; at most {self._max_images} are allowed"
            raise bad_field(urls[self._max_images][0], f"{message} (--limit-mm-per-prompt)")
        if importlib.util.find_spec("PIL") is None:
            raise bad_field(urls[0][0], "this server cannot decode images: install octavo[vision]", "unsupported_field")
        first = {url: where for where, url in reversed(urls)}
        tasks = {url: asyncio.ensure_future(self._one(where, url, vision)) for url, where in first.items()}
        try:
            return [await tasks[url] for _, url in urls]
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _one(self, where: str, url: str, vision: VisionSpec) -> list[MediaItem]:
        async with self._at_once:
            try:
                is_data = url[:5].lower() == "data:"
                if not is_data:
                    return await self._process(await self._fetcher.fetch(url), vision)
                key = await off_loop(lambda: _key_of(url, vision), len(url))
                if key in self._kept:
                    self._kept.move_to_end(key)
                else:
                    self._keep(key, await self._process(await off_loop(lambda: self._decoded(url), len(url)), vision))
                return self._kept[key]
            except RequestError as error:
                message = str(error)
                raise from_exception(type(error)(f"{where}: {message}", where)) from None
            except OctavoError as error:
                raise from_exception(error) from None

    def _decoded(self, url: str) -> bytes:
        """Return the bytes of a data URL. Raises InvalidRequestError."""
        head = _DATA.match(url)
        if head is None:
            raise InvalidRequestError("a data URL must be base64, such as data:image/png;base64,iVBORw0...")
        max_bytes = self._config.max_media_bytes
        if (len(url) - head.end()) * 3 // 4 > max_bytes + 2:
            raise InvalidRequestError(f"the image has more than {max_bytes} bytes (--max-media-bytes)")
        try:
            return base64.b64decode(url[head.end() :].translate(_WHITESPACE), validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequestError(f"the image is not base64 ({error})") from None

    async def _process(self, data: bytes, vision: VisionSpec) -> list[MediaItem]:
        """Decode and process a file in a sandbox process. Raises RequestError."""
        order = ProcessImage(data, vision, self._config.max_media_pixels)
        return msgspec.convert(await self._sandbox.run(PROCESS_IMAGE, order), list[MediaItem])

    def _keep(self, key: bytes, items: list[MediaItem]) -> None:
        self._kept[key] = items
        self._kept_bytes += _size_of(items)
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _size_of(self._kept.popitem(last=False)[1])

    async def close(self) -> None:
        """End the processes. Idempotent."""
        await self._fetcher.close()
        await self._sandbox.close()


def _key_of(url: str, vision: VisionSpec) -> bytes:
    return blake2b(vision.settings + b"\0" + url.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _size_of(items: list[MediaItem]) -> int:
    return sum(len(item.data) for item in items)


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
