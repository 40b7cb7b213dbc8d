"""Read a model's specification from config.json, from GGUF metadata, or from a script.

Owns: the keys of both kinds of files, old (rope_theta, torch_dtype) and new (rope_parameters, dtype).
Does not: know a family by name; families.py has each family's differences.
Invariant: nothing is guessed. An unknown setting that would change the arithmetic is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octavo.artifacts.families import Family, Windows, family_of_config, family_of_gguf, unsupported
from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.model_spec import ModelSpec, RopeScaling
from octavo.artifacts.resolve import DEFAULT_MODEL, ModelFiles
from octavo.artifacts.script import script_spec
from octavo.errors import ModelFileError

# The default model's card recommends these; the model's files have no defaults.
_DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
_MAX_JSON_BYTES = 64 << 20
_MAX_WINDOW_LAYERS = 1 << 16  # of a model with windows: bounds the table of windows

_DTYPES = ("float32", "float16", "bfloat16")
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_pytorch_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_REFUSED_KEYS = (
    "mlp_bias", "attention_bias", "use_bidirectional_attention", "final_logit_softcapping", "attn_logit_softcapping",
)  # fmt: skip
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_GGUF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GGUF_GENERATION_KEYS = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_ROPE_FACTORS = "rope_freqs.weight"


def read_model_spec(files: ModelFiles) -> ModelSpec:
    """Read and check the specification. Raises ModelFileError naming the file and what is wrong or unsupported."""
    if files.kind == "scripted":
        return script_spec(files.weights[0])
    if files.kind == "gguf":
        spec = read_gguf_spec([GGUFFile.open(path) for path in files.weights])
    else:
        spec = read_hf_spec(files.root)
    if files.name == DEFAULT_MODEL and not spec.generation:
        return replace(spec, generation=_DEFAULT_SAMPLING)
    return spec


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most 64 MiB. Raises ModelFileError."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ModelFileError(path, f"has {size} bytes; at most {_MAX_JSON_BYTES} are read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(path, f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"holds a {type(value).__name__}; an object is needed")
    return value


def read_hf_spec(root: Path) -> ModelSpec:
    """Read the specification of a model folder. Raises ModelFileError."""
    config = _Config(root / "config.json")
    kind = config.values.get("model_type")
    family = family_of_config(kind)
    if family is None:
        raise unsupported(config.path, f"model_type {kind!r}")
    config.use_family(family)
    generation = _Config(root / "generation_config.json", optional=True)
    _refuse_hf_arithmetic(config, family)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    vocab_size = config.integer("vocab_size")
    dtype = config.values.get("dtype") or config.values.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ModelFileError(config.path, f"dtype {dtype!r} is not supported; one of {', '.join(_DTYPES)} is")
    eos = generation.ids("eos_token_id") or config.ids("eos_token_id")
    bos = config.ids("bos_token_id")
    return ModelSpec(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // max(heads, 1)),
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=config.number("rope_theta", family.rope_theta, _rope_table(config)),
        max_model_len=config.integer("max_position_embeddings", 2048),
        rope_scaling=_hf_rope_scaling(config),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        layer_windows=_hf_layer_windows(config, family),
        sliding_rope_theta=None if family.sliding_rope_theta is None else _hf_sliding_rope_theta(config),
        query_scalar=None if family.query_scalar_key is None else config.number(family.query_scalar_key, 0.0),
        eos_token_ids=tuple(i for i in eos if 0 <= i < vocab_size),
        bos_token_id=bos[0] if bos and 0 <= bos[0] < vocab_size else None,
        dtype=dtype,
        generation=generation.numbers(_GENERATION_KEYS) if generation.flag("do_sample") else {},
    ).check(config.path)


def read_gguf_spec(parts: list[GGUFFile]) -> ModelSpec:
    """Read the specification of a model from its opened parts (one, unless split). Raises ModelFileError."""
    reader = _Metadata(parts)
    family = reader.family
    _refuse_gguf_arithmetic(reader)
    heads, hidden = reader.integer("attention.head_count"), reader.integer("embedding_length")
    head_dim = reader.integer("attention.key_length", hidden // max(heads, 1))
    if any(reader.integer(key, head_dim) != head_dim for key in ("rope.dimension_count", "attention.value_length")):
        raise unsupported(reader.path, "a rotary or value size other than the head size")
    vocab_size = reader.shape("token_embd.weight")[0]
    num_layers, theta = reader.integer("block_count"), family.sliding_rope_theta
    dtype, quantization = _gguf_main_type(parts)
    eos = [token_id for key in _GGUF_EOS_KEYS if (token_id := reader.token_id(key)) is not None]
    return ModelSpec(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=reader.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=reader.integer("feed_forward_length"),
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=reader.number("rope.freq_base", 10000.0),
        max_model_len=reader.integer("context_length"),
        rope_scaling=_gguf_rope_scaling(reader),
        tie_word_embeddings=not reader.has("output.weight"),
        attention_bias=family.qkv_bias or reader.has("blk.0.attn_q.bias"),
        qk_norm=family.qk_norm or reader.has("blk.0.attn_q_norm.weight"),
        layer_windows=_gguf_layer_windows(reader),
        sliding_rope_theta=None if theta is None else reader.number("rope.freq_base_swa", theta),
        query_scalar=hidden / max(heads, 1) if num_layers == family.gguf_width_scaled_layers else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=reader.token_id("bos_token_id"),
        dtype=dtype,
        quantization=quantization,
        rope_factors_tensor=_GGUF_ROPE_FACTORS if reader.has(_GGUF_ROPE_FACTORS) else None,
        generation=reader.generation(),
    ).check(reader.path)


class _Config:
    """A JSON object with typed getters by Llama's keys. Every failure names the file and the family's key."""

    def __init__(self, path: Path, optional: bool = False) -> None:
        self.path = path
        self.values: Mapping[str, Any] = {} if optional and not path.is_file() else read_json(path)
        self._keys: Mapping[str, str] = {}

    def use_family(self, family: Family) -> None:
        """Read the family's own keys and defaults from now on."""
        self.values = {**family.defaults, **self.values}
        self._keys = family.config_keys

    def key(self, name: str) -> str:
        """Return the family's key for one of Llama's."""
        return self._keys.get(name, name)

    def integer(self, name: str, default: int | None = None) -> int:
        key = self.key(name)
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{key} is {value!r}; a whole number is needed")
        return value

    def number(self, name: str, default: float, table: Mapping[str, Any] | None = None) -> float:
        key = self.key(name)
        value = (self.values if table is None else table).get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{key} is {value!r}; a number is needed")
        return float(value)

    def flag(self, name: str) -> bool:
        return self.values.get(self.key(name)) is True

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelFileError(self.path, f"{key} is {value!r}; token ids are needed")
        return tuple(ids)

    def numbers(self, keys: tuple[str, ...]) -> dict[str, float]:
        found = {key: self.values.get(key) for key in keys}
        return {key: float(value) for key, value in found.items() if isinstance(value, (int, float))}


