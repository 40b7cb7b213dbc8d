"""Read a ModelSpec from GGUF metadata and the tensor table.

Owns: the metadata keys and the tensors that identify variants of an architecture.
Does not: guess: an unknown setting that would change the arithmetic is refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.spec import FAMILIES, ModelSpec, RopeScaling, unsupported
from octavo.errors import ModelFileError

ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GENERATION_KEYS = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
_MAX_WINDOW_LAYERS = 1 << 16  # bounds the table of windows
_GEMMA3_PATTERN = 6  # by default every sixth layer has full attention
_GEMMA3_27B_LAYERS = 62  # as llama.cpp does, identify by depth the one size whose scores are scaled by its width
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_spec(parts: list[GGUFFile]) -> ModelSpec:
    """Read the specification of a model from its opened parts (one, unless split). Raises ModelFileError."""
    reader = _Metadata(parts)
    family = reader.family
    _refuse_unknown_arithmetic(reader)
    heads, hidden = reader.integer("attention.head_count"), reader.integer("embedding_length")
    head_dim = reader.integer("attention.key_length", hidden // max(heads, 1))
    if any(reader.integer(key, head_dim) != head_dim for key in ("rope.dimension_count", "attention.value_length")):
        raise unsupported(reader.path, "a rotary or value size other than the head size")
    embedding = reader.shape("token_embd.weight")
    dtype, quantization = _bulk_type(parts)
    bos = reader.token_id("bos_token_id")
    eos = [token_id for key in _EOS_KEYS if (token_id := reader.token_id(key)) is not None]
    return ModelSpec(
        family=family,
        vocab_size=embedding[0],
        hidden_size=hidden,
        num_layers=reader.integer("block_count"),
        num_heads=heads,
        num_kv_heads=reader.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=reader.integer("feed_forward_length"),
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=reader.number("rope.freq_base", 10000.0),
        max_model_len=reader.integer("context_length"),
        rope_scaling=_rope_scaling(reader),
        tie_word_embeddings=not reader.has("output.weight"),
        attention_bias=reader.has("blk.0.attn_q.bias"),
        qk_norm=reader.has("blk.0.attn_q_norm.weight"),
        layer_windows=reader.layer_windows(),
        sliding_rope_theta=reader.number("rope.freq_base_swa", 10000.0) if family == "gemma3" else None,
        query_scalar=_query_scalar(reader),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos,
        dtype=dtype,
        quantization=quantization,
        rope_factors_tensor=ROPE_FACTORS if reader.has(ROPE_FACTORS) else None,
        generation=reader.generation(),
    ).check(reader.path)


class _Metadata:
    """Typed access to the first part's metadata and to every part's tensors; failures name the file and the key."""

    def __init__(self, parts: list[GGUFFile]) -> None:
        self.parts = parts
        self.path = parts[0].path
        self.values = parts[0].metadata
        family = self.values.get("general.architecture")
        if not isinstance(family, str) or family not in FAMILIES:
            raise unsupported(self.path, f"architecture {family!r}")
        self.family = family

    def has(self, tensor: str) -> bool:
        return any(tensor in part.tensors for part in self.parts)

    def shape(self, tensor: str) -> tuple[int, ...]:
        for part in self.parts:
            if tensor in part.tensors:
                return part.tensors[tensor].shape
        raise ModelFileError(self.path, "is missing", tensor)

    def get(self, key: str) -> Any:
        """Return the value of `<family>.<key>`; an array of equal values (one per layer) counts as that value."""
        value = self.values.get(f"{self.family}.{key}")
        if isinstance(value, np.ndarray) and value.size and np.all(value == value[0]):
            return value[0].item()
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{self.family}.{key} is {value!r}; a whole number is needed")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelFileError(self.path, f"{self.family}.{key} is {value!r}; a number is needed")
        return float(value)

    def token_id(self, name: str) -> int | None:
        value = self.values.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer, () if none has one. Qwen files may have the key without using it."""
        window = None if self.family.startswith("qwen") else self.integer("attention.sliding_window", 0) or None
        layers = self.integer("block_count")
        if window is None:
            return ()
        if not 0 <= layers <= _MAX_WINDOW_LAYERS:
            raise ModelFileError(self.path, f"{layers} layers; at most {_MAX_WINDOW_LAYERS} may have windows")
        if self.family != "gemma3":
            return (window,) * layers
        slides = self.values.get("gemma3.attention.sliding_window_pattern", _GEMMA3_PATTERN)
        if isinstance(slides, int) and slides >= 1:
            return tuple(window if (layer + 1) % slides else None for layer in range(layers))
        if isinstance(slides, np.ndarray) and slides.shape == (layers,) and slides.dtype == bool:
            return tuple(window if is_sliding else None for is_sliding in slides.tolist())
        raise ModelFileError(self.path, f"gemma3.attention.sliding_window_pattern is {str(slides)[:99]}")

    def generation(self) -> dict[str, float]:
        found = {name: self.values.get(f"general.sampling.{key}") for key, name in _GENERATION_KEYS.items()}
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}


def _refuse_unknown_arithmetic(reader: _Metadata) -> None:
    if reader.integer("expert_count", 0):
        raise unsupported(reader.path, "a mixture of experts")
    for tensor in ("blk.0.attn_output.bias", "blk.0.ffn_up.bias", "output.bias"):
        if reader.has(tensor):
            raise unsupported(reader.path, f"tensor {tensor!r}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.number(key, 0.0):
            raise unsupported(reader.path, f"{reader.family}.{key}")
    if reader.family == "llama":
        for key in ("logit_scale", "residual_scale", "embedding_scale"):
            if reader.number(key, 1.0) not in (0.0, 1.0):
                raise unsupported(reader.path, f"llama.{key}")


def _query_scalar(reader: _Metadata) -> float | None:
    """Return the number by whose root scores are divided, None if it is the head size; no metadata key has it."""
    if reader.family != "gemma3" or reader.integer("block_count") != _GEMMA3_27B_LAYERS:
        return None
    return reader.integer("embedding_length") / max(reader.integer("attention.head_count"), 1)


def _rope_scaling(reader: _Metadata) -> RopeScaling | None:
    kind = reader.get("rope.scaling.type")
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    if kind in (None, "none") and factor in (0.0, 1.0):
        return None
    if kind in (None, "linear"):
        if not factor >= 1.0:
            raise ModelFileError(reader.path, f"{reader.family}.rope.scaling.factor is {factor}; 1 or more is needed")
        return RopeScaling("linear", factor) if factor > 1.0 else None
    if kind == "none":
        return None
    raise unsupported(reader.path, f"rope scaling {kind!r}")


def _bulk_type(parts: list[GGUFFile]) -> tuple[str, str | None]:
    """Return the type with most bytes, as (dtype, quantization)."""
    sizes: Counter[str] = Counter()
    for part in parts:
        for tensor in part.tensors.values():
            sizes[tensor.type.name] += tensor.nbytes
    bulk = sizes.most_common(1)[0][0]
    return (_DTYPES[bulk], None) if bulk in _DTYPES else ("float32", bulk)
