"""Read a model's specification from config.json; choose the reader of GGUF metadata or of a script for other files.

Owns: the keys of config.json, old (rope_theta, torch_dtype) and new (rope_parameters, dtype).
Does not: know a family by name; families.py has each family's differences.
Invariant: nothing is guessed. An unknown setting that would change the arithmetic is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization, find_quantization
from octavo.artifacts.families import family_of_config, family_of_wrapper, scales, unsupported
from octavo.artifacts.family import LINEARS, NO_ROPE_INTERVAL, Family, NoRope, Windows
from octavo.artifacts.gguf_file import open_parts
from octavo.artifacts.gguf_spec import read_gguf_spec
from octavo.artifacts.json_file import read_json
from octavo.artifacts.mixtures import read_hf_mixture
from octavo.artifacts.model_spec import (
    ModelSpec,
    RopeScaling,
    is_positive,
    long_rope_attention_factor,
)
from octavo.artifacts.read_encoder import as_encoder, is_encoder, read_encoder_spec
from octavo.artifacts.read_vision import has_vision, read_vision_spec
from octavo.artifacts.resolve import DEFAULT_MODEL, ModelFiles
from octavo.artifacts.script import script_spec
from octavo.artifacts.settings import FULL, SLIDING, Settings
from octavo.artifacts.transformers_spec import read_transformers_spec
from octavo.artifacts.vision_spec import VisionSpec
from octavo.errors import ModelFileError

# The default model's card recommends these; the model's files have no defaults.
_DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
_REFUSED_KEYS = (
    "use_bidirectional_attention", "final_logit_softcapping", "attn_logit_softcapping", "clip_qkv", "use_qk_norm",
    "qk_layernorm", "use_parallel_residual",
)  # fmt: skip
_WRAPPER_KEYS = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config")
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_model_spec(files: ModelFiles) -> ModelSpec:
    """Read and check the specification. Raises ModelFileError naming the file and what is wrong or unsupported."""
    if files.kind == "scripted":
        return script_spec(files.weights[0])
    if files.kind == "gguf":
        spec = read_gguf_spec(open_parts(files.weights))
    else:
        spec = _read_folder(files.root)
    if files.name == DEFAULT_MODEL and not spec.generation:
        return replace(spec, generation=_DEFAULT_SAMPLING)
    return spec


def _read_folder(root: Path) -> ModelSpec:
    """Read the native specification of a model folder; if there is none, describe the model for transformers."""
    values = read_json(root / "config.json")
    if is_encoder(values.get("model_type")):
        return read_encoder_spec(root)
    try:
        spec = read_hf_spec(root)
        return as_encoder(root, spec, values) or spec
    except ModelFileError as error:
        if error.unsupported is None:
            raise
        generation = _Config(root / "generation_config.json", optional=True)
        own = generation.numbers(_GENERATION_KEYS) if generation.flag("do_sample") else {}
        path = root / "config.json"
        return replace(
            read_transformers_spec(
                path, values, generation.values, f"{error.unsupported} has no native implementation"
            ),
            generation=own,
        )


def read_quantization(root: Path) -> CheckpointQuantization | None:
    """Return how a model folder declares codes; None if its weights are floats. Raises ModelFileError."""
    if not (root / "config.json").is_file():
        return None
    hf_quant = _Config(root / "hf_quant_config.json", optional=True).values
    table = read_json(root / "config.json").get("quantization_config")
    return find_quantization(root / "config.json", table, hf_quant)


def read_hf_spec(root: Path) -> ModelSpec:
    """Read the specification of a model folder. Raises ModelFileError."""
    config = _Config(root / "config.json")
    vision, why = _read_vision(root, config.values)
    family, wrapper = _choose_family(config)
    notes: tuple[str, ...] = ()
    if wrapper is not None and vision is None:
        notes = (f"only the text part of this {wrapper} model is loaded: it gets no images{why}",)
    generation = _Config(root / "generation_config.json", optional=True)
    _refuse_hf_arithmetic(config, family)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    vocab_size = config.integer("vocab_size")
    quantization = read_quantization(root)
    eos = generation.ids("eos_token_id") or config.ids("eos_token_id")
    bos = config.ids("bos_token_id")
    windows = _hf_layer_windows(config, family)
    head_dim = config.integer("head_dim", hidden // max(heads, 1))
    rotary_dim = _hf_rotary_dim(config, family, head_dim)
    return ModelSpec(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_table(config).number("rope_theta", family.rope_theta),
        max_model_len=config.integer("max_position_embeddings", 2048),
        rope_scaling=_hf_rope_scaling(config, rotary_dim),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        biases=tuple(
            name
            for name in LINEARS
            if name in family.biases or config.values.get(family.bias_keys.get(name, "")) is True
        ),
        qk_norm=family.qk_norm,
        activation=_hf_activation(config, family),
        layer_windows=windows,
        rotary_dim=rotary_dim if rotary_dim != head_dim else None,
        rope_is_interleaved=family.rope_is_interleaved,
        rope_sections=_hf_rope_sections(config),
        sliding_rope_theta=_hf_sliding_rope_theta(config, family) if windows else None,
        layers_without_rope=_hf_layers_without_rope(config, family, windows),
        eos_token_ids=tuple(i for i in eos if 0 <= i < vocab_size),
        bos_token_id=bos[0] if bos and 0 <= bos[0] < vocab_size else None,
        dtype=config.dtype(),
        quantization=None if quantization is None else quantization.label,
        generation=generation.numbers(_GENERATION_KEYS) if generation.flag("do_sample") else {},
        mixture=None if family.mixture is None else read_hf_mixture(config, family.mixture),
        text_part=wrapper is not None,
        notes=notes,
        vision=vision,
        **scales(family, hidden, {name: config.scalar(key) for name, key in family.scalars.items()}),
    ).check(config.path)


def _read_vision(root: Path, values: Mapping[str, Any]) -> tuple[VisionSpec | None, str]:
    """Return how the model reads images; None, with a reason for a note, if it reads none."""
    if not has_vision(values):
        return None, ""
    text = values.get("text_config") or values
    try:
        vision = read_vision_spec(root, values)
        vocab_size = text.get("vocab_size", vision.image_token_id + 1)
        if isinstance(vocab_size, int) and vision.image_token_id >= vocab_size:
            raise ModelFileError(root / "config.json", f"the image token {vision.image_token_id} has no embedding")
        return vision, ""
    except ModelFileError as error:
        return None, f" ({error})"


def _choose_family(config: _Config) -> tuple[Family, str | None]:
    """Return the family of a configuration, and the type of one whose `text_config` it is, to which it is narrowed."""
    kind, text = config.values.get("model_type"), config.values.get("text_config")
    family, wrapper = family_of_config(kind), None
    if family is None:
        is_flat = text is None  # files of transformers 4 have Qwen2-VL's text settings outside
        text = {**config.values, "model_type": f"{kind}_text"} if is_flat else text
        family = family_of_wrapper(kind, text.get("model_type")) if isinstance(text, dict) else None
        if family is not None and isinstance(text, dict):
            outer = {key: config.values[key] for key in _WRAPPER_KEYS if key in config.values}
            config.values = {**family.wrapped_defaults, **outer, **text}
            wrapper = str(kind)
    if family is None:
        raise unsupported(config.path, f"model_type {kind!r}")
    config.use_family(family)
    return family, wrapper


class _Config(Settings):
    """A JSON file, by Llama's keys."""

    def __init__(self, path: Path, optional: bool = False) -> None:
        super().__init__(path, read_json(path, optional=optional))

    def use_family(self, family: Family) -> None:
        """Read the family's own keys and defaults from now on."""
        self.values = {**family.defaults, **self.values}
        self._keys = family.config_keys

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
    for key in _REFUSED_KEYS:
        is_known = key == "use_bidirectional_attention" and family.can_see_both_ways
        if values.get(key) and not is_known and key not in family.scalars.values():
            raise unsupported(config.path, f"{key} of a {family.name} model")


