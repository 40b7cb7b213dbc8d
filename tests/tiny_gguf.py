"""Tiny models as GGUF files, converted as llama.cpp converts them.

Owns: `make_tiny_gguf`, and random blocks of any type. Does not: write a tokenizer.
Invariants: written with the gguf package from the same tensors that make_tiny_model writes for equal arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType, quants

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

# Where blocks have float16 numbers. IQ1_M's number is in parts, MXFP4 has exponents, NVFP4 has E4M3 numbers.
_HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
           "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "IQ1_S": (0,),
           "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,),
           "IQ4_XS": (0,)}  # fmt: skip


def random_blocks(
    kind: GGMLQuantizationType, rows: int = 40, columns: int = 768, scale: float = 0.01
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return rows of blocks. Every bit is random, but scales are of the size of weights'."""
    rng = np.random.default_rng(1)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // block, block_bytes), dtype=np.uint8)
    numbers = rng.normal(0, scale, (3, *raw.shape[:2])).astype(np.float16)
    for start, part in zip(_HALVES.get(kind.name, ()), numbers, strict=False):
        raw[..., start : start + 2] = part.view(np.uint8).reshape(*part.shape, 2)
    if kind == GGMLQuantizationType.IQ1_M:
        digits = numbers[0].view(np.uint16)[..., None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        raw[..., 49::2] = raw[..., 49::2] & 15 | digits.astype(np.uint8) << 4
    if kind == GGMLQuantizationType.MXFP4:
        raw[..., 0] = rng.integers(110, 130, raw.shape[:2])
    return raw.reshape(rows, -1)


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
    tensors_per_part: int = 0,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Write the file; return the canonical tensors that its quantised contents stand for.

    Matrices have type `kind`, or what it says of their canonical names; vectors float32. `tensors` replaces the
    random ones; `extra` adds GGUF tensors. With `tensors_per_part`, the model is split into parts beside `path`.
    """
    config = tiny_config(family, **overrides)
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, arch, split_max_tensors=tensors_per_part)
    _add_metadata(writer, config)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in (tensors or tiny_tensors(config, seed, torch.float32)).items():
        matrix_kind = kind(name) if callable(kind) else kind
        qtype = GGMLQuantizationType[matrix_kind] if tensor.dim() > 1 else GGMLQuantizationType.F32
        offset = 1.0 if arch == "gemma3" and name.endswith("norm.weight") else 0.0
        try:
            raw = quants.quantize(np.ascontiguousarray((tensor + offset).numpy()), qtype)
        except NotImplementedError:  # the package reads this type, but does not write it
            raw = random_blocks(qtype, *tensor.shape, scale=0.001)
        stored[name] = torch.from_numpy(np.array(quants.dequantize(raw, qtype))) - offset
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            raw = raw.reshape(heads, 2, raw.shape[0] // heads // 2, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape)
        writer.add_tensor(gguf_name(name, arch), np.ascontiguousarray(raw), raw_dtype=qtype)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    write_out(writer)
    return stored


def write_out(writer: GGUFWriter) -> None:
    """Write the file of what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
