"""The model families. An entry has the family's configuration keys, tensor names and differences from Llama.

Owns: the entries, the parts of a layer, and the sizes that follow from a ModelSpec.
Does not: read files, compute, or load torch.
Invariant: a Llama-like model is one entry here. The readers of config.json and GGUF metadata, the readers of weights
and the decoders use the entries and name no family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from octavo.artifacts.model_spec import ModelSpec
from octavo.errors import ModelFileError


class TensorName(NamedTuple):
    """A tensor's name in safetensors and in GGUF files, without layer and without `.weight` or `.bias`."""

    hf: str
    gguf: str


# The tensors of a model, by role. A family's entry replaces or adds roles. A role that a family does not use
# (q_norm and k_norm without `qk_norm`) has no tensor in its files.
LLAMA_TENSORS: Mapping[str, TensorName] = {
    "embedding": TensorName("model.embed_tokens", "token_embd"),
    "final_norm": TensorName("model.norm", "output_norm"),
    "head": TensorName("lm_head", "output"),
}
LLAMA_LAYER_TENSORS: Mapping[str, TensorName] = {
    "attention_norm": TensorName("input_layernorm", "attn_norm"),
    "q_proj": TensorName("self_attn.q_proj", "attn_q"),
    "k_proj": TensorName("self_attn.k_proj", "attn_k"),
    "v_proj": TensorName("self_attn.v_proj", "attn_v"),
    "o_proj": TensorName("self_attn.o_proj", "attn_output"),
    "q_norm": TensorName("self_attn.q_norm", "attn_q_norm"),
    "k_norm": TensorName("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": TensorName("post_attention_layernorm", "ffn_norm"),
    "gate_proj": TensorName("mlp.gate_proj", "ffn_gate"),
    "up_proj": TensorName("mlp.up_proj", "ffn_up"),
    "down_proj": TensorName("mlp.down_proj", "ffn_down"),
}
# The linear layers of a decoder layer: each stacks the tensors of these roles by output rows, in this order.
LINEARS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class Windows(Enum):
    """The layers that have the configuration's `sliding_window`."""

    NONE = "none"
    ALL = "all"
    UPPER = "upper"  # from `max_window_layers` on, if `use_sliding_window`; never in GGUF files
    PATTERN = "pattern"  # all but every `window_pattern`-th


@dataclass(frozen=True, slots=True)
class Family:
    """One family; the defaults are Llama's. Tensors that the family needs are required in any configuration.

    Files. `model_type` is config.json's and `gguf_architecture` the metadata's (None: `name`). `config_keys` maps
    Llama's keys to the family's; `defaults` has the values of keys that a config.json may leave out. `tensors` maps
    roles to names. Several roles of a linear layer may name one tensor, which has their rows in order. The roles
    `after_attention` and `after_mlp` are norms of attention's and the MLP's outputs. `has_rotary_pairs`: GGUF files
    have the rows of q and k in adjacent pairs instead of half a head apart.

    Arithmetic. `activation` is "silu" or "gelu" (its tanh form). `norm_offset` is added to every norm's weight in
    float32, and a norm with an offset multiplies before it rounds; a GGUF file's weights include the offset.
    `scales_embedding`: the embedding is multiplied by the root of the hidden size. `sliding_rope_theta` is the default
    rope of layers with a window, None if all layers have one rope. `query_scalar_key` is the key of the number by whose
    root scores are divided; None means the head size. GGUF metadata lacks that number: a model of
    `gguf_width_scaled_layers` layers divides by the root of hidden size / number of heads instead.
    """

    name: str
    model_type: str | None = None
    gguf_architecture: str | None = None
    config_keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorName] = field(default_factory=dict)
    has_rotary_pairs: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    norm_offset: float = 0.0
    scales_embedding: bool = False
    rope_theta: float = 10000.0
    sliding_rope_theta: float | None = None
    windows: Windows = Windows.NONE
    window_pattern: int = 6
    query_scalar_key: str | None = None
    gguf_width_scaled_layers: int | None = None

    def has(self, role: str) -> bool:
        """Return True if the family's layers have a tensor of this role."""
        return role in self.tensors or role in LLAMA_LAYER_TENSORS

    def tensor(self, role: str, layer: int | None = None) -> str:
        """Return the canonical (Hugging Face) name of a tensor, without `.weight` or `.bias`."""
        if layer is None:
            return (self.tensors.get(role) or LLAMA_TENSORS[role]).hf
        return f"model.layers.{layer}.{(self.tensors.get(role) or LLAMA_LAYER_TENSORS[role]).hf}"

    def from_gguf(self, name: str) -> tuple[str, str]:
        """Return the role and the canonical name of a GGUF tensor; ("", `name`) if the tensor is unknown."""
        match = _GGUF_LAYER.fullmatch(name)
        if match is not None:
            for role, tensor in {**LLAMA_LAYER_TENSORS, **self.tensors}.items():
                if tensor.gguf == match[2]:
                    return role, f"{self.tensor(role, int(match[1]))}.{match[3]}"
            return "", name
        stem, _, kind = name.rpartition(".")
        for role in LLAMA_TENSORS:
            if (self.tensors.get(role) or LLAMA_TENSORS[role]).gguf == stem:
                return role, f"{self.tensor(role)}.{kind}"
        return "", name