def _hf_activation(config: _Config, family: Family) -> str:
    key = config.key("hidden_act")
    value = config.values.get(key)
    if value is None:
        return family.activation
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise unsupported(config.path, f"{key} {value!r}")
    return "gelu_tanh" if value == "gelu" and family.gelu_is_tanh else _ACTIVATIONS[value]


def _hf_rotary_dim(config: _Config, family: Family, head_dim: int) -> int:
    table, key = _rope_table(config), "partial_rotary_factor"
    factor = (table if key in table.values else config).number(key, family.partial_rotary_factor)
    if not 0.0 < factor <= 1.0:
        raise ModelFileError(config.path, f"{key} is {factor}; above 0 and at most 1 is needed")
    return int(head_dim * factor)


def _hf_layers_without_rope(config: _Config, family: Family, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    if family.no_rope is NoRope.FULL:
        return tuple(layer for layer, window in enumerate(windows) if window is None)
    if family.no_rope is NoRope.NONE:
        return ()
    layers, listed = config.num_layers(), config.values.get("no_rope_layers")
    if listed is None:
        every = config.integer("no_rope_layer_interval", NO_ROPE_INTERVAL)
        if every < 1:
            raise ModelFileError(config.path, f"no_rope_layer_interval is {every}; 1 or more is needed")
        return tuple(range(every - 1, layers, every))
    if not isinstance(listed, list) or len(listed) < layers or any(has_rope not in (0, 1) for has_rope in listed):
        raise ModelFileError(config.path, f"no_rope_layers is {str(listed)[:99]}; 0 or 1 per layer is needed")
    return tuple(layer for layer in range(layers) if not listed[layer])


def _rope_table(config: _Config) -> Settings:
    """Return the rope parameters of layers with full attention; in most families all layers have these parameters."""
    table = _rope_parameters(config)
    if FULL in table or SLIDING in table:
        table = table.get(FULL) or {}
        if not isinstance(table, dict):
            raise ModelFileError(config.path, f"rope parameters are {table!r}; an object is needed")
    if "rope_theta" not in table and "rope_theta" in config.values:
        table = {**table, "rope_theta": config.values["rope_theta"]}
    return Settings(config.path, table)


def _rope_parameters(config: _Config) -> Mapping[str, Any]:
    table = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    if not isinstance(table, dict):
        raise ModelFileError(config.path, f"rope parameters are {table!r}; an object is needed")
    return table


def _hf_sliding_rope_theta(config: _Config, family: Family) -> float | None:
    if family.sliding_rope_theta is None:
        return None
    table = _rope_parameters(config).get(SLIDING) or {}
    if not isinstance(table, dict) or table.get("rope_type", "default") != "default":
        raise unsupported(config.path, f"rope {table!r} of sliding layers")
    if "rope_theta" in table:
        return Settings(config.path, table).number("rope_theta")
    if "rope_local_base_freq" in config.values:
        return config.number("rope_local_base_freq")
    return family.sliding_rope_theta or _rope_table(config).number("rope_theta", family.rope_theta)


def _hf_rope_sections(config: _Config) -> tuple[int, int, int] | None:
    table = _rope_table(config)
    sections = table.get("mrope_section")
    if table.get("mrope_interleaved"):
        raise unsupported(config.path, "interleaved mrope")
    if sections is None:
        if table.get("rope_type", table.get("type")) == "mrope":
            raise ModelFileError(config.path, "mrope_section is missing")
        return None
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(each) is int for each in sections):
        raise ModelFileError(config.path, f"mrope_section is {str(sections)[:99]}; three sizes are needed")
    return sections[0], sections[1], sections[2]


