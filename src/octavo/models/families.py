"""The model families as data.

Owns: what distinguishes one family from another, the tensors of a layer, and how they are fused.
Does not: compute, read files, or load torch. A Llama-like model is one entry here and one row of the tests.
Sizes follow from the ModelSpec.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.artifacts.model_spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
LAYER = "model.layers.{}."
ATTENTION_NORM = "input_layernorm.weight"
Q_NORM = "self_attn.q_norm.weight"
K_NORM = "self_attn.k_norm.weight"


@dataclass(frozen=True, slots=True)
class Fused:
    """One linear layer made of several of the checkpoint's, stacked by output rows in this order."""

    module: str
    parts: tuple[str, ...]


QKV = Fused("self_attn", ("q_proj", "k_proj", "v_proj"))
GATE_UP = Fused("mlp", ("gate_proj", "up_proj"))
OUTPUT = Fused("self_attn", ("o_proj",))
DOWN = Fused("mlp", ("down_proj",))


@dataclass(frozen=True, slots=True)
class Family:
    """One family; the defaults are Llama's. Tensors that a family needs are required, whatever the configuration says.

    `norm_after_attention` and `norm_after_mlp` are norms of the outputs of a layer's halves. `norm_offset` is added to
    every norm's weight, in float32, and such norms multiply before they round. `gate` is "silu" or "gelu".
    With `scales_embedding` the embedding is multiplied by the root of the hidden size.
    """

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    mlp_norm: str = "post_attention_layernorm.weight"
    norm_after_attention: str | None = None
    norm_after_mlp: str | None = None
    norm_offset: float = 0.0
    gate: str = "silu"
    scales_embedding: bool = False


_LIST = (
    Family("llama"),
    Family("mistral"),
    Family("qwen2", qkv_bias=True),
    Family("qwen3", qk_norm=True),
    Family(
        "gemma3",
        qk_norm=True,
        mlp_norm="pre_feedforward_layernorm.weight",
        norm_after_attention="post_attention_layernorm.weight",
        norm_after_mlp="post_feedforward_layernorm.weight",
        norm_offset=1.0,
        gate="gelu",
        scales_embedding=True,
    ),
)
FAMILIES = {family.name: family for family in _LIST}


def fused_rows(spec: ModelSpec, fused: Fused) -> tuple[int, ...]:
    """Return the output rows of each part."""
    rows = {
        "q_proj": spec.num_heads * spec.head_dim,
        "k_proj": spec.num_kv_heads * spec.head_dim,
        "v_proj": spec.num_kv_heads * spec.head_dim,
        "o_proj": spec.hidden_size,
        "gate_proj": spec.intermediate_size,
        "up_proj": spec.intermediate_size,
        "down_proj": spec.hidden_size,
    }
    return tuple(rows[part] for part in fused.parts)


def columns(spec: ModelSpec, fused: Fused) -> int:
    """Return the number of inputs, which is the same for all parts."""
    if fused is OUTPUT:
        return spec.num_heads * spec.head_dim
    return spec.intermediate_size if fused is DOWN else spec.hidden_size
