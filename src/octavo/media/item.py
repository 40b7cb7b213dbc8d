"""MediaItem: one processed image, as it is sent from the API process to an engine's executor.

Owns: the value, its key and its checks. Does not: decode or resize (processors do), normalise, or load numpy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from octavo.core.request import Request
from octavo.errors import InvalidRequestError

MAX_ITEM_BYTES = 256 << 20
KEY_BYTES = 16
_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One processed image, of which an encoder makes the embeddings of one span of a prompt.

    `data` has uint8 pixels [tiles, height, width, 3], `shape` the first three sizes. `grid` is Qwen2-VL's temporal
    size, height and width in patches, and (1, rows, columns) of tiles for other models. `size` is the original
    image's height and width. `key` identifies all of this and the settings of the processor.
    """

    key: bytes
    kind: str
    shape: tuple[int, int, int]
    grid: tuple[int, int, int]
    size: tuple[int, int]
    data: bytes

    def __post_init__(self) -> None:
        tiles, height, width = self.shape
        num_bytes = tiles * height * width * _CHANNELS
        if min(*self.shape, *self.grid, *self.size) < 1 or num_bytes > MAX_ITEM_BYTES or len(self.key) != KEY_BYTES:
            raise ValueError(f"an item of {self.shape} pixels, grid {self.grid}, size {self.size} is out of range")
        if len(self.data) != num_bytes:
            raise ValueError(f"an item of {self.shape} pixels has {len(self.data)} bytes instead of {num_bytes}")


def item_key(
    settings: bytes, shape: tuple[int, int, int], grid: tuple[int, int, int], size: tuple[int, int], data: bytes
) -> bytes:
    """Return the key of an item with this content, made with these settings of the processor."""
    digest = blake2b(digest_size=KEY_BYTES)
    for number in (len(settings), *shape, *grid, *size):
        digest.update(number.to_bytes(8, "little"))
    digest.update(settings)
    digest.update(data)
    return digest.digest()


def check_media(request: Request, media: Iterable[MediaItem]) -> None:
    """Check that every span of a request has an item. Raises InvalidRequestError."""
    keys = {item.key for item in media}
    missing = [index for index, span in enumerate(request.spans) if span.key not in keys]
    if missing:
        raise InvalidRequestError(f"media item {missing[0]} was not sent with the request", "spans")