def _refuse_hf_arithmetic(config: _Config, family: Family) -> None:
    values = config.values
    key, activation = config.key("hidden_act"), _ACTIVATIONS[family.activation]
    if values.get(key, activation) != activation:
        raise unsupported(config.path, f"{key} {values[key]!r}")
    for key in _REFUSED_KEYS:
        if values.get(key):
            raise unsupported(config.path, f"{key} of a {family.name} model")
    if values.get("quantization_config") is not None:
        raise unsupported(config.path, "quantization_config (use the plain checkpoint or a GGUF file)")
    if _rope_table(config).get("partial_rotary_factor", 1.0) != 1.0 or values.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(config.path, "partial_rotary_factor")


def _rope_table(config: _Config) -> Mapping[str, Any]:
    """Return the rope parameters of layers with full attention; in most families all layers have these parameters."""
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


def _hf_sliding_rope_theta(config: _Config) -> float:
    table = _rope_parameters(config).get(_SLIDING) or {}
    if not isinstance(table, dict) or table.get("rope_type", "default") != "default":
        raise unsupported(config.path, f"rope {table!r} of sliding layers")
    key = "rope_theta" if "rope_theta" in table else "rope_local_base_freq"
    return config.number(key, 0.0, table if key in table else config.values)


def _hf_rope_scaling(config: _Config) -> RopeScaling | None:
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


