"""The families of encoders. An entry has the family's configuration keys, tensor names and differences from BERT.

Owns: the entries and the roles of a model's tensors. Does not: read files, compute, or load torch.
Invariant: a BERT-like encoder is one entry here. read_encoder.py and models/encoder.py name no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Names = Mapping[str, tuple[str, ...]]

LINEARS = ("qkv", "output", "up", "down")
# A model's tensors by role, without `.weight` or `.bias`. A linear layer stacks its tensors by output rows. The roles
# of a layer follow the name in `layer`.
BERT_TENSORS: Names = {
    "embedding": ("embeddings.word_embeddings",),
    "positions": ("embeddings.position_embeddings",),
    "token_types": ("embeddings.token_type_embeddings",),
    "embedding_norm": ("embeddings.LayerNorm",),
    "projection": ("embeddings_project",),
    "layer": ("encoder.layer.{}.",),
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
    "head_dense": ("classifier.dense",),
    "head": ("classifier.out_proj",),
}
_POOLER_HEAD: Names = {"head_dense": ("pooler.dense",), "head": ("classifier",)}
_ROPE_TENSORS: Names = {
    "layer": ("layers.{}.",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "attention_norm": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "mlp_norm": ("post_mlp_layernorm",),
    **_POOLER_HEAD,
}


class Positions(Enum):
    """How an encoder knows a token's position."""

    LEARNED = "learned"
    RELATIVE = "relative"  # learned, and a bias of each head by the distance, as in T5
    ROTARY = "rotary"


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """One family; the defaults are BERT's.

    Files. `prefix` begins the names of the encoder's own tensors in a model with a head. `config_keys` maps BERT's keys
    to the family's; `defaults` has the values of keys that a config.json may leave out; `older_keys` maps keys of
    published files to these, and `required` has keys whose other values are refused. Each of `layouts` replaces roles
    of BERT_TENSORS; published files have the names of one of them. `ignored` tensors, by the beginnings of their
    names, belong to other heads.

    Arithmetic. `has_padding_positions`: positions begin after the padding token's id. `is_gated`: the MLP's first
    tensor has the rows of the gate, to which the activation applies, and then those that it multiplies; a layout whose
    `up` has them the other way round is in `swapped_layouts`. `is_pre_norm`: norms precede attention and MLP, as in
    Llama, and a final norm follows; `rms_norm`: they are RMS norms. `biased` are the linear layers with biases; a
    configuration's flags `attention_bias` and `mlp_bias` decide where `has_bias_flags`.
    """

    model_type: str
    prefix: str
    config_keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    older_keys: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[Names, ...] = ({},)
    swapped_layouts: frozenset[int] = frozenset()
    ignored: tuple[str, ...] = ("pooler.", "cls.", "lm_head.")
    positions: Positions = Positions.LEARNED
    has_padding_positions: bool = False
    is_gated: bool = False
    is_pre_norm: bool = False
    rms_norm: bool = False
    biased: frozenset[str] = frozenset(LINEARS)
    has_bias_flags: bool = False
    rope_theta: float = 10000.0
    has_windows: bool = False
    head_activation: str = "tanh"

    def names(self, layout: int, role: str) -> tuple[str, ...]:
        """Return the names of a role's tensors; () if the family has none."""
        return self.layouts[layout].get(role, BERT_TENSORS.get(role, ()))


