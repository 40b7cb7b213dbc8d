"""Images for tests: processed ones, and files of several formats."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from octavo.media.item import MediaItem, item_key


def make_item(number: int = 0, height: int = 2, width: int = 3) -> MediaItem:
    """An item of one tile, whose pixels depend on its number."""
    shape, grid, size = (1, height, width), (1, 1, 1), (height, width)
    data = bytes((number + index) % 256 for index in range(3 * height * width))
    return MediaItem(item_key(b"test", shape, grid, size, data), "image", shape, grid, size, data)


def make_image(height: int, width: int) -> Image.Image:
    """An RGB image of noise that depends on its size only."""
    pixels = np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An image file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    """A data URL of a file."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
