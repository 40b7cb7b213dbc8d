"""From the images of a request to MediaItems: data URLs are decoded, other URLs fetched, and all are processed.

Owns: the number of images, the bound on bytes, and the items of the last data URLs. Does not: fetch (fetch does), or
decode and process (a process of the sandbox does).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import importlib.util
import json
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from octavo.config import MediaConfig
from octavo.errors import ConfigError, InvalidRequestError, OctavoError, RequestError
from octavo.media.item import MediaItem
from octavo.sandbox.pool import Sandbox, SandboxLimits
from octavo.sandbox.wire import PROCESS_IMAGE, ProcessImage
from octavo.server.fetch import ImageFetcher
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
