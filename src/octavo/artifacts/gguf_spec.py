"""Read a model's specification from GGUF metadata and the names of its tensors.

Owns: the metadata's keys.
Does not: know a family by name; families.py has each family's differences.
Invariant: nothing is guessed. An unknown setting that would change the arithmetic is refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from octavo.artifacts.families import family_of_gguf, scales, unsupported
from octavo.artifacts.family import LINEARS, NO_ROPE_INTERVAL, NoRope, Windows
from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.mixtures import read_gguf_mixture
from octavo.artifacts.model_spec import (
    MixtureSpec,
    ModelSpec,
    RopeScaling,
    is_positive,
    long_rope_attention_factor,
)
from octavo.artifacts.settings import Settings
from octavo.errors import ModelFileError

_GGUF_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GGUF_GENERATION_KEYS = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_ROPE_FACTORS = "rope_freqs.weight"
_GGUF_LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
# A family's scalars (see Family) -> keys of the metadata; 0 and 1 are what a file without the key has.
_GGUF_SCALARS = {
    "embedding_scale": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_scale": "attention.scale",
    "logits_scale": "logit_scale",
    "logits_divisor": "logit_scale",
    "attention_soft_cap": "attn_logit_softcapping",
    "logits_soft_cap": "final_logit_softcapping",
}


def read_gguf_spec(parts: list[GGUFFile]) -> ModelSpec:
    """Read the specification of a model from its opened parts (one, unless split). Raises ModelFileError."""
    reader = _Metadata(parts)
    family = reader.family
    _refuse_gguf_arithmetic(reader)
    heads, hidden = reader.integer("attention.head_count"), reader.integer("embedding_length")
    head_dim = reader.integer("attention.key_length", hidden // max(heads, 1))
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise unsupported(reader.path, "a value size other than the head size")
    rotary_dim = reader.integer("rope.dimension_count", head_dim)
    vocab_size = reader.shape("token_embd.weight")[0]
    num_layers, windows = reader.integer("block_count"), _gguf_layer_windows(reader)
    dtype, quantization = _gguf_main_type(parts)
    eos = [token_id for key in _GGUF_EOS_KEYS if (token_id := reader.token_id(key)) is not None]
    eps = "layer_norm_epsilon" if family.norm == "layer" else "layer_norm_rms_epsilon"
    return ModelSpec(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=reader.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=reader.integer("feed_forward_length"),
        rms_norm_eps=reader.number(f"attention.{eps}", 1e-6),
        rope_theta=reader.number("rope.freq_base", 10000.0),
        max_model_len=reader.integer("context_length"),
        rope_scaling=_gguf_rope_scaling(reader),
        tie_word_embeddings=not reader.has("output.weight"),
        biases=tuple(name for name in LINEARS if name in family.biases or reader.has_bias(name)),
        qk_norm=family.qk_norm or reader.has("blk.0.attn_q_norm.weight"),
        activation=family.activation,
        layer_windows=windows,
        rotary_dim=rotary_dim if rotary_dim != head_dim else None,
        rope_is_interleaved=family.rope_is_interleaved,
        sliding_rope_theta=_gguf_sliding_rope_theta(reader) if windows else None,
        layers_without_rope=_gguf_layers_without_rope(reader, windows),
        rope_factors_tensors=_gguf_rope_factors(reader),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=reader.token_id("bos_token_id"),
        dtype=dtype,
        quantization=quantization,
        mixture=_gguf_mixture(reader),
        generation=reader.generation(),
        **_gguf_scales(reader, hidden, heads),
    ).check(reader.path)


class _Metadata(Settings):
    """Typed access to the first part's metadata and to every part's tensors. Failures name the file and the key."""

    def __init__(self, parts: list[GGUFFile]) -> None:
        super().__init__(parts[0].path, parts[0].metadata)
        self.parts = parts
        self.architecture = self.values.get("general.architecture")
        family = family_of_gguf(self.architecture, bool(self.get("expert_count")))
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

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value; an array of equal values (one per layer) counts as that value."""
        value = super().get(name, default)
        if isinstance(value, np.ndarray) and value.size and np.all(value == value[0]):
            return value[0].item()
        return value

    def has_bias(self, linear: str) -> bool:
        """Return True if the first layer's tensors of a linear layer have biases."""
        return any(self.has(f"blk.0.{self.family.names(role).gguf}.bias") for role in LINEARS[linear])

    def token_id(self, name: str) -> int | None:
        value = self.values.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def generation(self) -> dict[str, float]:
        found = {name: self.values.get(f"general.sampling.{key}") for key, name in _GGUF_GENERATION_KEYS.items()}
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def _refuse_gguf_arithmetic(reader: _Metadata) -> None:
    if reader.has("output.bias"):
        raise unsupported(reader.path, "tensor 'output.bias'")
    known = {_GGUF_SCALARS[name] for name in reader.family.scalars if name in _GGUF_SCALARS}
    for key in _GGUF_SCALARS.values():
        if key not in known and reader.number(key, 0.0) not in (0.0, 1.0):
            raise unsupported(reader.path, f"{reader.architecture}.{key}")


