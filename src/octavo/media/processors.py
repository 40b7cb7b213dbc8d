"""From an image to the pixels that a model's vision tower gets: resized, cropped and cut as transformers does it.

Owns: one rule for each kind of processor. The results equal those of transformers' Pillow processors, before they are
rescaled and normalised. Does not: decode files, normalise (the executor does), or know a checkpoint's files.
Sources: transformers' image_processing_pil_*.py of CLIP, LLaVA, LLaVA-NeXT, Gemma 3, Idefics3 and Qwen2-VL.
Shapes: H height, W width, N tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from octavo.artifacts.vision_spec import VisionSpec
from octavo.errors import InvalidRequestError
from octavo.media.item import MediaItem, item_key

Pixels = npt.NDArray[np.uint8]
Tiles = tuple[Sequence[Pixels], tuple[int, int, int]]  # tiles and the grid
Size = tuple[int, int]  # height and width
_LARGEST_EDGE = 4096  # of Idefics3's resized images
_MAX_PADDED = 8192  # pixels of the side of a padded image, which has 200 MB
_SPLIT = ("idefics3",)  # kinds of which each tile is an item


def process_image(image: Image.Image, vision: VisionSpec) -> list[MediaItem]:
    """Return the items of an RGB image. Raises InvalidRequestError."""
    assert image.mode == "RGB", image.mode
    size = (image.height, image.width)
    tiles, grid = _KINDS[vision.kind](image, vision)
    groups = [[tile] for tile in tiles] if vision.kind in _SPLIT else [tiles]
    items = []
    for group in groups:
        pixels_NHWC = np.stack(group)
        shape = (pixels_NHWC.shape[0], pixels_NHWC.shape[1], pixels_NHWC.shape[2])
        data = pixels_NHWC.tobytes()
        items.append(MediaItem(item_key(vision.settings, shape, grid, size, data), "image", shape, grid, size, data))
    return items


def _resized(image: Image.Image, size: Size, resample: int) -> Image.Image:
    return image.resize((size[1], size[0]), resample=Image.Resampling(resample))


def _cropped(image: Image.Image, size: Size) -> Pixels:
    """Return the centre of an image; black where the image is smaller."""
    pixels_HWC = np.asarray(image)
    padding = [max(0, need - have) for need, have in zip(size, pixels_HWC.shape, strict=False)]
    if any(padding):
        pads = [(math.ceil(each / 2), each // 2) for each in padding]
        pixels_HWC = np.pad(pixels_HWC, (*pads, (0, 0)))
    top, left = ((have - need) // 2 for need, have in zip(size, pixels_HWC.shape, strict=False))
    return pixels_HWC[top : top + size[0], left : left + size[1]]


def _clip_tile(image: Image.Image, vision: VisionSpec) -> Pixels:
    height, width = image.height, image.width
    edge = vision.shortest_edge
    longer = int(edge * max(height, width) / min(height, width))
    size = (longer, edge) if width <= height else (edge, longer)
    return _cropped(_resized(image, size, vision.resample), vision.tile_size)


def _llava(image: Image.Image, vision: VisionSpec) -> Tiles:
    if vision.pads and image.height != image.width:
        edge, colour = max(image.size), tuple(int(part * 255) for part in vision.mean)
        if edge > _MAX_PADDED:
            size = f"the image has {image.width} x {image.height} pixels"
            raise InvalidRequestError(f"{size}; this model makes squares of images, of at most {_MAX_PADDED}", "image")
        square = Image.new("RGB", (edge, edge), colour)
        square.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
        image = square
    return [_clip_tile(image, vision)], (1, 1, 1)


def _gemma3(image: Image.Image, vision: VisionSpec) -> Tiles:
    return [np.asarray(_resized(image, vision.tile_size, vision.resample))], (1, 1, 1)


def _qwen2_vl(image: Image.Image, vision: VisionSpec) -> Tiles:
    height, width = _multiples(image.height, image.width, vision)
    grid = (1, height // vision.patch_size, width // vision.patch_size)
    return [np.asarray(_resized(image, (height, width), vision.resample))], grid


def _multiples(height: int, width: int, vision: VisionSpec) -> Size:
    """Return the nearest size in multiples of merged patches, within the bounds on the pixels ("smart resize")."""
    factor = vision.patch_size * vision.merge_size
    rounded = round(height / factor) * factor, round(width / factor) * factor
    if rounded[0] * rounded[1] > vision.max_pixels:
        scale = math.sqrt((height * width) / vision.max_pixels)
        return (
            max(factor, math.floor(height / scale / factor) * factor),
            max(factor, math.floor(width / scale / factor) * factor),
        )
    if rounded[0] * rounded[1] < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (height * width))
        return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    if min(rounded) < 1:
        raise InvalidRequestError(f"the image has {width} x {height} pixels, too few for this model", "image")
    return rounded


def _idefics3(image: Image.Image, vision: VisionSpec) -> Tiles:
    """Return the tiles row by row and the whole image last, or only the image if it is no larger than a tile."""
    edge = vision.tile_size[0]
    image = _resized(image, _with_longest_edge(image.height, image.width, vision.longest_edge), vision.resample)
    image = _resized(image, _tile_multiples(image.height, image.width, edge), vision.resample)
    if max(image.height, image.width) <= edge:
        return [np.asarray(image)], (1, 1, 1)
    rows, columns = image.height // edge, image.width // edge
    pixels_HWC = np.asarray(image)
    tiles = [
        pixels_HWC[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
        for row in range(rows)
        for column in range(columns)
    ]
    return [*tiles, np.asarray(_resized(image, (edge, edge), vision.resample))], (1, rows, columns)


def _with_longest_edge(height: int, width: int, edge: int) -> Size:
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        height, width = edge, int(edge * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LARGEST_EDGE:
        width, height = _LARGEST_EDGE, int(_LARGEST_EDGE / ratio)
    elif height > width and height > _LARGEST_EDGE:
        height, width = _LARGEST_EDGE, int(_LARGEST_EDGE * ratio)
    return max(height, 1), max(width, 1)


def _tile_multiples(height: int, width: int, edge: int) -> Size:
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        return math.ceil(int(width / ratio) / edge) * edge, width
    height = math.ceil(height / edge) * edge
    return height, math.ceil(int(height * ratio) / edge) * edge


def _llava_next(image: Image.Image, vision: VisionSpec) -> Tiles:
    """Return the whole image, and the tiles of the image at the best resolution, row by row."""
    edge = vision.tile_size[0]
    best = _best_resolution((image.height, image.width), vision.resolutions)
    fitted = _resized(image, _fitted(image.height, image.width, best), vision.resample)
    spare = best[0] - fitted.height, best[1] - fitted.width
    padding = [(each // 2, each - each // 2) for each in spare]
    pixels_HWC = np.pad(np.asarray(fitted), (*padding, (0, 0)))
    rows, columns = best[0] // edge, best[1] // edge
    whole = _resized(image, (vision.shortest_edge, vision.shortest_edge), vision.resample)
    cuts = [
        Image.fromarray(pixels_HWC[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge])
        for row in range(rows)
        for column in range(columns)
    ]
    return [_clip_tile(each, vision) for each in (whole, *cuts)], (1, rows, columns)


def _best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """Return the resolution that keeps most of the image's pixels; of equal ones, that with the least padding."""

    def rank(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / size[1], resolution[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=rank)


def _fitted(height: int, width: int, best: Size) -> Size:
    scale_h, scale_w = best[0] / height, best[1] / width
    if scale_w < scale_h:
        return min(math.ceil(height * scale_w), best[0]), best[1]
    return best[0], min(math.ceil(width * scale_h), best[1])


_KINDS: dict[str, Callable[[Image.Image, VisionSpec], Tiles]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "qwen2_vl": _qwen2_vl,
}
