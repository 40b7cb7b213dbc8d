"""Tiny random models that get images, with what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, logging

from octavo.core.request import Span
from octavo.media.item import MediaItem, item_key

VOCAB_SIZE, IMAGE, MAX_LEN = 200, 199, 256
COUNT, MARGIN = 16, 3e-4
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
MEAN, STD = [0.48, 0.45, 0.4], [0.26, 0.27, 0.28]
IMAGES: dict[str, Any] = {
    "image_mean": MEAN, "image_std": STD, "rescale_factor": 1 / 255, "resample": 3, "do_resize": True,
}  # fmt: skip

logging.disable_progress_bar()


@dataclass(frozen=True)
class Family:
    """One model type: its configuration, its image processor's file, an item, and what the model gets for items."""

    model_type: str
    settings: Mapping[str, Any]
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    images: Mapping[str, Any]
    item: Callable[[int], MediaItem]
    num_tokens: Callable[[MediaItem], int]
    inputs: Callable[[Sequence[MediaItem]], dict[str, torch.Tensor]]
    processor: Mapping[str, Any] = field(default_factory=dict)
    embedding: float = 0.4
    before: tuple[int, ...] = ()  # ids around each item
    after: tuple[int, ...] = ()


def make_item(seed: int, shape: tuple[int, int, int], **place: Any) -> MediaItem:
    """Random pixels."""
    data = np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8).tobytes()
    grid, size = place.get("grid", (1, 1, 1)), place.get("size", shape[1:])
    return MediaItem(item_key(b"test", shape, grid, size, data), "image", shape, grid, size, data)