_ENTRIES = (
    Family("llama"),
    Family("mistral", windows=Windows.ALL),
    Family("qwen2", qkv_bias=True, has_rotary_pairs=False, windows=Windows.UPPER),
    Family("qwen3", qk_norm=True, has_rotary_pairs=False, windows=Windows.UPPER),
    Family(
        "gemma3",
        model_type="gemma3_text",
        config_keys={"hidden_act": "hidden_activation"},
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            "bos_token_id": 2,
        },
        tensors={
            "after_attention": TensorName("post_attention_layernorm", "post_attention_norm"),
            "mlp_norm": TensorName("pre_feedforward_layernorm", "ffn_norm"),
            "after_mlp": TensorName("post_feedforward_layernorm", "post_ffw_norm"),
        },
        has_rotary_pairs=False,
        qk_norm=True,
        activation="gelu",
        norm_offset=1.0,
        scales_embedding=True,
        rope_theta=1e6,
        sliding_rope_theta=10000.0,
        windows=Windows.PATTERN,
        query_scalar_key="query_pre_attn_scalar",
        gguf_width_scaled_layers=62,  # the 27B model; llama.cpp also identifies it by its depth
    ),
)
FAMILIES = {family.name: family for family in _ENTRIES}


def family_of_config(model_type: object) -> Family | None:
    """Return the family with this `model_type` in config.json."""
    return next((family for family in FAMILIES.values() if (family.model_type or family.name) == model_type), None)


def family_of_gguf(architecture: object) -> Family | None:
    """Return the family with this `general.architecture` in GGUF metadata."""
    families = FAMILIES.values()
    return next((family for family in families if (family.gguf_architecture or family.name) == architecture), None)


class RoleRows(NamedTuple):
    """The rows of one role of a linear layer: where they are in which tensor (without `.weight` or `.bias`)."""

    role: str
    tensor: str
    first_row: int
    num_rows: int


def linear_roles(spec: ModelSpec, linear: str, layer: int) -> list[RoleRows]:
    """Return the roles of a linear layer, in order."""
    family, sizes = FAMILIES[spec.family], _output_rows(spec)
    rows: dict[str, int] = {}
    found = []
    for role in LINEARS[linear]:
        name = family.tensor(role, layer)
        found.append(RoleRows(role, name, rows.get(name, 0), sizes[role]))
        rows[name] = rows.get(name, 0) + sizes[role]
    return found


def linear_tensors(spec: ModelSpec, linear: str, layer: int) -> dict[str, int]:
    """Return the tensors of a linear layer, in order, with their numbers of rows."""
    return {part.tensor: part.first_row + part.num_rows for part in linear_roles(spec, linear, layer)}


def linear_shape(spec: ModelSpec, linear: str) -> tuple[int, int]:
    """Return the output rows and the inputs of a linear layer."""
    sizes = _output_rows(spec)
    inputs = {"output": sizes["q_proj"], "down": spec.intermediate_size}.get(linear, spec.hidden_size)
    return sum(sizes[role] for role in LINEARS[linear]), inputs


def layer_norms(spec: ModelSpec) -> dict[str, int]:
    """Return the roles of a layer's norms, with their sizes."""
    family = FAMILIES[spec.family]
    norms = {"attention_norm": spec.hidden_size, "mlp_norm": spec.hidden_size}
    norms |= {role: spec.hidden_size for role in ("after_attention", "after_mlp") if family.has(role)}
    return norms | ({"q_norm": spec.head_dim, "k_norm": spec.head_dim} if spec.qk_norm else {})


def _output_rows(spec: ModelSpec) -> dict[str, int]:
    return {
        "q_proj": spec.num_heads * spec.head_dim,
        "k_proj": spec.num_kv_heads * spec.head_dim,
        "v_proj": spec.num_kv_heads * spec.head_dim,
        "o_proj": spec.hidden_size,
        "gate_proj": spec.intermediate_size,
        "up_proj": spec.intermediate_size,
        "down_proj": spec.hidden_size,
    }


def unsupported(path: Path, feature: str) -> ModelFileError:
    """Return the error for an unsupported architecture or feature."""
    return ModelFileError(path, f"{feature} is not supported; supported families: {', '.join(FAMILIES)}")
