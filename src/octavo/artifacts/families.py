"""The model families: one entry each, as family.py describes it.

Owns: the entries, the parts of a layer, and the sizes that follow from a ModelSpec.
Does not: read files, compute, or load torch.
Invariant: a Llama-like model is one entry here. The readers of config.json and GGUF metadata, the readers of weights
and the decoders use the entries and name no family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.artifacts.family import (
    ALL_LINEARS,
    GEMMA3_SIZES,
    LINEARS,
    LLAMA_7B,
    LLAMA_BIAS_KEYS,
    MIXTURE_LINEARS,
    MIXTURE_TENSORS,
    SHARED_LINEARS,
    Family,
    NoRope,
    RoleRows,
    TensorName,
    Windows,
)  # fmt: skip
from octavo.artifacts.mixtures import ExpertMatrix, MixtureFamily
from octavo.artifacts.model_spec import ModelSpec
from octavo.errors import ModelFileError

# Roles that several families name alike.
_NORMS_AFTER = {
    "after_attention": TensorName("post_attention_layernorm", "post_attention_norm"),
    "after_mlp": TensorName("post_feedforward_layernorm", "post_ffw_norm"),
}
_NORMS_AROUND = {**_NORMS_AFTER, "mlp_norm": TensorName("pre_feedforward_layernorm", "ffn_norm")}
_MLP_NORM = TensorName("post_attention_layernorm", "post_attention_norm")  # as Llama's, but in GGUF files
_FUSED_MLP = dict.fromkeys(("gate_proj", "up_proj"), TensorName("mlp.gate_up_proj", "ffn_up"))
_NO_PRE_NORMS = frozenset({"attention_norm", "mlp_norm"})
_NO_GATE = frozenset({"gate_proj"})
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
_PHI3_DEFAULTS = {
    "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 32000,
}  # fmt: skip
_STARCODER2_DEFAULTS = {
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "use_bias": True,
    "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
_SMOLLM3_DEFAULTS = {
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True, "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
_CWM_DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "sliding_window": 8192, "use_sliding_window": True,
}  # fmt: skip
_GEMMA = Family(
    "gemma",
    defaults={**_GEMMA_DEFAULTS, "num_attention_heads": 16, "num_key_value_heads": 16},
    has_rotary_pairs=False,
    activation="gelu_tanh",
    gelu_is_tanh=True,
    norm_offset=1.0,
    scales_embedding=True,
)
_GEMMA2 = replace(
    _GEMMA,
    name="gemma2",
    config_keys={"hidden_act": "hidden_activation"},
    defaults={
        **_GEMMA_DEFAULTS,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    tensors=_NORMS_AROUND,
    gelu_is_tanh=False,
    scalars={
        "query_scalar": "query_pre_attn_scalar",
        "attention_soft_cap": "attn_logit_softcapping",
        "logits_soft_cap": "final_logit_softcapping",
    },
    windows=Windows.PATTERN,
    window_pattern=2,
    gguf_width_scaled_layers=46,  # the 27B model; llama.cpp also identifies it by its depth
)
_OLMO2 = Family(
    "olmo2",
    defaults={"rms_norm_eps": 1e-5},
    tensors=_NORMS_AFTER,
    without=_NO_PRE_NORMS,
    has_rotary_pairs=False,
    qk_norm=True,
    qk_norm_is_wide=True,
    sliding_rope_theta=0.0,
    windows=Windows.PATTERN,  # of OLMo 3, whose GGUF files have OLMo 2's architecture
    window_pattern=4,
)
_GLM4 = Family(
    "glm4",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
    },
    tensors={
        **_FUSED_MLP,
        "after_attention": TensorName("post_self_attn_layernorm", "post_attention_norm"),
        "after_mlp": TensorName("post_mlp_layernorm", "post_ffw_norm"),
    },
    has_rotary_pairs=False,
    bias_keys={"qkv": "attention_bias"},
    rope_is_interleaved=True,
    partial_rotary_factor=0.5,
)
_COHERE = Family(
    "cohere",
    gguf_architecture="command-r",
    config_keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    without=frozenset({"mlp_norm"}),
    has_rotary_pairs=False,
    norm="layer",
    is_parallel=True,
    scalars={"logits_scale": "logit_scale"},
    rope_theta=500000.0,
    rope_is_interleaved=True,
)
_GRANITE = Family(
    "granite",
    defaults={
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    scalars={
        "embedding_scale": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "attention_scale": "attention_multiplier",
        "logits_divisor": "logits_scaling",
    },
)
_ERNIE = Family(
    "ernie4_5",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    has_rotary_pairs=False,
    bias_keys=dict.fromkeys(LINEARS, "use_bias"),
    rope_theta=500000.0,
    rope_is_interleaved=True,
)

_ENTRIES = (
    Family("llama", wrappers=("llava", "llava_next", "idefics3", "smolvlm"), wrapped_defaults=LLAMA_7B),
    Family("mistral", wrappers=("mistral3", "llava", "llava_next"), wrapped_defaults=LLAMA_7B, windows=Windows.ALL),
    Family(
        "qwen2",
        wrappers=("llava", "llava_next", "qwen2_vl", "qwen2_5_vl"),
        text_types=("qwen2_vl_text", "qwen2_5_vl_text"),
        biases=("qkv",),
        has_rotary_pairs=False,
        windows=Windows.UPPER,
    ),
    Family("qwen3", qk_norm=True, has_rotary_pairs=False, windows=Windows.UPPER),
    _GEMMA,
    _GEMMA2,
    replace(
        _GEMMA2,
        name="gemma3",
        model_type="gemma3_text",
        wrappers=("gemma3",),
        wrapped_defaults=GEMMA3_SIZES,
        defaults={
            **_GEMMA_DEFAULTS,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
        },
        qk_norm=True,
        scalars={"query_scalar": "query_pre_attn_scalar", "logits_soft_cap": "final_logit_softcapping"},
        rope_theta=1e6,
        sliding_rope_theta=10000.0,
        window_pattern=6,
        can_see_both_ways=True,
        gguf_width_scaled_layers=62,  # the 27B model
    ),
    replace(_GEMMA2, name="vaultgemma", tensors={"mlp_norm": _NORMS_AROUND["mlp_norm"]}),
    Family(
        "phi3",
        defaults=_PHI3_DEFAULTS,
        tensors={  # several roles in one tensor: their rows follow each other
            **dict.fromkeys(("q_proj", "k_proj", "v_proj"), TensorName("self_attn.qkv_proj", "attn_qkv")),
            **_FUSED_MLP,
        },
        has_rotary_pairs=False,
        windows=Windows.ALL,
    ),
    _OLMO2,
    replace(
        _OLMO2,
        name="olmo3",
        gguf_architecture="olmo2",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        rope_theta=500000.0,
    ),
    Family(
        "exaone4",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        tensors=_NORMS_AFTER,
        without=_NO_PRE_NORMS,
        has_rotary_pairs=False,
        qk_norm=True,
        no_rope=NoRope.FULL,
        windows=Windows.PATTERN,
        window_pattern=4,
    ),
    _GRANITE,
    Family(
        "smollm3",
        defaults=_SMOLLM3_DEFAULTS,
        rope_theta=2e6,
        no_rope=NoRope.LISTED,
        windows=Windows.LISTED,
    ),
    Family(
        "starcoder2",
        config_keys={"rms_norm_eps": "norm_epsilon"},
        defaults=_STARCODER2_DEFAULTS,
        tensors={
            "up_proj": TensorName("mlp.c_fc", "ffn_up"),
            "down_proj": TensorName("mlp.c_proj", "ffn_down"),
        },
        without=_NO_GATE,
        has_rotary_pairs=False,
        bias_keys=dict.fromkeys(LINEARS, "use_bias"),
        activation="gelu_tanh",
        norm="layer",
        norm_bias=True,
        windows=Windows.ALL,
    ),
    _GLM4,
    replace(_GLM4, name="glm", gguf_architecture="chatglm", tensors=_FUSED_MLP),
    _COHERE,
    replace(
        _COHERE,
        name="cohere2",
        gguf_architecture=None,
        defaults={**_COHERE.defaults, "sliding_window": 4096},
        rope_theta=10000.0,
        no_rope=NoRope.FULL,
        windows=Windows.PATTERN,
        window_pattern=4,
    ),
    Family(
        "nemotron",
        config_keys={"rms_norm_eps": "norm_eps"},
        defaults={"max_position_embeddings": 4096, "norm_eps": 1e-5, "bos_token_id": 2, "eos_token_id": 3},
        without=_NO_GATE,
        has_rotary_pairs=False,
        activation="relu2",
        norm="layer",
        norm_bias=True,
        norm_offset=1.0,
        partial_rotary_factor=0.5,
    ),
    Family(
        "stablelm",
        config_keys={"rms_norm_eps": "layer_norm_eps"},
        defaults={"max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0},
        has_rotary_pairs=False,
        bias_keys={"qkv": "use_qkv_bias"},
        norm="layer",
        norm_bias=True,
        partial_rotary_factor=0.25,
    ),
    _ERNIE,
    Family(
        "helium",
        defaults={"head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-8},
        has_rotary_pairs=False,
        bias_keys={**LLAMA_BIAS_KEYS, "output": ""},
        rope_theta=100000.0,
        rope_is_interleaved=True,
    ),
    Family(
        "seed_oss",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True},
        tensors={"mlp_norm": _MLP_NORM},
        has_rotary_pairs=False,
        bias_keys={**LLAMA_BIAS_KEYS, "output": "attention_out_bias"},
    ),
    Family(
        "arcee",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        without=_NO_GATE,
        activation="relu2",
    ),
    Family(
        "ministral",
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096, "use_sliding_window": True},
        windows=Windows.LISTED,
    ),
    Family(
        "cwm",
        defaults=_CWM_DEFAULTS,
        bias_keys={"gate_up": "mlp_bias", "down": "mlp_bias"},
        rope_theta=1e6,
        windows=Windows.LISTED,
    ),
    Family(
        "mixtral",
        gguf_architecture="llama",
        tensors={
            **MIXTURE_TENSORS,
            "router": TensorName("block_sparse_moe.gate", "ffn_gate_inp"),
            "expert_gate": TensorName("block_sparse_moe.experts.w1", "ffn_gate_exps"),
            "expert_up": TensorName("block_sparse_moe.experts.w3", "ffn_up_exps"),
            "expert_down": TensorName("block_sparse_moe.experts.w2", "ffn_down_exps"),
        },
        rope_theta=1e6,
        windows=Windows.ALL,
        mixture=MixtureFamily(is_normalised=True),
    ),
    Family(
        "qwen2_moe",
        gguf_architecture="qwen2moe",
        defaults={"shared_expert_intermediate_size": 5632},
        tensors={
            **MIXTURE_TENSORS,
            "shared_gate": TensorName("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
            "shared_gate_proj": TensorName("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
            "shared_up_proj": TensorName("mlp.shared_expert.up_proj", "ffn_up_shexp"),
            "shared_down_proj": TensorName("mlp.shared_expert.down_proj", "ffn_down_shexp"),
        },
        biases=("qkv",),
        has_rotary_pairs=False,
        windows=Windows.UPPER,
        mixture=MixtureFamily(has_shared_gate=True),
    ),
    Family(
        "qwen3_moe",
        gguf_architecture="qwen3moe",
        tensors=MIXTURE_TENSORS,
        has_rotary_pairs=False,
        qk_norm=True,
        windows=Windows.LISTED,
        mixture=MixtureFamily(gguf_is_normalised=True),
    ),
    Family(
        "olmoe",
        tensors=MIXTURE_TENSORS,
        has_rotary_pairs=False,
        qk_norm=True,
        qk_norm_is_wide=True,
        mixture=MixtureFamily(),
    ),
    Family(
        "gpt_oss",
        gguf_architecture="gpt-oss",
        config_keys={"hidden_act": "expert_act"},  # its `hidden_act` is ignored
        defaults={"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "max_position_embeddings": 131072},
        tensors={
            **MIXTURE_TENSORS,
            "router": TensorName("mlp.router", "ffn_gate_inp"),
            "mlp_norm": _MLP_NORM,
            "sinks": TensorName("self_attn.sinks", "attn_sinks"),
        },
        has_rotary_pairs=False,
        biases=("qkv", "output"),
        activation="clamped_swiglu",
        rope_theta=150000.0,
        windows=Windows.PATTERN,
        window_pattern=2,
        mixture=MixtureFamily(scoring="softmax_of_chosen", has_bias=True, is_interleaved=True, is_transposed=True),
    ),
    replace(
        _GRANITE,
        name="granitemoe",
        tensors={
            **MIXTURE_TENSORS,
            "router": TensorName("block_sparse_moe.router.layer", "ffn_gate_inp"),
            "expert_gate": TensorName("block_sparse_moe.experts.gate_proj", "ffn_gate_exps"),
            "expert_up": TensorName("block_sparse_moe.experts.up_proj", "ffn_up_exps"),
            "expert_down": TensorName("block_sparse_moe.experts.down_proj", "ffn_down_exps"),
        },
        mixture=MixtureFamily(
            scoring="softmax_of_chosen",
            gate_up="block_sparse_moe.input_linear.weight",
            down="block_sparse_moe.output_linear.weight",
        ),
    ),
    replace(
        _ERNIE,
        name="ernie4_5_moe",
        gguf_architecture="ernie4_5-moe",
        defaults={
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_norm_min": 1e-12,
            "tie_word_embeddings": True,
        },
        tensors={
            **MIXTURE_TENSORS,
            "choice_bias": TensorName("mlp.moe_statics.e_score_correction", "exp_probs_b"),
        },
        mixture=MixtureFamily(is_normalised=True, has_choice_bias=True),
    ),
    Family(
        "dots1",
        defaults={"use_sliding_window": True, "max_window_layers": 62},
        tensors=MIXTURE_TENSORS,
        has_rotary_pairs=False,
        qk_norm=True,
        windows=Windows.UPPER,
        mixture=MixtureFamily(scoring="sigmoid", has_choice_bias=True),
    ),
    Family(
        "glm4_moe",
        gguf_architecture="glm4moe",
        defaults={"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
        tensors={**MIXTURE_TENSORS, "mlp_norm": _MLP_NORM},
        bias_keys={"qkv": "attention_bias"},
        has_rotary_pairs=False,
        partial_rotary_factor=0.5,
        mixture=MixtureFamily(scoring="sigmoid", has_choice_bias=True),
    ),
)
FAMILIES = {family.name: family for family in _ENTRIES}


def family_of_config(model_type: object) -> Family | None:
    """Return the family with this `model_type` in config.json."""
    return next((family for family in FAMILIES.values() if (family.model_type or family.name) == model_type), None)


def family_of_wrapper(model_type: object, text_type: object) -> Family | None:
    """Return the family of the `text_config` of a checkpoint with these model types, outside and inside."""
    families = (family for family in FAMILIES.values() if model_type in family.wrappers)
    types = ((family, (family.model_type or family.name, *family.text_types)) for family in families)
    return next((family for family, names in types if text_type in names), None)


def family_of_gguf(architecture: object, has_experts: bool = False) -> Family | None:
    """Return the family with this `general.architecture` in GGUF metadata, among those with or without experts."""
    families = (family for family in FAMILIES.values() if (family.mixture is not None) == has_experts)
    return next((family for family in families if (family.gguf_architecture or family.name) == architecture), None)


def linear_roles(spec: ModelSpec, linear: str, layer: int) -> list[RoleRows]:
    """Return the roles of a linear layer, in order."""
    family, sizes = FAMILIES[spec.family], _output_rows(spec)
    rows: dict[str, int] = {}
    found = []
    for role in filter(family.has, ALL_LINEARS[linear]):
        name = family.tensor(role, layer)
        found.append(RoleRows(role, name, rows.get(name, 0), sizes[role]))
        rows[name] = rows.get(name, 0) + sizes[role]
    return found


def linear_tensors(spec: ModelSpec, linear: str, layer: int) -> dict[str, int]:
    """Return the tensors of a linear layer, in order, with their numbers of rows."""
    return {part.tensor: part.first_row + part.num_rows for part in linear_roles(spec, linear, layer)}


def linear_shape(spec: ModelSpec, linear: str) -> tuple[int, int]:
    """Return the output rows and the inputs of a linear layer."""
    family, sizes = FAMILIES[spec.family], _output_rows(spec)
    inputs = {"output": sizes["q_proj"], "down": spec.intermediate_size}
    if spec.mixture is not None:
        inputs |= {"expert_down": spec.mixture.intermediate_size, "shared_down_proj": spec.mixture.shared_size}
    return sum(sizes[role] for role in filter(family.has, ALL_LINEARS[linear])), inputs.get(linear, spec.hidden_size)


def layer_linears(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """Return the names of a layer's linear layers."""
    mixture = spec.mixture
    if mixture is None or layer not in mixture.layers:
        return tuple(LINEARS)
    return ("qkv", "output", *MIXTURE_LINEARS, *(SHARED_LINEARS if mixture.shared_size else ()))