def _hf_rope_scaling(config: _Config, rotary_dim: int) -> RopeScaling | None:
    table = _rope_table(config)
    kind = table.get("rope_type", table.get("type", "default"))
    if kind in ("default", "mrope", None):
        return None
    if kind == "su" or (kind == "yarn" and "short_factor" in table.values):  # earlier names of longrope
        kind = "longrope"
    if kind in ("yarn", "longrope"):
        return _hf_long_rope_scaling(config, table, kind, rotary_dim)
    if kind not in ("linear", "llama3", "dynamic"):
        raise unsupported(config.path, f"rope scaling {kind!r}")
    factor = table.number("factor", 0.0)
    low, high = table.number("low_freq_factor", 1.0), table.number("high_freq_factor", 1.0)
    original = table.number("original_max_position_embeddings", 0.0)
    if not 1.0 <= factor < 1e9 or (kind == "llama3" and not (0.0 < low < high and 1.0 <= original < 1e9)):
        raise ModelFileError(config.path, f"{kind} rope scaling has factors that make no sense: {dict(table.values)}")
    if kind == "llama3":
        return RopeScaling(kind, factor, low, high, int(original))
    return RopeScaling(kind, factor)


def _hf_long_rope_scaling(config: _Config, table: Settings, kind: str, rotary_dim: int) -> RopeScaling:
    """Return yarn's or longrope's scaling; transformers' rules for what a configuration leaves out."""
    longest = config.integer("max_position_embeddings", 2048)
    key = "original_max_position_embeddings"  # outside of the table it has priority
    original = config.values.get(key) or table.get(key) or longest
    factor = table.scalar("factor")
    lists: list[Any] = [table.get(f"{name}_factor") if kind == "longrope" else [] for name in ("short", "long")]
    is_list = all(isinstance(list_, list) and all(is_positive(value) for value in list_) for list_ in lists)
    if not is_positive(original) or not is_list or not (factor is None or 1.0 <= factor < 1e9):
        shown = str(table.values)[:999]
        raise ModelFileError(config.path, f"{kind} rope scaling has factors that make no sense: {shown}")
    short, long = (tuple(map(float, list_)) for list_ in lists)
    if kind == "longrope" and not len(short) == len(long) == rotary_dim // 2:
        sizes = f"{len(short)} short and {len(long)} long factors for {rotary_dim} rotated values"
        raise ModelFileError(config.path, f"{kind} rope scaling has {sizes} of a head")
    factor = max(longest / original, 1.0) if factor is None else factor
    attention = table.scalar("attention_factor")
    if attention is None:
        mscales = [table.scalar(name) or 0.0 for name in ("mscale", "mscale_all_dim")] if kind == "yarn" else []
        attention = long_rope_attention_factor(kind, factor, original, mscales)
    return RopeScaling(
        kind,
        factor,
        original_max_len=int(original),
        attention_factor=attention,
        beta_fast=table.scalar("beta_fast") or 32.0,
        beta_slow=table.scalar("beta_slow") or 1.0,
        truncate=table.get("truncate", True) is True,
        short_factors=short,
        long_factors=long,
    )


