"""Saved models of native types as GGUF files, converted as llama.cpp converts them.

Owns: `write_gguf` of a tiny model in float32, `convert_folder` of any saved model. Does not: read a folder's tokenizer.
Invariants: the names are those of the gguf package's tables. What the conversion changes beside names is stated here,
not taken from Octavo's families: rows of q and k in rotary pairs, norms with their offset, stacked experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from safetensors import safe_open

from tests.artifacts.gguf_writing import add_metadata
from tests.models.zoo_checks import TinyModel
from tests.tiny_gguf import write_out

# Architecture by model type. PAIRS: q and k are written in rotary pairs. PLUS_ONE: norms are written with 1 added.
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA, "mistral": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3,
    "gemma3_text": MODEL_ARCH.GEMMA3, "gemma": MODEL_ARCH.GEMMA, "gemma2": MODEL_ARCH.GEMMA2, "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2, "granite": MODEL_ARCH.GRANITE, "smollm3": MODEL_ARCH.SMOLLM3,
    "starcoder2": MODEL_ARCH.STARCODER2, "glm4": MODEL_ARCH.GLM4, "mixtral": MODEL_ARCH.LLAMA,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE, "qwen3_moe": MODEL_ARCH.QWEN3MOE, "olmoe": MODEL_ARCH.OLMOE,
}  # fmt: skip
PAIRS = {"llama", "mistral", "mixtral", "granite", "smollm3"}
PLUS_ONE = {"gemma", "gemma2", "gemma3_text"}
_EXPERT = re.compile(r"(.*\.)(?:experts)\.(\d+)\.(.*)")
# Metadata: the writer's method, and the setting that gives its value.
_VALUES = {
    "add_context_length": "max_position_embeddings",
    "add_embedding_length": "hidden_size",
    "add_block_count": "num_hidden_layers",
    "add_feed_forward_length": "intermediate_size",
    "add_head_count": "num_attention_heads",
    "add_head_count_kv": "num_key_value_heads",
    "add_layer_norm_rms_eps": "rms_norm_eps",
    "add_layer_norm_eps": "norm_epsilon",
    "add_sliding_window": "sliding_window",
    "add_attn_logit_softcapping": "attn_logit_softcapping",
    "add_final_logit_softcapping": "final_logit_softcapping",
    "add_logit_scale": "logits_scaling",
    "add_residual_scale": "residual_multiplier",
    "add_embedding_scale": "embedding_multiplier",
    "add_attention_scale": "attention_multiplier",
    "add_expert_feed_forward_length": "moe_intermediate_size",
    "add_expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


def write_gguf(tiny: TinyModel, path: Path) -> None:
    """Write a saved tiny model as one file in float32."""
    convert_folder(tiny.folder, tiny.model.config, path, rope_factors=_rope_factors(tiny.model))


def convert_folder(
    folder: Path,
    config: Any,
    path: Path,
    kind: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    rope_factors: np.ndarray[Any, Any] | None = None,
) -> None:
    """Write a saved model as one file: matrices as `kind`, vectors and routers in float32. `metadata` is added."""
    model_type = config.model_type
    arch = ARCHITECTURES[model_type]
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch], use_temp_file=True)  # else all tensors are kept in memory
    _add_metadata(writer, model_type, config)
    add_metadata(writer, metadata or {})
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob("*.safetensors"))]
        for name, tensor in _stacked(
            {name: partial(file.get_tensor, name) for file in files for name in file.offset_keys()}
        ):
            if model_type in PLUS_ONE and name.endswith("norm.weight"):
                tensor = tensor + 1.0
            if model_type in PAIRS and re.search(r"\.[qk]_proj\.", name):
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, name
            is_plain = tensor.dim() == 1 or gguf_name.endswith("gate_inp.weight")
            qtype = GGMLQuantizationType["F32" if is_plain else kind]
            raw = quants.quantize(np.ascontiguousarray(tensor.float().numpy()), qtype)
            writer.add_tensor(gguf_name, raw, raw_dtype=qtype)
    write_out(writer)


def _stacked(tensors: Mapping[str, Callable[[], torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by name, those of a layer's experts as one."""
    experts: dict[str, dict[int, Callable[[], torch.Tensor]]] = {}
    for name, read in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(f"{match[1]}experts.{match[3]}", {})[int(match[2])] = read
        else:
            yield name, read()
    for name, parts in experts.items():
        yield name, torch.stack([parts[index]() for index in sorted(parts)])


def _rope_factors(model: Any) -> np.ndarray[Any, Any] | None:
    """What the model divides its rotary frequencies by; None without Llama 3's scaling."""
    config = model.config
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    scaled = model.model.rotary_emb.inv_freq
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(len(scaled)) / len(scaled))
    return np.asarray((plain / scaled).numpy(), np.float32)


def _add_metadata(writer: GGUFWriter, model_type: str, config: Any) -> None:
    for method, setting in _VALUES.items():
        if (value := getattr(config, setting, None)) is not None:
            getattr(writer, method)(value)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if (share := rope.get("partial_rotary_factor")) is not None:
        writer.add_rope_dimension_count(int(head_dim * share))
    if len(set(kinds := getattr(config, "layer_types", None) or ())) > 1:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