def has_bias(spec: ModelSpec, linear: str) -> bool:
    """Return True if the tensors of a linear layer have biases."""
    return linear in spec.biases or (linear in MIXTURE_LINEARS and spec.mixture is not None and spec.mixture.has_bias)


def expert_matrices(spec: ModelSpec) -> Iterator[ExpertMatrix]:
    """Yield what files may have in another form: the experts' matrices and biases, and the router's vectors."""
    family, mixture = FAMILIES[spec.family], spec.mixture
    if mixture is None:
        return
    assert family.mixture is not None, "only its families have mixtures"
    names, count, size, hidden = family.mixture, mixture.num_experts, mixture.intermediate_size, spec.hidden_size
    step = 2 if names.is_interleaved else 1
    for layer in mixture.layers:
        up, down = (f"model.layers.{layer}.{whole}" for whole in (names.gate_up, names.down))
        of_roles = (("expert_gate", up, size, hidden, 0, step, 2), ("expert_down", down, hidden, size, 0, 1, 1),
                    ("expert_up", up, size, hidden, 1 if step == 2 else size, step, 2))  # fmt: skip
        for role, whole, rows, inputs, first, every, parts in of_roles:
            name, place = family.tensor(role, layer), (first, every, parts * rows)
            yield ExpertMatrix(f"{name}.weight", count, rows, inputs, whole, *place, names.is_transposed)
            if mixture.has_bias:
                yield ExpertMatrix(f"{name}.bias", count, rows, 0, f"{whole}_bias", *place)
        if family.has("sinks"):
            name = family.tensor("sinks", layer)
            yield ExpertMatrix(f"{name}.weight", 1, spec.num_heads, 0, name, rows_of_expert=spec.num_heads)
        if mixture.has_choice_bias:
            name = family.tensor("choice_bias", layer)
            yield ExpertMatrix(f"{name}.bias", count, 1, 0, f"{name}_bias")
        if mixture.has_shared_gate:
            name = f"{family.tensor('shared_gate', layer)}.weight"
            yield ExpertMatrix(name, 1, 1, hidden, name)


