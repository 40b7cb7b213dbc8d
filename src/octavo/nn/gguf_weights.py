"""Weights in GGUF files: names, row order, dequantisation.

Owns: the mapping to canonical names, and reverting the conversion's changes to query and key rows and Gemma's norms.
Does not: parse the file (artifacts/gguf_file.py does), or know block formats (the gguf package does).
Invariants: at most _CHUNK values are held in float32 beside the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from octavo.artifacts.gguf_file import GGUFFile, GGUFTensor
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError

Item = TypeVar("Item", np.uint8, np.float32)
Values = npt.NDArray[np.float32]

ROPE_FACTORS = "rope_freqs.weight"
SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
)
_CHUNK = 1 << 20  # values dequantised at once; 0.45 s for 135M weights against 0.68 s tensor by tensor (one thread)
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FACTORS: ROPE_FACTORS,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PAIRED_FAMILIES = ("llama", "mistral")  # converted with rotary pairs adjacent instead of half a head apart


class GGUFWeights:
    """A WeightSource over one GGUF file or the parts of a split one."""

    def __init__(self, files: ModelFiles, spec: ModelSpec) -> None:
        self._entries: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
        self._paired_heads = _paired_heads(spec)
        self._norm_offset = 1.0 if spec.family == "gemma3" else 0.0  # the conversion added it
        self._first = files.weights[0]
        for path in files.weights:
            file = GGUFFile.open(path)
            for tensor in file.tensors.values():
                name = canonical_name(tensor.name, spec.family)
                if name in self._entries:
                    raise ModelFileError(path, f"is also in {self._entries[name][0].path.name}", tensor.name)
                if tensor.type not in SUPPORTED_TYPES:
                    known = ", ".join(kind.name for kind in SUPPORTED_TYPES)
                    raise ModelFileError(path, f"has type {tensor.type.name}; {known} are supported", tensor.name)
                self._entries[name] = (file, tensor)
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(
            {name: tensor.shape for name, (_, tensor) in self._entries.items()}
        )

    def path(self, name: str) -> Path:
        """Return the tensor's file, or the first file if none has it."""
        return self._entries[name][0].path if name in self._entries else self._first

    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Dequantise a few rows at a time into `out`, in canonical row order."""
        file, tensor = self._entries[name]
        if len(tensor.shape) == 1:
            heads = self._paired_heads.get(name.split(".")[-2])
            values = dequantize(file.raw(tensor.name), tensor.type)
            if self._norm_offset and name.endswith("norm.weight"):
                values = values - np.float32(self._norm_offset)
            values = values if heads is None else _unpaired(values[:, None], heads)[:, 0]
            out.copy_(torch.from_numpy(values[first_row : first_row + len(out)]))
            return
        rows = self._rows(name)[first_row : first_row + out.shape[0]]
        step = max(1, _CHUNK // out.shape[1])
        for start in range(0, rows.shape[0], step):
            values = dequantize(rows[start : start + step], tensor.type)
            out[start : start + step].copy_(torch.from_numpy(values))

    def raw_rows(self, name: str) -> tuple[npt.NDArray[np.uint8], GGMLQuantizationType]:
        """Return a matrix's bytes in canonical row order: a view of the file, or a copy if its rows were paired."""
        return self._rows(name), self._entries[name][1].type

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        file, tensor = self._entries[name]
        rows = file.raw(tensor.name).reshape(tensor.shape[0], -1)
        heads = self._paired_heads.get(name.split(".")[-2])
        return rows if heads is None else _unpaired(rows, heads)


def canonical_name(name: str, family: str = "llama") -> str:
    """Return Hugging Face's name of a GGUF tensor, or its own name if there is none."""
    match = _LAYER_TENSOR.fullmatch(name)
    names = _GEMMA3_LAYER_NAMES if family == "gemma3" else _LAYER_NAMES
    if match is None or match[2] not in names:
        return _GLOBAL_NAMES.get(name, name)
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


def dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Values:
    """Return the float32 values of whole rows of raw bytes, as a new array."""
    values: Values = quants.dequantize(raw, kind)
    return values if values.flags.writeable else values.copy()  # for float32 it is a view of the file


def _paired_heads(spec: ModelSpec) -> dict[str, int]:
    """Return the projections whose rows are paired, with their number of heads."""
    if spec.family not in _PAIRED_FAMILIES:
        return {}
    return {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads}


def _unpaired(rows: npt.NDArray[Item], num_heads: int) -> npt.NDArray[Item]:
    """Reorder rows, raw or not, from [head, pair, half] to [head, half, pair]; quantisation blocks never span rows."""
    paired = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)