def pixel_values(item: MediaItem) -> torch.Tensor:
    """The item's pixels as transformers' processors give them, [tiles, colours, height, width]."""
    pixels = np.frombuffer(item.data, dtype=np.uint8).reshape(*item.shape, 3).astype(np.float32) / 255
    return torch.from_numpy((pixels - np.array(MEAN, np.float32)) / np.array(STD, np.float32)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Prompt:
    """Token ids with the items of their spans."""

    ids: list[int]
    spans: tuple[Span, ...]
    items: tuple[MediaItem, ...]


class TinyVision:
    """A random model of a family in a folder, and what transformers computes with it in float32, eagerly.

    `prompts` are of text alone, one image, several, and an equal image again; `texts` are their greedy continuations.
    """

    def __init__(self, family: Family, folder: Path) -> None:
        self.family, self.folder = family, folder
        one, other = family.item(1), family.item(2)
        self.prompts = [
            self.prompt(12, seed=1),
            self.prompt(5, one, 7, seed=2),
            self.prompt(one, 4, other, 3, seed=3),
            self.prompt(20, other, 9, seed=4),
            self.prompt(30, seed=5),
        ]
        for seed in range(16):
            self._make(seed)
            found = [self._generate(prompt) for prompt in self.prompts]
            if min(margin for _, margin in found) > MARGIN:
                break
        else:
            raise AssertionError("no seed gives a clear greedy choice")
        self.texts = [text for text, _ in found]
        self.model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps({**IMAGES, **family.images}))
        if family.processor:
            (folder / "processor_config.json").write_text(json.dumps(dict(family.processor)))

    def _make(self, seed: int) -> None:
        family = self.family
        torch.manual_seed(seed)
        config = CONFIG_MAPPING[family.model_type](
            text_config={**TEXT, **family.text}, vision_config={**TOWER, **family.tower}, **family.settings
        )
        self.model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                noise = torch.randn(tensor.shape, generator=generator)
                if tensor.dim() == 1:
                    tensor.add_(0.2 * noise)
                elif tensor is self.model.get_input_embeddings().weight:
                    tensor.copy_(noise * family.embedding)
                else:
                    strength = 2.0 if "o_proj" in name or "down_proj" in name else 1.0
                    tensor.copy_(strength * noise * tensor[0].numel() ** -0.5)

    def prompt(self, *parts: int | MediaItem, seed: int = 0) -> Prompt:
        """Return a prompt of random texts of these lengths and of items."""
        random = np.random.default_rng(seed)
        ids, spans, items = [1], [], []
        for part in parts:
            if isinstance(part, int):
                ids += random.integers(3, 190, part).tolist()
                continue
            length = self.family.num_tokens(part)
            ids += self.family.before
            spans.append(Span(len(ids), length, part.key))
            items.append(part)
            ids += [IMAGE] * length
            ids += self.family.after
        return Prompt(ids, tuple(spans), tuple(items))

    def _inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        ids = torch.tensor([prompt.ids])
        more = self.family.inputs(prompt.items) if prompt.items else {}
        kinds = (ids == IMAGE).int()
        if self.family.model_type.startswith(("qwen", "gemma")):
            name = "mm_token_type_ids" if self.family.model_type.startswith("qwen") else "token_type_ids"
            more = {**more, name: kinds}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}

    @torch.inference_mode()
    def logits(self, prompt: Prompt) -> torch.Tensor:
        """The logits of every position."""
        found: torch.Tensor = self.model(**self._inputs(prompt), use_cache=False).logits[0]
        return found.float()

    @torch.inference_mode()
    def _generate(self, prompt: Prompt) -> tuple[list[int], float]:
        """Greedy text, and the least difference between the two best logits."""
        found = self.model.generate(
            **self._inputs(prompt), do_sample=False, max_new_tokens=COUNT, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.cat(found.logits).topk(2).values
        return found.sequences[0, len(prompt.ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def _stacked(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.cat([pixel_values(item) for item in items])}


LLAVA = Family(
    "llava",
    {"image_token_index": IMAGE, "image_seq_length": 16},
    {"model_type": "llama"},
    {"model_type": "clip_vision_model"},
    {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "do_center_crop": True},
    item=lambda seed: make_item(seed, (1, 56, 56)),
    num_tokens=lambda item: 16,
    inputs=_stacked,
)
LLAVA_NEXT = replace(
    LLAVA,
    model_type="llava_next",
    settings={"image_token_index": IMAGE, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    text={"model_type": "mistral", "sliding_window": None},
    images={**LLAVA.images, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
    item=lambda seed: make_item(seed, (3, 56, 56), grid=(1, 1, 2), size=(40, 40 + 47 * seed)),
    num_tokens=lambda item: 16 + {87: 36, 134: 18}[item.size[1]],
    inputs=lambda items: {
        "pixel_values": torch.stack([pixel_values(item) for item in items]),
        "image_sizes": torch.tensor([item.size for item in items]),
    },
)
IDEFICS3 = Family(
    "idefics3",
    {"image_token_id": IMAGE, "scale_factor": 2},
    {"model_type": "llama"},
    {"model_type": "idefics3_vision"},
    {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True, "resample": 1},
    item=lambda seed: make_item(seed, (1, 56, 56)),
    num_tokens=lambda item: 4,
    inputs=lambda items: {"pixel_values": torch.cat([pixel_values(item) for item in items])[None]},
)
SMOLVLM = replace(IDEFICS3, model_type="smolvlm", tower={"model_type": "smolvlm_vision"})


def _patches(items: Sequence[MediaItem]) -> dict[str, torch.Tensor]:
    """As transformers' processor makes them, one loop for each axis."""
    found = []
    for item in items:
        pixels = pixel_values(item)[0]
        _, height, width = item.grid
        for row in range(0, height, 2):
            for column in range(0, width, 2):
                for y in (row, row + 1):
                    for x in (column, column + 1):
                        patch = pixels[:, 14 * y : 14 * y + 14, 14 * x : 14 * x + 14]
                        found.append(torch.stack([patch, patch], dim=1).flatten())
    return {"pixel_values": torch.stack(found), "image_grid_thw": torch.tensor([item.grid for item in items])}


QWEN2_VL = Family(
    "qwen2_vl",
    {"image_token_id": IMAGE, "video_token_id": 198, "vision_start_token_id": 197, "vision_end_token_id": 196},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}},
    {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    {"min_pixels": 784, "max_pixels": 28 * 28 * 16, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2},
    item=lambda seed: make_item(seed, (1, 56 * seed, 84), grid=(1, 4 * seed, 6)),
    num_tokens=lambda item: item.grid[1] * item.grid[2] // 4,
    inputs=_patches,
    before=(197,),
    after=(196,),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    model_type="qwen2_5_vl",
    tower={"depth": 2, "out_hidden_size": 64, "num_heads": 2, "window_size": 56, "fullatt_block_indexes": [1]},
)
GEMMA3 = Family(
    "gemma3",
    {"image_token_index": IMAGE, "boi_token_index": 197, "eoi_token_index": 198, "mm_tokens_per_image": 4},
    {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16, "tie_word_embeddings": True,
     "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    {"model_type": "siglip_vision_model"},
    {"size": {"height": 56, "width": 56}, "resample": 2},
    item=lambda seed: make_item(seed, (1, 56, 56)),
    num_tokens=lambda item: 4,
    inputs=_stacked,
    embedding=0.05,
    before=(197,),
    after=(198,),
)  # fmt: skip
FAMILIES = {
    family.model_type: family for family in (LLAVA, LLAVA_NEXT, IDEFICS3, SMOLVLM, QWEN2_VL, QWEN2_5_VL, GEMMA3)
}
