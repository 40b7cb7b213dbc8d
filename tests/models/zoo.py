"""Model types that Octavo serves, a row each: what tests build tiny models of, and what docs/models.md lists.

Owns: the rows, as data. Does not: load torch or transformers (tests/models/zoo_checks.py does).
A row's settings are those of transformers' configuration class, over SIZES. To add a model type, add a row; a second
row of a type needs a label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB_SIZE = 200
MAX_LEN = 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class ModelType:
    """A tiny model of one type. `windows` are the sizes of its sliding windows; `experts` counts those of a layer.

    `path` is the decoder that must serve it: "native" or "transformers". `without` names entries of SIZES that the
    configuration class has not. `embedding` is the spread of the embedding's weights: where a model
    multiplies them, a large one wins the logits, and the text is one token again and again. `has_ranks`: the model
    can be divided among ranks.
    """

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    path: str = "native"
    windows: tuple[int, ...] = ()
    experts: int = 0
    without: tuple[str, ...] = ()
    embedding: float = 0.4
    has_ranks: bool = True

    @property
    def name(self) -> str:
        """The row's name in tests and tables."""
        return f"{self.model_type} {self.label}".strip()

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the configuration class."""
        return {**{key: value for key, value in SIZES.items() if key not in self.without}, **self.settings}


_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 1.9], "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
}  # fmt: skip
_GEMMA = {
    "num_hidden_layers": 3, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
_WINDOWS = {"num_hidden_layers": 4, "sliding_window": 16}
_BIASES = {"attention_bias": True, "mlp_bias": True}

DENSE = (
    ModelType("llama"),
    ModelType("llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}, "llama3 rope"),
    ModelType("mistral", {"sliding_window": None}),
    ModelType("mistral", {"sliding_window": 16}, "with windows", windows=(16,)),
    ModelType("qwen2"),
    ModelType(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        "with windows",
        windows=(24,),
    ),
    ModelType("qwen3", {"head_dim": 32}),
    ModelType(
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
        windows=(16,),
        embedding=0.05,
    ),
    ModelType("llama", _BIASES, "with biases"),
    ModelType("llama", {"rope_parameters": _YARN}, "yarn rope"),
    ModelType("llama", {"rope_parameters": {**_YARN, "truncate": False}}, "yarn rope, not truncated"),
    ModelType(
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "dynamic rope"
    ),
    ModelType("llama", {"hidden_act": "gelu"}, "exact gelu"),
    ModelType("gemma", {"head_dim": 32, "tie_word_embeddings": True}, embedding=0.05),
    ModelType(
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 1.0},
        windows=(16,),
        embedding=0.05,
    ),
    ModelType("vaultgemma", _GEMMA, windows=(16,), embedding=0.05),
    ModelType("phi3", {"sliding_window": 16}, windows=(16,)),
    ModelType(
        "phi3",
        {"original_max_position_embeddings": MAX_LEN, "rope_parameters": {**_LONGROPE, "factor": 8.0}},
        "longrope",
    ),
    ModelType("olmo2", has_ranks=False),
    ModelType("olmo3", _WINDOWS, windows=(16,), has_ranks=False),
    ModelType("exaone4", _WINDOWS, windows=(16,)),
    ModelType(
        "granite",
        {
            **_BIASES,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
            "logits_scaling": 0.5,
        },
    ),
    ModelType("smollm3", {"num_hidden_layers": 4}),
    ModelType("starcoder2", {"sliding_window": 16}, windows=(16,)),
    ModelType("glm", {"head_dim": 16}),
    ModelType("glm4", {"head_dim": 16}),
    ModelType("cohere", {"logit_scale": 0.5, "attention_bias": True}),
    ModelType("cohere2", {**_WINDOWS, "logit_scale": 0.5, "tie_word_embeddings": True}, windows=(16,)),
    ModelType("nemotron", {"mlp_bias": True}),
    ModelType("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    ModelType("ernie4_5", {"head_dim": 32, "use_bias": True}),
    ModelType("helium", {"head_dim": 16}),
    ModelType("seed_oss", {"head_dim": 32, "attention_out_bias": True}),
    ModelType("arcee", {"mlp_bias": True}),
    ModelType("ministral", {"sliding_window": 16, "head_dim": 16}, windows=(16,)),
    ModelType("cwm", {**_WINDOWS, "head_dim": 32}, windows=(16,)),
)

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1}

MIXTURES = (
    ModelType("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, experts=4, has_ranks=False),
    ModelType(
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": True},
        experts=8,
        has_ranks=False,
    ),
    ModelType(
        "qwen2_moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 64, "num_hidden_layers": 3, "decoder_sparse_step": 2},
        "with dense layers",
        experts=8,
        has_ranks=False,
    ),
    ModelType(
        "qwen3_moe",
        {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]},
        experts=8,
        has_ranks=False,
    ),
    ModelType("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}, experts=8, has_ranks=False),
    ModelType(
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
        windows=(16,),
        experts=4,
        has_ranks=False,
    ),
    ModelType(
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
        },
        experts=4,
        has_ranks=False,
        embedding=0.2,
    ),
    ModelType(
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "head_dim": 16},
        experts=8,
        has_ranks=False,
    ),
    ModelType(
        "dots1",
        {**_ROUTED, "first_k_dense_replace": 1, "sliding_window": None, "head_dim": 16},
        experts=8,
        has_ranks=False,
    ),
    ModelType(
        "glm4_moe",
        {
            **_ROUTED,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "head_dim": 16,
            "attention_bias": True,
        },
        experts=8,
        has_ranks=False,
    ),
)

ROWS = (*DENSE, *MIXTURES)