def _gguf_mixture(reader: _Metadata) -> MixtureSpec | None:
    if reader.family.mixture is None:
        return None
    router = reader.family.names("router").gguf
    layers = range(reader.num_layers("block_count"))
    layers_of = tuple(layer for layer in layers if reader.has(f"blk.{layer}.{router}.weight"))
    return read_gguf_mixture(reader, reader.family.mixture, layers_of)


def _gguf_scales(reader: _Metadata, hidden: int, heads: int) -> dict[str, Any]:
    family = reader.family
    found: dict[str, float | None] = {}
    for name in family.scalars:
        if name in _GGUF_SCALARS:
            found[name] = reader.number(_GGUF_SCALARS[name], 0.0) or None
    if reader.integer("block_count") == family.gguf_width_scaled_layers:
        found["query_scalar"] = hidden / max(heads, 1)
    return scales(family, hidden, found)


def _gguf_rope_factors(reader: _Metadata) -> tuple[str, ...]:
    if reader.has(_GGUF_LONG_FACTORS[1]):
        return _GGUF_LONG_FACTORS
    return (_GGUF_ROPE_FACTORS,) if reader.has(_GGUF_ROPE_FACTORS) else ()


def _gguf_sliding_rope_theta(reader: _Metadata) -> float | None:
    theta = reader.family.sliding_rope_theta
    if theta is None:
        return None
    return reader.number("rope.freq_base_swa", theta or reader.number("rope.freq_base", 10000.0))


def _gguf_layers_without_rope(reader: _Metadata, windows: tuple[int | None, ...]) -> tuple[int, ...]:
    match reader.family.no_rope:
        case NoRope.FULL:
            return tuple(layer for layer, window in enumerate(windows) if window is None)
        case NoRope.LISTED:
            return tuple(range(NO_ROPE_INTERVAL - 1, reader.num_layers("block_count"), NO_ROPE_INTERVAL))
        case _:
            return ()


def _gguf_layer_windows(reader: _Metadata) -> tuple[int | None, ...]:
    """Return the window of each layer, () if no layer has one. GGUF files of UPPER families never use a window."""
    rule = reader.family.windows
    window = None if rule is Windows.UPPER else reader.integer("attention.sliding_window", 0) or None
    if window is None:
        return ()
    layers = reader.num_layers("block_count")
    if rule is not Windows.PATTERN:
        return (window,) * layers
    pattern = reader.values.get(key := reader.key("attention.sliding_window_pattern"), reader.family.window_pattern)
    if isinstance(pattern, int) and pattern >= 1:
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    if isinstance(pattern, np.ndarray) and pattern.shape == (layers,) and pattern.dtype == bool:
        return tuple(window if is_sliding else None for is_sliding in pattern.tolist())
    raise ModelFileError(reader.path, f"{key} is {str(pattern)[:99]}")


def _gguf_rope_scaling(reader: _Metadata) -> RopeScaling | None:
    kind = reader.get("rope.scaling.type")
    if reader.has(_GGUF_LONG_FACTORS[1]):
        kind = "longrope"
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind is None and factor in (0.0, 1.0)):
        return None
    original = reader.integer("rope.scaling.original_context_length", reader.integer("context_length"))
    attention = reader.number("rope.scaling.attn_factor", 1.0)
    if not is_positive(original) or not is_positive(attention):
        raise ModelFileError(reader.path, f"{reader.architecture}.rope.scaling has numbers that make no sense")
    if kind == "longrope":
        return RopeScaling("longrope", original_max_len=original, attention_factor=attention)
    if kind not in (None, "linear", "yarn"):
        raise unsupported(reader.path, f"rope scaling {kind!r}")
    if not 1.0 <= factor < 1e9:
        raise ModelFileError(reader.path, f"{reader.key('rope.scaling.factor')} is {factor}; 1 or more is needed")
    if kind != "yarn":
        return RopeScaling("linear", factor) if factor > 1.0 else None
    if reader.number("rope.scaling.yarn_log_multiplier", 0.0):
        raise unsupported(reader.path, f"{reader.architecture}.rope.scaling.yarn_log_multiplier")
    return RopeScaling(
        "yarn",
        factor,
        original_max_len=original,
        attention_factor=attention * long_rope_attention_factor("yarn", factor, original),
        beta_fast=reader.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=reader.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _gguf_main_type(parts: list[GGUFFile]) -> tuple[str, str | None]:
    """Return the type that has most of the bytes, as (dtype, quantization)."""
    sizes: Counter[str] = Counter()
    for part in parts:
        for tensor in part.tensors.values():
            sizes[tensor.type.name] += tensor.nbytes
    main = sizes.most_common(1)[0][0]
    return (_GGUF_DTYPES[main], None) if main in _GGUF_DTYPES else ("float32", main)
