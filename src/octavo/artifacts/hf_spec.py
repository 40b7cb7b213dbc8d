"""Read a ModelSpec from config.json and generation_config.json.

Owns: the keys of Hugging Face configurations, old (rope_theta, torch_dtype) and new (rope_parameters, dtype).
Does not: guess: an unknown setting that would change the arithmetic is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.artifacts.json_file import read_json
from octavo.artifacts.spec import FAMILIES, ModelSpec, RopeScaling, unsupported
from octavo.errors import ModelFileError

_DTYPES = ("float32", "float16", "bfloat16")
_MODEL_TYPES = {**{family: family for family in FAMILIES if family != "gemma3"}, "gemma3_text": "gemma3"}
_MAX_WINDOW_LAYERS = 1 << 16  # of a model with windows: bounds the table of layer types
_FULL, _SLIDING = "full_attention", "sliding_attention"
# transformers' defaults for keys that a family's file leaves out, if they are not Llama's.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
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
    }
}
_DEFAULT_THETA = {"gemma3": 1e6}
_SOFTCAPPING = ("final_logit_softcapping", "attn_logit_softcapping")
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_hf_spec(root: Path) -> ModelSpec:
    """Read the specification of a model folder. Raises ModelFileError."""
    config = _Config(root / "config.json")
    kind = config.values.get("model_type")
    family = _MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise unsupported(config.path, f"model_type {kind!r}")
    config.values = {**_DEFAULTS.get(family, {}), **config.values}
    generation = _Config(root / "generation_config.json", optional=True)
    _refuse_unknown_arithmetic(config, family)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    vocab_size = config.integer("vocab_size")
    dtype = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ModelFileError(config.path, f"dtype {dtype!r} is not supported; one of {', '.join(_DTYPES)} is")
    eos = generation.ids("eos_token_id") or config.ids("eos_token_id")
    bos = config.ids("bos_token_id")
    return ModelSpec(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // max(heads, 1)),
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=config.number("rope_theta", _DEFAULT_THETA.get(family, 10000.0), _rope_table(config)),
        max_model_len=config.integer("max_position_embeddings", 2048),
        rope_scaling=_rope_scaling(config),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        layer_windows=_layer_windows(config, family),
        sliding_rope_theta=_sliding_rope_theta(config) if family == "gemma3" else None,
        query_scalar=config.number("query_pre_attn_scalar", 0.0) if family == "gemma3" else None,
        eos_token_ids=tuple(i for i in eos if 0 <= i < vocab_size),
        bos_token_id=bos[0] if bos and 0 <= bos[0] < vocab_size else None,
        dtype=dtype,
        generation=generation.numbers(_GENERATION_KEYS) if generation.flag("do_sample") else {},
    ).check(config.path)


class _Config:
    """A JSON object with typed getters; every failure names the file and the key."""

    def __init__(self, path: Path, optional: bool = False) -> None:
        self.path = path
        self.values: Mapping[str, Any] = {} if optional and not path.is_file() else read_json(path)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{key} is {value!r}; a whole number is needed")
        return value

    def number(self, key: str, default: float, table: Mapping[str, Any] | None = None) -> float:
        value = (self.values if table is None else table).get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{key} is {value!r}; a number is needed")
        return float(value)

    def flag(self, key: str) -> bool:
        return self.values.get(key) is True

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelFileError(self.path, f"{key} is {value!r}; token ids are needed")
        return tuple(ids)

    def numbers(self, keys: tuple[str, ...]) -> dict[str, float]:
        found = {key: self.values.get(key) for key in keys}
        return {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}


def _refuse_unknown_arithmetic(config: _Config, family: str) -> None:
    values = config.values
    key, known = ("hidden_activation", "gelu_pytorch_tanh") if family == "gemma3" else ("hidden_act", "silu")
    if values.get(key, known) != known:
        raise unsupported(config.path, f"{key} {values[key]!r}")
    for key in ("mlp_bias", "attention_bias", "use_bidirectional_attention", *_SOFTCAPPING):
        if values.get(key):
            raise unsupported(config.path, f"{key} of a {family} model")
    if values.get("quantization_config") is not None:
        raise unsupported(config.path, "quantization_config (use the plain checkpoint or a GGUF file)")
    if _rope_table(config).get("partial_rotary_factor", 1.0) != 1.0 or values.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(config.path, "partial_rotary_factor")


def _rope_table(config: _Config) -> Mapping[str, Any]:
    """Return the rope parameters of layers with full attention; except in gemma3, those of all layers."""
    table = _rope_parameters(config)
    if _FULL in table or _SLIDING in table:
        table = table.get(_FULL) or {}
        if not isinstance(table, dict):
            raise ModelFileError(config.path, f"rope parameters are {table!r}; an object is needed")
    if "rope_theta" not in table and "rope_theta" in config.values:
        return {**table, "rope_theta": config.values["rope_theta"]}
    return table


def _rope_parameters(config: _Config) -> Mapping[str, Any]:
    table = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(table, dict):
        raise ModelFileError(config.path, f"rope parameters are {table!r}; an object is needed")
    return table


def _sliding_rope_theta(config: _Config) -> float:
    table = _rope_parameters(config).get(_SLIDING) or {}
    if not isinstance(table, dict) or table.get("rope_type", "default") != "default":
        raise unsupported(config.path, f"rope {table!r} of sliding layers")
    key = "rope_theta" if "rope_theta" in table else "rope_local_base_freq"
    return config.number(key, 0.0, table if key in table else config.values)


def _rope_scaling(config: _Config) -> RopeScaling | None:
    table = _rope_table(config)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind in ("default", None):
        return None
    if kind not in ("linear", "llama3"):
        raise unsupported(config.path, f"rope scaling {kind!r}")
    factor = config.number("factor", 0.0, table)
    low, high = config.number("low_freq_factor", 1.0, table), config.number("high_freq_factor", 1.0, table)
    original = config.number("original_max_position_embeddings", 0.0, table)
    if not factor >= 1.0 or (kind == "llama3" and not (0.0 < low < high and original >= 1.0)):
        raise ModelFileError(config.path, f"{kind} rope scaling has factors that make no sense: {dict(table)}")
    return RopeScaling(kind, factor, low, high, int(original))


def _layer_windows(config: _Config, family: str) -> tuple[int | None, ...]:
    """Return the window of each layer, as in transformers; () if none has one."""
    is_qwen = family in ("qwen2", "qwen3")
    if (
        family == "llama"
        or config.values.get("sliding_window") is None
        or (is_qwen and not config.flag("use_sliding_window"))
    ):
        return ()
    layers = config.integer("num_hidden_layers")
    if not 0 <= layers <= _MAX_WINDOW_LAYERS:
        raise ModelFileError(
            config.path, f"num_hidden_layers is {layers}; at most {_MAX_WINDOW_LAYERS} may have windows"
        )
    kinds = config.values.get("layer_types")
    if kinds is None and is_qwen:
        first = config.integer("max_window_layers", 28)
        kinds = [_FULL if layer < first else _SLIDING for layer in range(layers)]
    elif kinds is None and family == "gemma3":
        every = config.integer("sliding_window_pattern", 6)
        if every < 1:
            raise ModelFileError(config.path, f"sliding_window_pattern is {every}; 1 or more is needed")
        kinds = [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
    elif kinds is None:
        kinds = [_SLIDING] * layers
    is_known = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not is_known or len(kinds) != layers:
        raise unsupported(config.path, f"layer_types {str(kinds)[:99]} of {layers} layers")
    if family == "mistral" and len(set(kinds)) > 1:  # transformers gives all layers a window regardless
        raise unsupported(config.path, "a mix of full and sliding-window layers in a mistral model")
    if _SLIDING not in kinds:
        return ()
    window = config.integer("sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in kinds)