def _hf_layer_windows(config: _Config, family: Family) -> tuple[int | None, ...]:
    """Return the window of each layer, as in transformers; () if no layer has one."""
    rule = family.windows
    if rule is Windows.NONE or config.values.get("sliding_window") is None:
        return ()
    if rule is Windows.UPPER and not config.flag("use_sliding_window"):
        return ()
    layers = config.integer("num_hidden_layers")
    if not 0 <= layers <= _MAX_WINDOW_LAYERS:
        limit = f"at most {_MAX_WINDOW_LAYERS} may have windows"
        raise ModelFileError(config.path, f"num_hidden_layers is {layers}; {limit}")
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = _hf_layer_types(config, family, layers)
    is_known = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not is_known or len(kinds) != layers:
        raise unsupported(config.path, f"layer_types {str(kinds)[:99]} of {layers} layers")
    if rule is Windows.ALL and len(set(kinds)) > 1:  # transformers gives all layers a window regardless
        raise unsupported(config.path, f"a mix of full and sliding-window layers in a {family.name} model")
    if _SLIDING not in kinds:
        return ()
    window = config.integer("sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _hf_layer_types(config: _Config, family: Family, layers: int) -> list[str]:
    """Return the type of each layer, for a configuration that does not list the types."""
    if family.windows is Windows.UPPER:
        first = config.integer("max_window_layers", 28)
        return [_FULL if layer < first else _SLIDING for layer in range(layers)]
    if family.windows is Windows.PATTERN:
        every = config.integer("sliding_window_pattern", family.window_pattern)
        if every < 1:
            raise ModelFileError(config.path, f"sliding_window_pattern is {every}; 1 or more is needed")
        return [_SLIDING if (layer + 1) % every else _FULL for layer in range(layers)]
    return [_SLIDING] * layers


class _Metadata:
    """Typed access to the first part's metadata and to every part's tensors. Failures name the file and the key."""

    def __init__(self, parts: list[GGUFFile]) -> None:
        self.parts = parts
        self.path = parts[0].path
        self.values = parts[0].metadata
        self.architecture = self.values.get("general.architecture")
        family = family_of_gguf(self.architecture)
        if family is None:
            raise unsupported(self.path, f"architecture {self.architecture!r}")
        self.family = family

    def has(self, tensor: str) -> bool:
        return any(tensor in part.tensors for part in self.parts)

    def shape(self, tensor: str) -> tuple[int, ...]:
        for part in self.parts:
            if tensor in part.tensors:
                return part.tensors[tensor].shape
        raise ModelFileError(self.path, "is missing", tensor)

    def get(self, key: str) -> Any:
        """Return the value of `<architecture>.<key>`; an array of equal values (one per layer) counts as that value."""
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray) and value.size and np.all(value == value[0]):
            return value[0].item()
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{self.architecture}.{key} is {value!r}; a whole number is needed")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{self.architecture}.{key} is {value!r}; a number is needed")
        return float(value)

    def token_id(self, name: str) -> int | None:
        value = self.values.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def generation(self) -> dict[str, float]:
        found = {name: self.values.get(f"general.sampling.{key}") for key, name in _GGUF_GENERATION_KEYS.items()}
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def _refuse_gguf_arithmetic(reader: _Metadata) -> None:
    if reader.integer("expert_count", 0):
        raise unsupported(reader.path, "a mixture of experts")
    for tensor in ("blk.0.attn_output.bias", "blk.0.ffn_up.bias", "output.bias"):
        if reader.has(tensor):
            raise unsupported(reader.path, f"tensor {tensor!r}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.number(key, 0.0):
            raise unsupported(reader.path, f"{reader.architecture}.{key}")
    for key in ("logit_scale", "residual_scale", "embedding_scale"):
        if reader.number(key, 1.0) not in (0.0, 1.0):
            raise unsupported(reader.path, f"{reader.architecture}.{key}")


def _gguf_layer_windows(reader: _Metadata) -> tuple[int | None, ...]:
    """Return the window of each layer, () if no layer has one. GGUF files of UPPER families never use a window."""
    rule = reader.family.windows
    window = None if rule is Windows.UPPER else reader.integer("attention.sliding_window", 0) or None
    layers = reader.integer("block_count")
    if window is None:
        return ()
    if not 0 <= layers <= _MAX_WINDOW_LAYERS:
        raise ModelFileError(reader.path, f"{layers} layers; at most {_MAX_WINDOW_LAYERS} may have windows")
    if rule is not Windows.PATTERN:
        return (window,) * layers
    key = f"{reader.architecture}.attention.sliding_window_pattern"
    pattern = reader.values.get(key, reader.family.window_pattern)
    if isinstance(pattern, int) and pattern >= 1:
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    if isinstance(pattern, np.ndarray) and pattern.shape == (layers,) and pattern.dtype == bool:
        return tuple(window if is_sliding else None for is_sliding in pattern.tolist())
    raise ModelFileError(reader.path, f"{key} is {str(pattern)[:99]}")


def _gguf_rope_scaling(reader: _Metadata) -> RopeScaling | None:
    kind = reader.get("rope.scaling.type")
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    if kind in (None, "none") and factor in (0.0, 1.0):
        return None
    if kind in (None, "linear"):
        if not factor >= 1.0:
            key = f"{reader.architecture}.rope.scaling.factor"
            raise ModelFileError(reader.path, f"{key} is {factor}; 1 or more is needed")
        return RopeScaling("linear", factor) if factor > 1.0 else None
    if kind == "none":
        return None
    raise unsupported(reader.path, f"rope scaling {kind!r}")


def _gguf_main_type(parts: list[GGUFFile]) -> tuple[str, str | None]:
    """Return the type that has most of the bytes, as (dtype, quantization)."""
    sizes: Counter[str] = Counter()
    for part in parts:
        for tensor in part.tensors.values():
            sizes[tensor.type.name] += tensor.nbytes
    main = sizes.most_common(1)[0][0]
    return (_GGUF_DTYPES[main], None) if main in _GGUF_DTYPES else ("float32", main)
