"""Where a prompt's images are: placeholder tokens in its text, and their spans among its ids.

Owns: replacing the token at each image's place by the image's layout, and finding the spans. Does not: render
templates, encode text, or know the layouts (VisionSpec does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.artifacts.vision_spec import VisionSpec
from octavo.core.request import Span
from octavo.errors import InvalidRequestError
from octavo.media.item import MediaItem

Images = Sequence[Sequence[MediaItem]]  # the items of each image, in the order of the prompt
MAX_MEDIA_BYTES = 48 << 20  # of one request, which is sent to the engine and journaled as one frame


def unique_items(images: Images) -> tuple[MediaItem, ...]:
    """Return each item once. Raises InvalidRequestError if they are too large together."""
    items = {item.key: item for image in images for item in image}
    size = sum(len(item.data) for item in items.values())
    if size > MAX_MEDIA_BYTES:
        reason = f"the images of this request have {size} bytes of pixels; at most {MAX_MEDIA_BYTES} are allowed"
        raise InvalidRequestError(f"{reason}; send fewer or smaller ones", "messages")
    return tuple(items.values())


def num_tokens_of(items: Sequence[MediaItem], vision: VisionSpec) -> tuple[int, ...]:
    """Return how many placeholder tokens each item of an image has."""
    return tuple(vision.num_tokens(item.shape, item.grid, item.size) for item in items)


def layout_text(vision: VisionSpec, counts: tuple[int, ...], grid: tuple[int, int, int], token: str) -> str:
    """Return the text of an image whose items have `counts` placeholder tokens, spelled `token`."""
    return "".join(part if isinstance(part, str) else token * part for part in vision.layout(counts, grid))


def insert_placeholders(prompt: str, vision: VisionSpec, images: Images, piece_of: Callable[[int], str]) -> str:
    """Return a rendered prompt with each image's layout at its place; `piece_of` returns the text of a token.

    Raises InvalidRequestError if the prompt does not have as many places as images.
    """
    place, token = piece_of(vision.prompt_token_id), piece_of(vision.image_token_id)
    first, *pieces = prompt.split(place)
    if len(pieces) != len(images):
        reason = f"the chat template made {len(pieces)} places ({place}) for {len(images)} images"
        raise InvalidRequestError(f"{reason}; a text must not spell {place}", "messages")
    parts = [first]
    for items, piece in zip(images, pieces, strict=True):
        parts += [layout_text(vision, num_tokens_of(items, vision), items[0].grid, token), piece]
    return "".join(parts)


def find_spans(ids: Sequence[int], vision: VisionSpec, images: Images) -> tuple[Span, ...]:
    """Return the span of each item among the ids of a prompt. Raises InvalidRequestError."""
    positions = [position for position, token_id in enumerate(ids) if token_id == vision.image_token_id]
    spans, used = [], 0
    for item in (item for image in images for item in image):
        count = vision.num_tokens(item.shape, item.grid, item.size)
        run = positions[used : used + count]
        if len(run) < count or run[-1] - run[0] != count - 1:
            raise InvalidRequestError("the images' places are not whole in the prompt's tokens", "messages")
        spans.append(Span(run[0], count, item.key))
        used += count
    if used != len(positions):
        raise InvalidRequestError("a text spells the token that stands for images; leave it out", "messages")
    return tuple(spans)