_ROBERTA = {"type_vocab_size": 2, "pad_token_id": 1}
_NOMIC_LAYER: Names = {
    **_ROPE_TENSORS,
    "embedding_norm": ("emb_ln",),
    "layer": ("encoder.layers.{}.",),
    "qkv": ("attn.Wqkv",),
    "output": ("attn.out_proj",),
    "attention_norm": ("norm1",),
    "up": ("mlp.fc12", "mlp.fc11"),
    "down": ("mlp.fc2",),
    "mlp_norm": ("norm2",),
}
_JINA_HEAD: Names = {"head_dense": ("classifier.dense",), "head": ("classifier.out_proj",)}
_ENTRIES = (
    EncoderFamily("bert", "bert.", layouts=(_POOLER_HEAD,), defaults={"type_vocab_size": 2}),
    EncoderFamily("roberta", "roberta.", defaults=_ROBERTA, has_padding_positions=True),
    EncoderFamily("xlm-roberta", "roberta.", defaults=_ROBERTA, has_padding_positions=True),
    EncoderFamily("camembert", "roberta.", defaults=_ROBERTA, has_padding_positions=True),
    EncoderFamily(
        "electra",
        "electra.",
        defaults={
            "type_vocab_size": 2,
            "embedding_size": 128,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 1024,
        },
        ignored=("generator_", "discriminator_"),
        head_activation="gelu",
    ),
    EncoderFamily(
        "distilbert",
        "distilbert.",
        config_keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        defaults={"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "type_vocab_size": 0},
        layouts=(
            {
                "layer": ("transformer.layer.{}.",),
                "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
                "output": ("attention.out_lin",),
                "attention_norm": ("sa_layer_norm",),
                "up": ("ffn.lin1",),
                "down": ("ffn.lin2",),
                "mlp_norm": ("output_layer_norm",),
                "head_dense": ("pre_classifier",),
                "head": ("classifier",),
            },
        ),
        ignored=("vocab_",),
        head_activation="relu",
    ),
    EncoderFamily(
        "mpnet",
        "mpnet.",
        defaults={"pad_token_id": 1, "relative_attention_num_buckets": 32, "type_vocab_size": 0},
        layouts=(
            {
                "position_bias": ("encoder.relative_attention_bias",),
                "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
                "output": ("attention.attn.o",),
                "attention_norm": ("attention.LayerNorm",),
            },
        ),
        positions=Positions.RELATIVE,
        has_padding_positions=True,
    ),
    EncoderFamily(
        "modernbert",
        "model.",
        config_keys={"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
        defaults={
            "norm_eps": 1e-5,
            "num_hidden_layers": 22,
            "intermediate_size": 1152,
            "max_position_embeddings": 8192,
            "type_vocab_size": 0,
            "local_attention": 128,
            "classifier_activation": "gelu",
            "classifier_bias": False,
            "pad_token_id": 50283,
        },
        layouts=(
            {
                "embedding": ("embeddings.tok_embeddings",),
                "embedding_norm": ("embeddings.norm",),
                "layer": ("layers.{}.",),
                "qkv": ("attn.Wqkv",),
                "output": ("attn.Wo",),
                "attention_norm": ("attn_norm",),
                "up": ("mlp.Wi",),
                "down": ("mlp.Wo",),
                "mlp_norm": ("mlp_norm",),
                "final_norm": ("final_norm",),
                "head_dense": ("head.dense",),
                "head_norm": ("head.norm",),
                "head": ("classifier",),
            },
        ),
        ignored=("head.", "decoder."),
        positions=Positions.ROTARY,
        is_gated=True,
        is_pre_norm=True,
        has_bias_flags=True,
        rope_theta=160000.0,
        has_windows=True,
    ),
    EncoderFamily(
        "nomic_bert",
        "nomic_bert.",
        defaults={"hidden_act": "silu", "max_position_embeddings": 2048, "type_vocab_size": 2},
        older_keys={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
        },
        required={
            "activation_function": "swiglu",
            "prenorm": False,
            "qkv_proj_bias": False,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "rotary_scaling_factor": None,
            "use_rms_norm": False,
        },
        layouts=(_ROPE_TENSORS, _NOMIC_LAYER),
        positions=Positions.ROTARY,
        is_gated=True,
        biased=frozenset(),
        rope_theta=1000.0,
    ),
    EncoderFamily(
        "gte",
        "gte.",
        defaults={"max_position_embeddings": 8192, "type_vocab_size": 1},
        layouts=(
            _ROPE_TENSORS,
            {
                **_ROPE_TENSORS,
                "layer": ("encoder.layer.{}.",),
                "qkv": ("attention.qkv_proj",),
                "output": ("attention.o_proj",),
                "attention_norm": ("attn_ln",),
                "up": ("mlp.up_gate_proj",),
                "mlp_norm": ("mlp_ln",),
            },
        ),
        swapped_layouts=frozenset({1}),
        positions=Positions.ROTARY,
        is_gated=True,
        biased=frozenset({"qkv", "output", "down"}),
        rope_theta=160000.0,
    ),
    EncoderFamily(
        "jina_embeddings_v3",
        "roberta.",
        defaults={
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
        },
        layouts=(
            {**_ROPE_TENSORS, **_JINA_HEAD, "up": ("mlp.fc1",), "down": ("mlp.fc2",)},
            {**_NOMIC_LAYER, **_JINA_HEAD, "qkv": ("mixer.Wqkv",), "output": ("mixer.out_proj",), "up": ("mlp.fc1",)},
        ),
        positions=Positions.ROTARY,
        rope_theta=20000.0,
    ),
    EncoderFamily(
        "eurobert",
        "model.",
        config_keys={"layer_norm_eps": "rms_norm_eps"},
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "type_vocab_size": 0,
            "classifier_pooling": "late",
        },
        layouts=(
            {
                **_ROPE_TENSORS,
                "embedding": ("embed_tokens",),
                "embedding_norm": (),
                "attention_norm": ("input_layernorm",),
                "mlp_norm": ("post_attention_layernorm",),
                "final_norm": ("norm",),
                "head_dense": ("dense",),
                "head": ("classifier",),
            },
        ),
        ignored=("lm_head.",),
        positions=Positions.ROTARY,
        is_gated=True,
        is_pre_norm=True,
        rms_norm=True,
        has_bias_flags=True,
        head_activation="gelu",
    ),
)
ENCODER_FAMILIES = {family.model_type: family for family in _ENTRIES}
