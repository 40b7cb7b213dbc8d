"""Describe a model without a native family from its config.json, for the transformers backend.

Owns: the names that families of transformers give to sizes; the refusal of models whose layers keep a state other than
keys and values, by what config.json says about the architecture.
Does not: load transformers (models/transformers_decoder.py does), or know families. Sizes that the backend finds out
while loading, such as each layer's heads, are estimates here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.artifacts.model_spec import ModelSpec
from octavo.errors import ModelFileError

# The names of each size, most frequent first. Of several, the first that the file has counts.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "d_ff")
_MAX_LEN = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "layernorm_epsilon")

OTHER_MODEL = "; take another model (octavo list)"
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_CAUSAL = ("CausalLM", "LMHeadModel", "ConditionalGeneration", "DoubleHeadsModel")
# Settings of layers that keep a state of their own; a configuration that has one with a value has such layers.
_STATE_KEYS = (
    "ssm_cfg", "ssm_state_size", "state_size", "mamba_d_state", "mamba_d_conv", "mamba_n_heads", "d_state",
    "conv_kernel", "conv_L_cache", "linear_num_key_heads", "linear_num_value_heads", "attn_layer_period", "lru_width",
    "rescale_every", "mlstm_round_up_to_multiple_of", "linear_attn_config",
)  # fmt: skip


def read_transformers_spec(
    path: Path, config: Mapping[str, Any], generation: Mapping[str, Any], reason: str
) -> ModelSpec:
    """Return the specification of a model that runs through transformers; `reason` says why it is not native.

    `path` is config.json's. Raises ModelFileError if the model keeps a state other than keys and values, has no causal
    decoder, or lacks a size.
    """
    config = _text_part(config)
    _refuse(path, config, reason)
    hidden, heads = _size(path, config, _HIDDEN), _size(path, config, _HEADS)
    layers, vocab_size = _size(path, config, _LAYERS), _size(path, config, ("vocab_size",))
    eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    bos = _ids(config.get("bos_token_id"))
    return ModelSpec(
        family=str(config["model_type"]),
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_size(path, config, _KV_HEADS, heads),
        head_dim=_head_dim(path, config, hidden // max(heads, 1)),
        intermediate_size=_size(path, config, _INTERMEDIATE, 4 * hidden),
        rms_norm_eps=_number(config, _NORM_EPS, 1e-5),
        rope_theta=_number(config, ("rope_theta", "rotary_emb_base"), 10000.0),
        max_model_len=_size(path, config, _MAX_LEN, 2048),
        tie_word_embeddings=config.get("tie_word_embeddings") is True,
        layer_windows=_windows(config, layers),
        eos_token_ids=tuple(i for i in eos if 0 <= i < vocab_size),
        bos_token_id=bos[0] if bos and 0 <= bos[0] < vocab_size else None,
        dtype=_dtype(config),
        path="transformers",
        path_reason=reason,
    ).check(path)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the text decoder; those of a model with several parts are nested."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(part := config.get(key), dict):
            outer = {name: value for name, value in config.items() if name not in part and name != key}
            return {**outer, **part, "model_type": part.get("model_type", config.get("model_type"))}
    return config


def _refuse(path: Path, config: Mapping[str, Any], reason: str) -> None:
    """Raise ModelFileError for what the backend cannot run."""
    why = None
    architectures = [str(name) for name in _list(config, "architectures")]
    kinds = {str(kind) for kind in _list(config, "layer_types")} - _ATTENTION_TYPES
    # hybrid families name the kind of each layer; a model of attention alone keeps the settings of the others
    states = [] if config.get("layer_types") else [key for key in _STATE_KEYS if config.get(key)]
    if not isinstance(config.get("model_type"), str):
        why = "config.json has no model_type"
    elif config.get("is_encoder_decoder"):
        why = "it is an encoder-decoder, and only decoders run"
    elif config.get("quantization_config") is not None:
        why = "its weights are quantized, and quantized weights run on the native path only"
    elif kinds:
        why = f"layers of type {', '.join(sorted(kinds))} keep a state other than keys and values"
    elif states:
        why = f"{states[0]} describes layers that keep a state other than keys and values"
    elif architectures and not any(name.endswith(_CAUSAL) for name in architectures):
        why = f"{architectures[0]} is not a causal language model"
    if why is not None:
        raise ModelFileError(path, f"{reason}; it cannot run through transformers either: {why}{OTHER_MODEL}")


def _head_dim(path: Path, config: Mapping[str, Any], default: int) -> int:
    parts = [part for key in ("qk_nope_head_dim", "qk_rope_head_dim") if isinstance(part := config.get(key), int)]
    if len(parts) == 2:
        return sum(parts)
    return _size(path, config, ("head_dim", "attention_head_dim", "kv_channels"), default)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return the windows that the configuration names, for memory estimates; the backend finds the real ones."""
    kinds, window = _list(config, "layer_types"), config.get("sliding_window")
    if len(kinds) != layers or not isinstance(window, int) or window < 1:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _size(path: Path, config: Mapping[str, Any], keys: Sequence[str], default: int | None = None) -> int:
    """Return the first of these settings that is there; lists of one size per layer count as their largest."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, list) and value and all(isinstance(entry, int) for entry in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if default is None:
        raise ModelFileError(path, f"has none of {', '.join(keys)}; the model's size is not known")
    return default


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key)
    return value if isinstance(value, list) else []


def _number(config: Mapping[str, Any], keys: Sequence[str], default: float) -> float:
    values = (config.get(key) for key in keys)
    found = (float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool))
    return next((value for value in found if value > 0), default)


def _ids(value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in ("float32", "float16", "bfloat16") else "float32"
