"""Read what a model does with images from config.json, preprocessor_config.json and processor_config.json.

Owns: the keys of these files, in transformers 4's and 5's forms. Does not: read tensors or load transformers.
Invariant: nothing is guessed: a setting that would change pixels or tokens, and is not supported, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.artifacts.json_file import read_json
from octavo.artifacts.vision_spec import VisionSpec
from octavo.errors import ModelFileError

_LARGEST = 1 << 14  # bounds every size of an image
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def has_vision(config: Mapping[str, Any]) -> bool:
    """Return True if a model with this config.json gets images."""
    return str(config.get("model_type")) in _READERS


def read_vision_spec(root: Path, config: Mapping[str, Any]) -> VisionSpec:
    """Read the specification of a model folder's images. Raises ModelFileError naming the file and the key."""
    return _READERS[config["model_type"]](_Files(root, config))


class _Files:
    """The three files of one folder, with typed getters. Every failure names the file and the key."""

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        self.path = root / "config.json"
        self.config = config
        self.vision: Mapping[str, Any] = _object(self.path, config, "vision_config")
        joint, own = root / "processor_config.json", root / "preprocessor_config.json"
        self.processor: Mapping[str, Any] = read_json(joint) if joint.is_file() else {}
        self.image_path = own if own.is_file() else joint
        found = read_json(own) if own.is_file() else self.processor.get("image_processor")
        if not isinstance(found, dict):
            raise ModelFileError(own, "is missing: images cannot be processed without it")
        self.image: dict[str, Any] = found
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if found.get(key) is False:
                raise ModelFileError(self.image_path, f"{key} is false; images are always resized and normalised")

    def token(self, *keys: str) -> int:
        """Return a token id of config.json, under the first of these keys."""
        return next((self.integer(self.path, self.config, key) for key in keys if key in self.config), 0)

    def integer(self, path: Path, table: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = table.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST**2:
            raise ModelFileError(path, f"{key} is {value!r}; a whole number is needed")
        return value

    def size(self, key: str, part: str) -> int:
        """Return one size of the image processor's `size` or `crop_size`, which may be one number."""
        table = self.image.get(key)
        value = table.get(part) if isinstance(table, dict) else table
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise ModelFileError(self.image_path, f"{key} is {table!r}; {part} from 1 to {_LARGEST} is needed")
        return value

    def colours(self, key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
        """Return three numbers, one for each colour."""
        value = self.image.get(key, default)
        is_list = isinstance(value, (list, tuple)) and len(value) == 3
        if not is_list or not all(isinstance(number, (int, float)) and abs(number) < 1e6 for number in value):
            raise ModelFileError(self.image_path, f"{key} is {value!r}; three numbers are needed")
        red, green, blue = value
        return float(red), float(green), float(blue)

    def common(
        self, mean: tuple[float, float, float], std: tuple[float, float, float], resample: int
    ) -> dict[str, Any]:
        """Return the fields that every kind has, with these defaults."""
        factor = self.image.get("rescale_factor", 1 / 255)
        if not isinstance(factor, float) or not 0.0 < factor <= 1.0:
            raise ModelFileError(self.image_path, f"rescale_factor is {factor!r}; above 0 and at most 1 is needed")
        std = self.colours("image_std", std)
        if min(std) <= 0.0:
            raise ModelFileError(self.image_path, f"image_std is {std}; positive numbers are needed")
        resample = self.integer(self.image_path, self.image, "resample", resample)
        if resample > 5:
            raise ModelFileError(self.image_path, f"resample is {resample}; 0 to 5 are needed")
        return {
            "mean": self.colours("image_mean", mean),
            "std": std,
            "rescale_factor": factor,
            "resample": resample,
        }


def _object(path: Path, table: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key)
    if not isinstance(value, dict):
        raise ModelFileError(path, f"{key} is {str(value)[:99]}; an object is needed")
    return value


def _clip_tokens(files: _Files, tile: tuple[int, int], patch: int) -> int:
    """Return the tokens of one tile of a CLIP-like tower whose first token is dropped by the "default" strategy."""
    strategy = files.config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise ModelFileError(files.path, f"vision_feature_select_strategy is {strategy!r}; default or full is needed")
    has_first = files.vision.get("model_type") == "clip_vision_model"
    if strategy == "default" and not has_first:
        raise ModelFileError(files.path, "only a clip_vision_model has the token that the default strategy drops")
    return (tile[0] // patch) * (tile[1] // patch) + int(has_first and strategy == "full")


def _square(files: _Files, tile: tuple[int, int], patch: int, image_size: int) -> None:
    """Raise ModelFileError unless tiles are the tower's images."""
    if not 1 <= patch <= min(tile) or tile != (image_size, image_size) or image_size % patch:
        sizes = f"tiles of {tile}, images of {image_size} and patches of {patch} pixels"
        raise ModelFileError(files.image_path, f"{sizes} do not fit each other")


def _read_llava(files: _Files) -> VisionSpec:
    tile = files.size("crop_size", "height"), files.size("crop_size", "width")
    patch = files.integer(files.path, files.vision, "patch_size", 32)
    _square(files, tile, patch, files.integer(files.path, files.vision, "image_size", 224))
    if files.image.get("do_center_crop") is False:
        raise ModelFileError(files.image_path, "do_center_crop is false; the tower needs crops of one size")
    is_own = str(files.image.get("image_processor_type", "LlavaImageProcessor")).startswith("LlavaImageProcessor")
    if files.image.get("do_pad") and not is_own and files.image.get("pad_size"):
        raise ModelFileError(files.image_path, f"pad_size is {files.image['pad_size']!r}; tiles are never padded")
    token = files.token("image_token_index", "image_token_id")
    return VisionSpec(
        kind="llava",
        image_token_id=token,
        prompt_token_id=token,
        patch_size=patch,
        tile_size=tile,
        tokens_per_tile=_clip_tokens(files, tile, patch),
        shortest_edge=files.size("size", "shortest_edge"),
        pads=is_own and bool(files.image.get("do_pad")),
        **files.common(_CLIP_MEAN, _CLIP_STD, 3),
    )


def _read_llava_next(files: _Files) -> VisionSpec:
    spec, listed = _read_llava(files), files.image.get("image_grid_pinpoints")
    if not isinstance(listed, list) or not 1 <= len(listed) <= 64:
        raise ModelFileError(files.image_path, f"image_grid_pinpoints is {str(listed)[:99]}; sizes are needed")
    if listed != files.config.get("image_grid_pinpoints", listed):
        raise ModelFileError(files.image_path, "image_grid_pinpoints differs from config.json's")
    edges = range(spec.tile_size[0], _LARGEST, spec.tile_size[0])
    if not all(isinstance(size, list) and len(size) == 2 and {*size} <= {*edges} for size in listed):
        raise ModelFileError(files.image_path, f"image_grid_pinpoints {listed} are not multiples of {edges[0]}")
    resolutions = tuple((height, width) for height, width in listed)
    return replace(spec, kind="llava_next", resolutions=resolutions, pads=False)  # its do_pad is of batches


def _read_idefics3(files: _Files) -> VisionSpec:
    edge = files.size("max_image_size", "longest_edge")
    patch = files.integer(files.path, files.vision, "patch_size", 32)
    _square(files, (edge, edge), patch, files.integer(files.path, files.vision, "image_size", 224))
    scale = files.integer(files.path, files.config, "scale_factor", 2)
    side = edge // patch
    if scale < 1 or side % scale:
        raise ModelFileError(files.path, f"scale_factor is {scale}; it must divide {side} patches")
    if files.image.get("do_image_splitting") is False:
        raise ModelFileError(files.image_path, "do_image_splitting is false; images are always cut into tiles")
    token = files.token("image_token_id")
    return VisionSpec(
        kind="idefics3",
        image_token_id=token,
        prompt_token_id=token,
        patch_size=patch,
        tile_size=(edge, edge),
        tokens_per_tile=(side // scale) ** 2,
        longest_edge=files.size("size", "longest_edge"),
        **files.common(_HALF, _HALF, 1),
    )


def _read_gemma3(files: _Files) -> VisionSpec:
    edge = files.size("size", "height")
    patch = files.integer(files.path, files.vision, "patch_size", 16)
    _square(
        files, (edge, files.size("size", "width")), patch, files.integer(files.path, files.vision, "image_size", 224)
    )
    if files.image.get("do_pan_and_scan"):
        raise ModelFileError(files.image_path, "do_pan_and_scan is true; images are never cut")
    return VisionSpec(
        kind="gemma3",
        image_token_id=files.token("image_token_index", "image_token_id"),
        prompt_token_id=files.token("boi_token_index"),
        patch_size=patch,
        tile_size=(edge, edge),
        tokens_per_tile=files.integer(files.path, files.config, "mm_tokens_per_image", 256),
        is_both_ways=True,
        **files.common(_HALF, _HALF, 2),
    )


def _read_qwen2_vl(files: _Files) -> VisionSpec:
    found: dict[str, int] = {}
    for key, own, default in (
        ("patch_size", "patch_size", 14), ("merge_size", "spatial_merge_size", 2),
        ("temporal_patch_size", "temporal_patch_size", 2),
    ):  # fmt: skip
        found[key] = files.integer(files.image_path, files.image, key, default)
        expected = files.integer(files.path, files.vision, own, default)
        if found[key] != expected or not 1 <= expected <= _LARGEST:
            raise ModelFileError(files.image_path, f"{key} is {found[key]}, and the tower's is {expected}")
    if found["temporal_patch_size"] != 2:
        raise ModelFileError(files.image_path, f"temporal_patch_size is {found['temporal_patch_size']}; 2 is supported")
    size = files.image.get("size") or {}
    least, most = (
        files.integer(files.image_path, files.image | size, key, (files.image | size).get(edge, default))
        for key, edge, default in (("min_pixels", "shortest_edge", 3136), ("max_pixels", "longest_edge", 1003520))
    )
    token, unit = files.token("image_token_id"), found["patch_size"] * found["merge_size"]
    if not 1 <= least <= most or most < unit**2:
        raise ModelFileError(files.image_path, f"min_pixels is {least} and max_pixels {most}; an interval is needed")
    return VisionSpec(
        kind="qwen2_vl",
        image_token_id=token,
        prompt_token_id=token,
        patch_size=found["patch_size"],
        tile_size=(unit, unit),
        tokens_per_tile=1,
        merge_size=found["merge_size"],
        min_pixels=least,
        max_pixels=most,
        has_rope_positions=True,
        **files.common(_CLIP_MEAN, _CLIP_STD, 3),
    )


_READERS: dict[str, Callable[[_Files], VisionSpec]] = {
    "llava": _read_llava,
    "llava_next": _read_llava_next,
    "idefics3": _read_idefics3,
    "gemma3": _read_gemma3,
    "smolvlm": _read_idefics3,
    "qwen2_vl": _read_qwen2_vl,
    "qwen2_5_vl": _read_qwen2_vl,
}
