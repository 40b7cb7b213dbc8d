"""Images that a program gives to LLM and AsyncLLM: PIL images, files, bytes and data URLs, processed in this process.

Owns: the forms of an image, and taking images out of messages. Does not: fetch over the network. Needs Pillow, so it is
imported at the first image.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from octavo.artifacts.vision_spec import VisionSpec
from octavo.core.request import Span
from octavo.errors import InvalidRequestError
from octavo.media.decode import check_size, decode_image, to_rgb
from octavo.media.item import MediaItem
from octavo.media.placeholders import unique_items
from octavo.media.processors import process_image
from octavo.text.text_model import TextModel

MAX_PIXELS = 128 << 20
_KINDS = ("image_url", "image_pil", "image", "input_image")
_NAMES = ("image_url", "image_pil", "image", "url", "path")


def take_images(
    messages: Sequence[Mapping[str, Any]], vision: VisionSpec
) -> tuple[list[dict[str, Any]], list[list[MediaItem]]]:
    """Return the messages with {"type": "image"} for each image, and each image's items. Raises InvalidRequestError."""
    taken, images = [], []
    for message in messages:
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = []
            for part in content:
                if isinstance(part, Mapping) and part.get("type") in _KINDS:
                    images.append(read_image(_value_of(part), vision))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        taken.append(dict(message))
    return taken, images


def read_conversation(
    text: TextModel, messages: Sequence[Mapping[str, Any]], **options: Any
) -> tuple[list[int], tuple[Span, ...], tuple[MediaItem, ...]]:
    """Return a conversation's ids, the spans of its images, and each image once. Raises InvalidRequestError.

    `options` are those of TextModel.prompt_with_images; the model takes images.
    """
    assert text.spec.vision is not None
    taken, images = take_images(messages, text.spec.vision)
    ids, spans = text.prompt_with_images(taken, images, **options)
    return ids, spans, unique_items(images)


def _value_of(part: Mapping[str, Any]) -> object:
    for name in _NAMES:
        value = part.get(name)
        if value is not None:
            return value.get("url") if isinstance(value, Mapping) else value
    raise InvalidRequestError(f"an image part has the keys {sorted(part)}; give one of {', '.join(_NAMES)}", "messages")


def read_image(value: object, vision: VisionSpec) -> list[MediaItem]:
    """Return the items of an image: a PIL image, the bytes or the path of a file, or a data URL.

    Raises InvalidRequestError.
    """
    if isinstance(value, Image.Image):
        check_size(value.height, value.width, MAX_PIXELS)
        return process_image(to_rgb(value), vision)
    return process_image(decode_image(_bytes_of(value), MAX_PIXELS), vision)


def _bytes_of(value: object) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if not isinstance(value, (str, Path)):
        kind = type(value).__name__
        raise InvalidRequestError(f"an image is a {kind}; give a PIL image, bytes, a path or a data URL", "messages")
    text = str(value)
    if text[:5].lower() == "data:":
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise InvalidRequestError(f"an image's data URL is not base64 ({error})", "messages") from None
    if text.startswith(("http://", "https://")):
        raise InvalidRequestError(
            "images are not fetched here; give a PIL image, bytes, a path or a data URL", "messages"
        )
    try:
        return Path(text.removeprefix("file://")).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(f"the image {text[:200]!r} cannot be read ({reason})", "messages") from None
