"""What config.json and the processors' files say of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_hf_spec

CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "hidden_size": 1024}
LLAVA: dict[str, Any] = {  # the keys that llava-hf/llava-1.5-7b-hf's files have
    "model_type": "llava",
    "image_token_index": 32000,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064},
    "vision_config": CLIP,
}
LLAVA_IMAGES: dict[str, Any] = {
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def read(folder: Path, config: dict[str, Any], images: dict[str, Any] | None, **processor: object) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    if images is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
    if processor:
        (folder / "processor_config.json").write_text(json.dumps(processor))
    return read_hf_spec(folder)


def test_llava_1_5(tmp_path: Path) -> None:
    spec = read(tmp_path, LLAVA, LLAVA_IMAGES)
    vision = spec.vision
    assert vision is not None and not spec.notes and spec.text_part
    assert (spec.family, spec.hidden_size, spec.num_layers, spec.intermediate_size) == ("llama", 4096, 32, 11008)
    assert (vision.kind, vision.image_token_id, vision.tokens_per_tile) == ("llava", 32000, 576)
    assert (vision.shortest_edge, vision.tile_size, vision.resample) == (336, (336, 336), 3)
    assert vision.num_tokens((1, 336, 336), (1, 1, 1), (480, 640)) == vision.max_item_tokens == 576
    assert vision.layout((576,), (1, 1, 1)) == (576,)


@pytest.mark.parametrize(
    ("kind", "pads"), [(None, True), ("LlavaImageProcessorFast", True), ("CLIPImageProcessor", False)]
)
def test_llava_s_own_processor_pads(tmp_path: Path, kind: str | None, pads: bool) -> None:
    images = {**LLAVA_IMAGES, "do_pad": True, **({"image_processor_type": kind} if kind else {})}
    vision = read(tmp_path, LLAVA, images).vision
    assert vision is not None and vision.pads == pads
    spec = read(tmp_path, LLAVA, {**images, "pad_size": {"height": 400, "width": 400}})
    assert (spec.vision is not None) == pads
    assert pads or any("tiles are never padded" in note for note in spec.notes)


def test_the_processor_of_transformers_5_is_one_file(tmp_path: Path) -> None:
    vision = read(tmp_path, LLAVA, None, image_processor=LLAVA_IMAGES).vision
    assert vision is not None and vision.tokens_per_tile == 576


@pytest.mark.parametrize(
    ("images", "config", "why"),
    [
        (None, {}, "preprocessor_config.json"),
        ({"crop_size": {"height": 224, "width": 336}}, {}, "do not fit"),
        ({"do_normalize": False}, {}, "do_normalize"),
        ({"image_std": [0, 1, 1]}, {}, "image_std"),
        ({"size": {"shortest_edge": 1 << 20}}, {}, "shortest_edge"),
        ({}, {"vision_feature_select_strategy": "best"}, "vision_feature_select_strategy"),
        ({}, {"image_token_index": "x"}, "image_token_index"),
    ],
)
def test_unreadable_settings_leave_the_text_part(
    tmp_path: Path, images: dict[str, Any] | None, config: dict[str, Any], why: str
) -> None:
    spec = read(tmp_path, LLAVA | config, None if images is None else LLAVA_IMAGES | images)
    assert spec.vision is None
    (note,) = spec.notes
    assert note.startswith("only the text part of this llava model is loaded: it gets no images (") and why in note


def test_llava_next_counts_tokens_without_padding(tmp_path: Path) -> None:
    points = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    config = LLAVA | {"model_type": "llava_next", "image_grid_pinpoints": points}
    vision = read(tmp_path, config, LLAVA_IMAGES | {"image_grid_pinpoints": points}).vision
    assert vision is not None and vision.kind == "llava_next" and vision.resolutions[3] == (1008, 336)
    assert vision.num_tokens((5, 336, 336), (1, 2, 2), (600, 600)) == 576 + 48 * 48 + 48 == vision.max_item_tokens
    assert vision.num_tokens((3, 336, 336), (1, 1, 2), (300, 900)) == 576 + 16 * 48 + 16


def test_idefics3_has_a_text_around_each_tile(tmp_path: Path) -> None:
    config = {
        "model_type": "smolvlm",
        "image_token_id": 49190,
        "scale_factor": 4,
        "text_config": {"model_type": "llama", "vocab_size": 49280},
        "vision_config": {"patch_size": 16, "image_size": 512},
    }
    images = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "resample": 1}
    vision = read(tmp_path, config, images).vision
    assert vision is not None and (vision.kind, vision.tokens_per_tile) == ("idefics3", 64)
    fake = "<fake_token_around_image>"
    assert vision.layout((64,), (1, 1, 1)) == (f"{fake}<global-img>", 64, fake)
    layout = vision.layout((64, 64, 64), (1, 2, 1))
    text = "".join("x" if isinstance(part, int) else part for part in layout)
    assert text == f"{fake}<row_1_col_1>x\n{fake}<row_2_col_1>x\n\n{fake}<global-img>x{fake}"


@pytest.mark.parametrize("is_flat", [True, False])
def test_qwen2_vl_in_both_forms(tmp_path: Path, is_flat: bool) -> None:
    text = {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    config = {"model_type": "qwen2_vl", "image_token_id": 151655, "vision_config": {"patch_size": 14}}
    config |= text if is_flat else {"text_config": text | {"model_type": "qwen2_vl_text"}}
    spec = read(tmp_path, config, {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14})
    vision = spec.vision
    assert (spec.family, spec.rope_sections, spec.rope_scaling) == ("qwen2", (16, 24, 24), None)
    assert vision is not None and (vision.kind, vision.max_item_tokens) == ("qwen2_vl", 16384)
    assert vision.num_tokens((1, 280, 560), (1, 20, 40), (300, 550)) == 200
    assert vision.merged_grid((1, 20, 40)) == (1, 10, 20)
