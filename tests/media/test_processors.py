"""The pixels are those of transformers' own processors, for images of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.artifacts.vision_spec import KINDS, VisionSpec
from octavo.errors import InvalidRequestError
from octavo.media.processors import process_image
from tests.media.items import make_image

pytest.importorskip("transformers")
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
SIZES = [(1, 1), (30, 30), (31, 47), (64, 20), (20, 64), (33, 200), (200, 33), (97, 101), (300, 240), (5, 300)]
RESOLUTIONS = ((24, 48), (48, 24), (48, 48), (72, 24), (24, 72))


def make_spec(kind: str, **fields: Any) -> VisionSpec:
    common: dict[str, Any] = {
        "image_token_id": 9,
        "prompt_token_id": 9,
        "mean": MEAN,
        "std": STD,
        "rescale_factor": 1 / 255,
        "resample": 3,
        "patch_size": 8,
        "tile_size": (24, 24),
        "tokens_per_tile": 9,
        "shortest_edge": 24,
        "longest_edge": 96,
        "resolutions": RESOLUTIONS,
        "merge_size": 2,
        "min_pixels": 32 * 32,
        "max_pixels": 128 * 128,
    }
    return VisionSpec(kind=kind, **{**common, **fields})


def processor(kind: str, vision: VisionSpec) -> Any:
    common = {"image_mean": MEAN, "image_std": STD, "resample": vision.resample}
    clip = {"size": {"shortest_edge": vision.shortest_edge}, "crop_size": {"height": 24, "width": 24}}
    if kind == "llava":
        make = LlavaImageProcessorPil if vision.pads else CLIPImageProcessorPil
        return make(**common, **clip, do_pad=vision.pads)
    if kind == "llava_next":
        return LlavaNextImageProcessorPil(**common, **clip, image_grid_pinpoints=[list(each) for each in RESOLUTIONS])
    if kind == "gemma3":
        return Gemma3ImageProcessorPil(**common, size={"height": 24, "width": 24})
    if kind in ("idefics3", "smolvlm"):
        make = Idefics3ImageProcessorPil if kind == "idefics3" else SmolVLMImageProcessorPil
        return make(**common, size={"longest_edge": 96}, max_image_size={"longest_edge": 24})
    size = {"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels}
    return Qwen2VLImageProcessorPil(**common, size=size, patch_size=8, merge_size=2, temporal_patch_size=2)


def normalised(items: list[Any], vision: VisionSpec) -> np.ndarray[Any, Any]:
    """What the executor makes of items: [tiles, 3, height, width]."""
    tiles = [np.frombuffer(item.data, np.uint8).reshape(*item.shape, 3) for item in items]
    scaled = np.concatenate(tiles).astype(np.float64) * vision.rescale_factor
    return np.moveaxis((scaled - np.array(MEAN)) / np.array(STD), -1, 1)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "smolvlm", "llava that pads"])
def test_the_pixels_are_those_of_transformers(kind: str, size: tuple[int, int]) -> None:
    kind, _, pads = kind.partition(" ")
    vision = make_spec("idefics3" if kind == "smolvlm" else kind, pads=bool(pads))
    image = make_image(*size)
    items = process_image(image, vision)
    theirs = processor(kind, vision)(images=[image], return_tensors="np", input_data_format=None)
    ours, expected = normalised(items, vision), theirs["pixel_values"]
    if kind == "qwen2_vl":
        grid = theirs["image_grid_thw"][0]
        assert items[0].grid == tuple(int(each) for each in grid)
        height, width = items[0].shape[1:]
        assert (height, width) == (grid[1] * 8, grid[2] * 8)
        patches = ours[0].reshape(3, height // 16, 2, 8, width // 16, 2, 8).transpose(1, 4, 2, 5, 0, 3, 6)
        ours = np.repeat(patches[:, :, :, :, :, None], 2, axis=5).reshape(len(expected), -1)
    elif expected.ndim == 5:
        expected = expected[0]
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, atol=2e-6)
    assert all(item.size == size for item in items) and len({item.key for item in items}) >= 1


def test_the_grid_counts_tiles() -> None:
    items = process_image(make_image(48, 96), make_spec("idefics3"))
    assert [item.shape for item in items] == [(1, 24, 24)] * 9 and items[0].grid == (1, 2, 4)
    [item] = process_image(make_image(48, 96), make_spec("llava_next"))
    assert item.shape == (3, 24, 24) and item.grid == (1, 1, 2)


def test_a_padded_image_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="100 x 8193 pixels; this model makes squares of images, of at most"):
        process_image(make_image(8193, 100), make_spec("llava", pads=True))


def test_the_key_is_of_pixels_and_settings() -> None:
    image = make_image(30, 30)
    keys = {process_image(image, make_spec("llava", **fields))[0].key for fields in ({}, {"tokens_per_tile": 4}, {})}
    other = process_image(make_image(30, 31), make_spec("llava"))[0].key
    assert len(keys) == 2 and other not in keys