def layer_norms(spec: ModelSpec) -> dict[str, int]:
    """Return the roles of a layer's norms, with their sizes."""
    family = FAMILIES[spec.family]
    roles = ("attention_norm", "mlp_norm", "after_attention", "after_mlp")
    norms = {role: spec.hidden_size for role in roles if family.has(role)}
    if not spec.qk_norm:
        return norms
    heads = (spec.num_heads, spec.num_kv_heads) if family.qk_norm_is_wide else (1, 1)
    return norms | {"q_norm": heads[0] * spec.head_dim, "k_norm": heads[1] * spec.head_dim}


def scales(family: Family, hidden_size: int, scalars: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the fields of a ModelSpec that the values of the family's `scalars` stand for."""
    found = {name: value for name, value in scalars.items() if value is not None}
    scalar, divisor = found.pop("query_scalar", None), found.pop("logits_divisor", None)
    if scalar is not None:
        found["attention_scale"] = scalar**-0.5 if scalar > 0.0 else scalar
    if divisor is not None:
        found["logits_scale"] = 1.0 / divisor if divisor else divisor
    if family.scales_embedding:
        found["embedding_scale"] = hidden_size**0.5 if hidden_size > 0 else 1.0
    return found


def _output_rows(spec: ModelSpec) -> dict[str, int]:
    mixture = spec.mixture
    of_mixture = {}
    if mixture is not None:
        count, rows = mixture.num_experts, mixture.num_experts * mixture.intermediate_size
        of_mixture = {
            "router": count,
            "shared_gate": 1,
            "expert_gate": rows,
            "expert_up": rows,
            "expert_down": count * spec.hidden_size,
            "shared_gate_proj": mixture.shared_size,
            "shared_up_proj": mixture.shared_size,
            "shared_down_proj": spec.hidden_size,
        }
    return of_mixture | {
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
    error = ModelFileError(
        path, f"{feature} is not supported; supported families: {', '.join(FAMILIES)}; others may run from safetensors"
    )
    error.unsupported = feature
    return error
