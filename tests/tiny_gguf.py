"""Tiny models as GGUF files, converted as llama.cpp converts them.

Owns: `make_tiny_gguf`. Does not: write a tokenizer.
Invariants: written with the gguf package from the same tensors that make_tiny_model writes for equal arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, quants

from tests.tiny_models import BOS_ID, EOS_ID, tiny_config, tiny_tensors

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


GEMMA3_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, arch: str = "llama") -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`, and so on."""
    if not name.startswith("model.layers."):
        whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        return whole[name.removesuffix(".weight")] + ".weight"
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{(GEMMA3_PARTS if arch == 'gemma3' else PARTS)[part]}.{kind}"


def make_tiny_gguf(
    family: str,
    path: Path,
    kind: str | Callable[[str], str],
    seed: int = 0,
    tensors: dict[str, torch.Tensor] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Write the file; return the canonical tensors that its quantised contents stand for.

    Matrices have type `kind`, or what it says of their canonical names; vectors float32. `tensors` replaces the
    random ones; `extra` adds GGUF tensors.
    """
    config = tiny_config(family, **overrides)
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, arch)
    _add_metadata(writer, config)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in (tensors or tiny_tensors(config, seed, torch.float32)).items():
        matrix_kind = kind(name) if callable(kind) else kind
        qtype = GGMLQuantizationType[matrix_kind] if tensor.dim() > 1 else GGMLQuantizationType.F32
        offset = 1.0 if arch == "gemma3" and name.endswith("norm.weight") else 0.0
        raw = quants.quantize(np.ascontiguousarray((tensor + offset).numpy()), qtype)
        stored[name] = torch.from_numpy(np.array(quants.dequantize(raw, qtype))) - offset
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            raw = raw.reshape(heads, 2, raw.shape[0] // heads // 2, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape)
        writer.add_tensor(gguf_name(name, arch), np.ascontiguousarray(raw), raw_dtype=qtype)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        if config["rope_scaling"] is not None:
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
