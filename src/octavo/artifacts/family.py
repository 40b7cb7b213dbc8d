"""What a model family is: its configuration keys, its tensors' names, and its differences from Llama.

Owns: Family, whose defaults are Llama's, and the names of Llama's tensors and of mixtures'.
Does not: have entries (families.py does), read files, compute, or load torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from octavo.artifacts.mixtures import MixtureFamily


class TensorName(NamedTuple):
    """A tensor's name in safetensors and in GGUF files, without layer and without `.weight` or `.bias`."""

    hf: str
    gguf: str


class RoleRows(NamedTuple):
    """The rows of one role of a linear layer: where they are in which tensor (without `.weight` or `.bias`)."""

    role: str
    tensor: str
    first_row: int
    num_rows: int


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
# The linear layers of a decoder layer: each stacks the tensors of these roles by output rows, in this order. A role
# that a family is without has no rows (an MLP without `gate_proj` is not gated).
LINEARS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
# Those of a layer with a mixture of experts instead of an MLP; experts' matrices are stacked.
MIXTURE_LINEARS: Mapping[str, tuple[str, ...]] = {
    "router": ("router", "shared_gate"),
    "expert_gate": ("expert_gate",),
    "expert_up": ("expert_up",),
    "expert_down": ("expert_down",),
}
SHARED_LINEARS: Mapping[str, tuple[str, ...]] = {
    "shared_gate_proj": ("shared_gate_proj",),
    "shared_up_proj": ("shared_up_proj",),
    "shared_down_proj": ("shared_down_proj",),
}
ALL_LINEARS = {**LINEARS, **MIXTURE_LINEARS, **SHARED_LINEARS}
MIXTURE_TENSORS: Mapping[str, TensorName] = {
    "router": TensorName("mlp.gate", "ffn_gate_inp"),
    "choice_bias": TensorName("mlp.gate.e_score_correction", "exp_probs_b"),
    "expert_gate": TensorName("mlp.experts.gate_proj", "ffn_gate_exps"),
    "expert_up": TensorName("mlp.experts.up_proj", "ffn_up_exps"),
    "expert_down": TensorName("mlp.experts.down_proj", "ffn_down_exps"),
    "shared_gate_proj": TensorName("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    "shared_up_proj": TensorName("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    "shared_down_proj": TensorName("mlp.shared_experts.down_proj", "ffn_down_shexp"),
}
# Configuration keys that give all tensors of a linear layer a bias.
LLAMA_BIAS_KEYS: Mapping[str, str] = {
    "qkv": "attention_bias", "output": "attention_bias", "gate_up": "mlp_bias", "down": "mlp_bias",
}  # fmt: skip
LLAMA_7B = {  # LlamaConfig's defaults, which a `text_config` leaves out
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000,
}  # fmt: skip
GEMMA3_SIZES = {  # and those of Gemma3TextConfig
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "vocab_size": 262208,
}  # fmt: skip
NO_ROPE_INTERVAL = 4  # see NoRope.LISTED; GGUF metadata lacks it
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


class Windows(Enum):
    """The layers that have the configuration's `sliding_window`."""

    NONE = "none"
    ALL = "all"
    UPPER = "upper"  # from `max_window_layers` on, if `use_sliding_window`; never in GGUF files
    PATTERN = "pattern"  # all but every `window_pattern`-th
    LISTED = "listed"  # those that `layer_types` lists (without it, all), if `use_sliding_window`


class NoRope(Enum):
    """The layers without rotary positions."""

    NONE = "none"
    LISTED = "listed"  # `no_rope_layers` has 0 for these; without it, every `no_rope_layer_interval`-th
    FULL = "full"  # layers with full attention, in a model that has windows


@dataclass(frozen=True, slots=True)
class Family:
    """One family; the defaults are Llama's. Tensors that the family needs are required in any configuration.

    Files. `model_type` is config.json's and `gguf_architecture` the metadata's (None: `name`). `wrappers` are the
    model types of checkpoints whose `text_config` is of this family (or has one of `text_types`), and may leave out
    `wrapped_defaults`. `config_keys` maps Llama's keys to the family's; `defaults` has the values of keys that a
    config.json may leave out. `tensors` maps roles to names, and `without` names Llama's roles that the family has no
    tensors of. Several roles of a linear layer may name one tensor, which has their rows in order. The roles
    `after_attention` and `after_mlp` are norms of attention's and the MLP's outputs. `has_rotary_pairs`: GGUF files
    have the rows of q and k in adjacent pairs instead of half a head apart. `biases` are linear layers with a bias in
    every model, `bias_keys` the keys that give others one.

    Arithmetic. `activation` is "silu", "gelu" (by the error function), "gelu_tanh", "relu" or "relu2" (its square);
    config.json may name another one (`gelu_is_tanh`: there, "gelu" means the tanh form). `norm` is "rms" or "layer",
    with biases if `norm_bias`. `norm_offset` is added to every norm's weight in float32, and a norm with an offset
    multiplies before it rounds; a GGUF file's weights include the offset. `qk_norm_is_wide`: one norm over all query
    (and one over all key) heads of a token, not one a head. `is_parallel`: attention and MLP both read the layer's
    input; without `mlp_norm`, both read attention's norm of it. `scales_embedding`: the embedding is multiplied by the
    root of the hidden size. `scalars` maps fields of ModelSpec, "query_scalar" (scores are divided by its root) and
    "logits_divisor" to the family's keys. GGUF metadata lacks the query scalar: a model of `gguf_width_scaled_layers`
    layers divides by the root of hidden size / number of heads instead. `can_see_both_ways`: with the configuration's
    `use_bidirectional_attention` it is an encoder, whose windows are half on each side of a token.

    `mixture`: some or all layers have a mixture of experts instead of the MLP.

    Positions. `sliding_rope_theta` is the default rope of layers with a window, None if all layers have one rope.
    `rope_is_interleaved`: neighbours are rotated as pairs, in both kinds of files. `partial_rotary_factor` is the
    default share of a head that is rotated.
    """

    name: str
    model_type: str | None = None
    gguf_architecture: str | None = None
    wrappers: tuple[str, ...] = ()
    text_types: tuple[str, ...] = ()
    wrapped_defaults: Mapping[str, Any] = field(default_factory=dict)
    config_keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, TensorName] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    has_rotary_pairs: bool = True
    biases: tuple[str, ...] = ()
    bias_keys: Mapping[str, str] = field(default_factory=lambda: LLAMA_BIAS_KEYS)
    qk_norm: bool = False
    qk_norm_is_wide: bool = False
    activation: str = "silu"
    gelu_is_tanh: bool = False
    norm: str = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0
    is_parallel: bool = False
    scales_embedding: bool = False
    scalars: Mapping[str, str] = field(default_factory=dict)
    gguf_width_scaled_layers: int | None = None
    can_see_both_ways: bool = False
    rope_theta: float = 10000.0
    sliding_rope_theta: float | None = None
    rope_is_interleaved: bool = False
    partial_rotary_factor: float = 1.0
    no_rope: NoRope = NoRope.NONE
    windows: Windows = Windows.NONE
    window_pattern: int = 6
    mixture: MixtureFamily | None = None

    def has(self, role: str) -> bool:
        """Return True if the family's layers have a tensor of this role."""
        return role in self.tensors or (role in LLAMA_LAYER_TENSORS and role not in self.without)

    def names(self, role: str) -> TensorName:
        """Return the names of the tensor of a role in a layer."""
        return self.tensors.get(role) or LLAMA_LAYER_TENSORS[role]

    def tensor(self, role: str, layer: int | None = None) -> str:
        """Return the canonical (Hugging Face) name of a tensor, without `.weight` or `.bias`."""
        if layer is None:
            return (self.tensors.get(role) or LLAMA_TENSORS[role]).hf
        return f"model.layers.{layer}.{self.names(role).hf}"

    def from_gguf(self, name: str) -> tuple[str, str]:
        """Return the role and the canonical name of a GGUF tensor; ("", `name`) if the tensor is unknown."""
        match = _GGUF_LAYER.fullmatch(name)
        if match is not None:
            for role, tensor in {**LLAMA_LAYER_TENSORS, **self.tensors}.items():
                if tensor.gguf == match[2] and self.has(role):
                    return role, f"{self.tensor(role, int(match[1]))}.{match[3]}"
            return "", name
        stem, _, kind = name.rpartition(".")
        for role in LLAMA_TENSORS:
            if (self.tensors.get(role) or LLAMA_TENSORS[role]).gguf == stem:
                return role, f"{self.tensor(role)}.{kind}"
        return "", name
