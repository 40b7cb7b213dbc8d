"""From the bytes of an image file to its pixels, with Pillow.

Owns: which formats are read, and the bounds on bytes, sizes and frames. Does not: fetch, resize (processors does), or
bound time and memory: a server calls this in a sandbox process, whose limits do that.
Invariants: the first bytes choose the only decoder that runs. Sizes are checked before pixels are decoded.
As in transformers' load_image, the orientation of the EXIF data is applied, and transparency is dropped.
"""

from __future__ import annotations

import struct
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from octavo.errors import InvalidRequestError

MAX_SIDE = 16_384  # pixels
MAX_RATIO = 200  # of the sides; the smaller side of an image decides how far it is enlarged
Image.MAX_IMAGE_PIXELS = None  # check_size does it, with this server's bound

_FIRST_BYTES = {
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
}
_SHOWN = "PNG, JPEG, WebP, GIF or BMP"
# What Pillow's decoders raise for damaged files.
_DAMAGE = (OSError, ValueError, TypeError, SyntaxError, LookupError, ArithmeticError, AttributeError, EOFError,
           RuntimeError, AssertionError, struct.error)  # fmt: skip


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """Return the RGB image of a file. Raises InvalidRequestError."""
    kind = _kind_of(data)
    if kind is None:
        raise InvalidRequestError(f"the image is in no known format; give {_SHOWN}", "image")
    try:
        image = Image.open(BytesIO(data), formats=[kind])
        check_size(image.height, image.width, max_pixels)
        if getattr(image, "is_animated", False):
            raise InvalidRequestError("the image is animated; give an image of one frame", "image")
        image.load()
        return to_rgb(image)
    except InvalidRequestError:
        raise
    except UnidentifiedImageError:
        raise InvalidRequestError(f"the image is no whole {kind} file", "image") from None
    except _DAMAGE as error:
        raise InvalidRequestError(f"the image is a damaged {kind} file ({_reason(error)})", "image") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the upright image without transparency."""
    upright = ImageOps.exif_transpose(image)
    return upright if upright.mode == "RGB" else upright.convert("RGB")


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Check the sides of an image. Raises InvalidRequestError."""
    size = f"the image has {width} x {height} pixels"
    if min(height, width) < 1 or max(height, width) > MAX_SIDE:
        raise InvalidRequestError(f"{size}; each side must have 1 to {MAX_SIDE}", "image")
    if height * width > max_pixels:
        raise InvalidRequestError(f"{size}; at most {max_pixels} are allowed", "image")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidRequestError(f"{size}; one side may be at most {MAX_RATIO} times as long as the other", "image")


def _kind_of(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((kind for kind, firsts in _FIRST_BYTES.items() if data.startswith(firsts)), None)


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__)[:120]
