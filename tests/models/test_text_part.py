"""Checkpoints with images whose text part is a family: only that part is read, in the files' old and new names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma3Config, Mistral3Config, PreTrainedConfig

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import resolve_model
from octavo.errors import ModelFileError
from tests.models.dense_backend import all_logits, load_decoder
from tests.models.test_decoder import TOLERANCE, prompt, reference_logits
from tests.models.test_native_decoder import Probe
from tests.tiny_models import VOCAB_SIZE

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "gemma3": Gemma3Config(
        text_config={**TEXT, "sliding_window": 16, "query_pre_attn_scalar": 24},
        vision_config={**IMAGES, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
    ),
    "mistral3": Mistral3Config(
        text_config={**TEXT, "model_type": "mistral"},
        vision_config={**IMAGES, "model_type": "pixtral", "head_dim": 16},
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.nn.Module, Path]:
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, model, folder


def test_X01_logits_of_the_text_part_equal_transformers(made: tuple[str, torch.nn.Module, Path]) -> None:
    name, model, folder = made
    ids = prompt(60)
    expected = reference_logits(model, ids)
    torch.testing.assert_close(all_logits(load_decoder(folder), [ids])[0], expected, atol=TOLERANCE, rtol=0)
    probe = Probe(folder, "native", dtype="float32")
    torch.testing.assert_close(probe.all_logits([ids])[0], expected[-1], atol=TOLERANCE, rtol=0)
    (note,) = read_model_spec(resolve_model(str(folder))).notes_at(100)
    assert note.startswith(f"only the text part of this {name} model is loaded: it gets no images")


def test_newer_names_of_tensors(made: tuple[str, torch.nn.Module, Path], tmp_path: Path) -> None:
    _, model, folder = made
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.replace("language_model.model.", "model.language_model.")
        tensors[name.replace("language_model.lm_head.", "lm_head.")] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    ids = prompt(20)
    found = all_logits(load_decoder(tmp_path), [ids])[0]
    torch.testing.assert_close(found, reference_logits(model, ids), atol=TOLERANCE, rtol=0)


def test_a_missing_tensor_is_named(made: tuple[str, torch.nn.Module, Path], tmp_path: Path) -> None:
    _, _, folder = made
    tensors = load_file(folder / "model.safetensors")
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert read_model_spec(resolve_model(str(tmp_path))).text_part
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight"):
        load_decoder(tmp_path)
