"""A model's specification (sizes, rope, token ids) as one frozen value.

Owns: ModelSpec and the checks that hold for every source.
Does not: read files (read_spec.py does), know families, or load torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from octavo.errors import ModelFileError

_LARGEST = 1 << 24  # bounds every size, so that a damaged header cannot request absurd tables


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling of rotary frequencies. `kind` is "linear" or "llama3"; "linear" uses only `factor`.

    "llama3" is Llama 3.1's rule: a frequency is divided by `factor` if its wavelength is above
    original_max_len / low_freq_factor, kept if its wavelength is below original_max_len / high_freq_factor, and
    interpolated otherwise.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The specification of a decoder, made by read_spec.read_model_spec.

    `attention_bias` means biases on q, k and v (never on the output). `dtype` is "float32", "float16" or "bfloat16".
    A quantised checkpoint has `dtype` "float32", to which it dequantises, and its most frequent type in `quantization`.
    `rope_factors_tensor` names a GGUF tensor [head_dim / 2] whose values divide the inverse frequencies.
    `layer_windows` has each layer's sliding window, or None for full attention; it is empty if all layers are full.
    `sliding_rope_theta`, if not None, is the unscaled rope of layers with a window; other layers use the scaled
    `rope_theta`. Scores are divided by the root of `query_scalar` (None: of head_dim). `generation` has the
    checkpoint's own sampling defaults.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    sliding_rope_theta: float | None = None
    query_scalar: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    quantization: str | None = None
    rope_factors_tensor: str | None = None
    generation: Mapping[str, float] = field(default_factory=dict)

    def check(self, path: Path) -> ModelSpec:
        """Return self if the sizes are consistent. Raises ModelFileError naming `path` and the field."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type == "int" and not 1 <= value <= _LARGEST:
                raise ModelFileError(path, f"{entry.name} is {value}; 1 to {_LARGEST} are supported")
            is_number = entry.type == "float" or (entry.type == "float | None" and value is not None)
            if is_number and not 0.0 < value < 1e18:
                raise ModelFileError(path, f"{entry.name} is {value}; a positive number is needed")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(path, f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelFileError(path, f"head_dim is {self.head_dim}; rotary positions need an even number")
        self._check_windows(path)
        ids = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelFileError(path, f"token id {token_id} lies outside the vocabulary of {self.vocab_size}")
        return self

    def _check_windows(self, path: Path) -> None:
        if len(self.layer_windows) not in (0, self.num_layers):
            raise ModelFileError(path, f"{len(self.layer_windows)} of {self.num_layers} layers have an attention type")
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise ModelFileError(path, f"sliding_window is {window}; 1 or more is needed")

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a query of this layer sees, including itself; None means all."""
        return self.layer_windows[layer] if self.layer_windows else None