def _hf_layer_windows(config: _Config, family: Family) -> tuple[int | None, ...]:
    """Return the window of each layer, as in transformers; () if no layer has one."""
    rule = family.windows
    if rule is Windows.NONE or config.values.get("sliding_window") is None:
        return ()
    if rule in (Windows.UPPER, Windows.LISTED) and not config.flag("use_sliding_window"):
        return ()
    layers = config.num_layers()
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = _hf_layer_types(config, family, layers)
    is_known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not is_known or len(kinds) != layers:
        raise unsupported(config.path, f"layer_types {str(kinds)[:99]} of {layers} layers")
    if rule is Windows.ALL and len(set(kinds)) > 1:  # transformers gives all layers a window regardless
        raise unsupported(config.path, f"a mix of full and sliding-window layers in a {family.name} model")
    if SLIDING not in kinds:
        return ()
    window = config.integer("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _hf_layer_types(config: _Config, family: Family, layers: int) -> list[str]:
    """Return the type of each layer, for a configuration that does not list the types."""
    if family.windows is Windows.UPPER:
        first = config.integer("max_window_layers", 28)
        return [FULL if layer < first else SLIDING for layer in range(layers)]
    if family.windows is Windows.PATTERN:
        every = config.integer("sliding_window_pattern", family.window_pattern)
        if every < 1:
            raise ModelFileError(config.path, f"sliding_window_pattern is {every}; 1 or more is needed")
        return [SLIDING if (layer + 1) % every else FULL for layer in range(layers)]
    if family.no_rope is NoRope.LISTED:
        raise unsupported(config.path, f"use_sliding_window without layer_types in a {family.name} model")
    return [SLIDING] * layers
