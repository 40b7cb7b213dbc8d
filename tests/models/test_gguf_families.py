"""GGUF files of every family that llama.cpp converts: the rows of tests/models/zoo.py, written as its conversion does.

The names are those of the gguf package's own tables, one architecture each.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, RopeScalingType, get_tensor_name_map

from tests.models.zoo import ROWS, ModelType
from tests.models.zoo_checks import ServedModel, TinyModel, check_logits
from tests.tiny_gguf import write_out

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma": MODEL_ARCH.GEMMA,
    "gemma2": MODEL_ARCH.GEMMA2,
    "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "exaone4": MODEL_ARCH.EXAONE4,
    "granite": MODEL_ARCH.GRANITE,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "glm": MODEL_ARCH.CHATGLM,
    "glm4": MODEL_ARCH.GLM4,
    "cohere": MODEL_ARCH.COMMAND_R,
    "cohere2": MODEL_ARCH.COHERE2,
    "nemotron": MODEL_ARCH.NEMOTRON,
    "stablelm": MODEL_ARCH.STABLELM,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "arcee": MODEL_ARCH.ARCEE,
}
IN_PAIRS = {"llama", "granite", "smollm3", "arcee"}  # their conversion moves the rows of q and k
WITH_OFFSET = {"gemma", "gemma2", "nemotron"}  # their conversion adds 1 to norms
NOT_IN_METADATA = {"exact gelu", "dynamic rope", "yarn rope, not truncated"}
SCALARS = {
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale", "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "rope_theta": "rope.freq_base",
}  # fmt: skip
FOUND = [
    row
    for row in ROWS
    if row.model_type in ARCHITECTURES
    and row.label not in NOT_IN_METADATA
    and not row.settings.get("max_window_layers")
]


@pytest.mark.parametrize("row", FOUND, ids=lambda row: row.name)
def test_X01_X07_logits_of_a_gguf_file_equal_transformers(row: ModelType, tmp_path: Path) -> None:
    if row.model_type == "gemma2":  # llama.cpp divides scores by the root of the head size
        row = ModelType(row.model_type, {**row.settings, "query_pre_attn_scalar": 32}, embedding=row.embedding)
    if row.model_type == "cohere":  # its architecture has no tensor of a head
        row = ModelType(row.model_type, {**row.settings, "tie_word_embeddings": True})
    tiny: Any = TinyModel(row, tmp_path / "folder", has_text=False)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny.model, ARCHITECTURES[row.model_type])
    for decoder in ("auto", "torch"):
        served = ServedModel(SimpleNamespace(folder=path, logits=tiny.logits, row=row), decoder)  # type: ignore[arg-type]
        assert check_logits(served) < 1e-4
        served.close()


def write_gguf(path: Path, model: Any, arch: MODEL_ARCH) -> None:
    """Write the model as llama.cpp's conversion does, in float32."""
    config = model.config
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    _add_metadata(writer, config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied or name.endswith("inv_freq"):
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if config.model_type in WITH_OFFSET and name.endswith("norm.weight"):
            tensor = tensor + 1.0
        if config.model_type in IN_PAIRS and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(gguf_name, np.ascontiguousarray(tensor.numpy()))
    write_out(writer)


def _add_metadata(writer: GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    values = config.to_dict()
    if "rms_norm_eps" in values:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(next(value for key, value in values.items() if "eps" in key and "norm" in key))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = values["rope_parameters"]
    values["rope_theta"] = rope.get("full_attention", rope)["rope_theta"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if values.get("sliding_window") and values.get("use_sliding_window") is not False:
        writer.add_sliding_window(config.sliding_window)
    for key, name in SCALARS.items():
        if values.get(key) is not None:
            writer.add_float32(f"{writer.arch}.{name}", values[key])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if rope.get("rope_type") == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(rope["factor"]) / math.log(original)))
        for kind in ("long", "short"):
            factors = torch.tensor(rope[f"{kind}_factor"])
            writer.add_tensor(f"rope_factors_{kind}.weight", factors.numpy())
    if rope.get("rope_type") == "llama3":
        inverse = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim))
        turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / ((1 - keep) / rope["factor"] + keep)).float().numpy())
