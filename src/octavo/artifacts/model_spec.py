"""A model's specification (sizes, rope, token ids) as one frozen value.

Owns: ModelSpec and the checks that hold for every source.
Does not: read files (read_spec.py does), know families, or load torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.artifacts.encoder_spec import EncoderSpec
from octavo.artifacts.vision_spec import VisionSpec
from octavo.errors import ModelFileError

_MAX_EXPERTS = 1024  # kMaxExperts of csrc/experts.h
_LARGEST = 1 << 24  # bounds every size, so that a damaged header cannot request absurd tables


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling of rotary frequencies, as in transformers. `attention_factor` multiplies cosines and sines.

    - "linear": every frequency is divided by `factor`.
    - "llama3" (Llama 3.1): a frequency is divided by `factor` if its wavelength is above original_max_len /
      low_freq_factor, kept if its wavelength is below original_max_len / high_freq_factor, and interpolated otherwise.
    - "yarn" (Peng et al., 2023): frequencies that turn `beta_fast` times or more within original_max_len are kept,
      those that turn `beta_slow` times or fewer are divided by `factor`, others are interpolated by their index;
      `truncate` rounds the two indices outwards.
    - "longrope" (Ding et al., 2024): frequencies are divided by `short_factors`, or by `long_factors` if the model's
      longest context is above original_max_len.
    - "dynamic" changes nothing up to the original length, and longer contexts are not supported.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """The mixtures of experts of a model. `layers` are the indices of the layers that have one instead of an MLP.

    A token's experts are the `top_k` with the highest scores, and their scores are its weights. `scoring` is "softmax"
    (of all experts), "softmax_of_chosen" (the choice is by logits) or "sigmoid". If `is_normalised`, weights are
    divided by their sum, or by `least_sum` if that is more; at last they are multiplied by `scale`. With
    `has_choice_bias`, a bias is added to the scores for the choice only. With several groups of experts, the choice is
    among the experts of the `top_groups` groups whose two best scores have the highest sums.

    Every token also has the shared expert, if `shared_size` is not 0; with `has_shared_gate` it is multiplied by the
    sigmoid of a logit of its own. `has_bias`: the router and the experts have biases.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[int, ...]
    scoring: str = "softmax"
    is_normalised: bool = False
    least_sum: float = 1e-20
    scale: float = 1.0
    has_choice_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    shared_size: int = 0
    has_shared_gate: bool = False
    has_bias: bool = False

    def check(self, path: Path) -> None:
        """Raise ModelFileError naming `path` if the numbers are inconsistent."""
        limits = {"num_experts": _MAX_EXPERTS, "top_k": _MAX_EXPERTS, "intermediate_size": _LARGEST}
        for name, limit in limits.items():
            if not 1 <= getattr(self, name) <= limit:
                raise ModelFileError(path, f"{name} of experts is {getattr(self, name)}; 1 to {limit} are supported")
        if not self.layers:
            raise ModelFileError(path, "no layer has experts")
        if not 0 <= self.shared_size <= _LARGEST:
            raise ModelFileError(path, f"the shared expert's size is {self.shared_size}; 0 to {_LARGEST} are supported")
        if not 1 <= self.top_groups <= self.num_groups or self.num_experts % self.num_groups:
            groups = f"{self.top_groups} of {self.num_groups} groups"
            raise ModelFileError(path, f"{groups} cannot be chosen from {self.num_experts} experts")
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ModelFileError(path, f"{self.top_k} of {self.num_experts} experts cannot be chosen")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The specification of a decoder, made by read_spec.read_model_spec; of an encoder if `encoder` is not None.

    `mixture` describes the layers that have experts instead of an MLP, None if there are none.
    `biases` names the linear layers with biases: "qkv", "output", "gate_up", "down". `dtype` is "float32", "float16" or
    "bfloat16". A quantised checkpoint has `dtype` "float32", to which it dequantises, and its most frequent type in
    `quantization`. `activation` is the MLP's (see Family). `rms_norm_eps` is that of every norm. `generation` has the
    checkpoint's own sampling defaults; `notes` are sentences for the user. `text_part`: the files also have parts of
    another kind (a vision tower), which are not the decoder's; `vision` says how images are read, None if they are not.

    Scales. Scores are multiplied by `attention_scale` (None: the reciprocal root of head_dim), then limited by
    `attention_soft_cap`. The embedding is multiplied by `embedding_scale`, what a layer's halves add to the residual
    stream by `residual_multiplier`, and logits by `logits_scale`, before `logits_soft_cap` limits them. A soft cap c
    limits x to c * tanh(x / c).

    Positions. `rotary_dim` is the rotated size of each head (None: all of it), `rope_is_interleaved` pairs neighbours
    instead of values half of that apart, and layers of `layers_without_rope` rotate nothing. `rope_factors_tensors`
    names GGUF tensors [rotary_dim / 2] whose values divide the inverse frequencies: one, or longrope's short and long
    ones. `rope_sections`: of the pairs of a head, so many turn by a token's temporal, height and width position.
    `layer_windows` has each layer's sliding window, or None for full attention; it is empty if all layers are
    full. `sliding_rope_theta`, if not None, is the unscaled rope of layers with a window; other layers use the scaled
    `rope_theta`.

    `path` is "native", or "transformers" for a model that runs through that library: `path_reason` says why, `family`
    is the model_type, and sizes of heads are estimates.
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
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    activation: str = "silu"
    layer_windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_multiplier: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    rotary_dim: int | None = None
    rope_is_interleaved: bool = False
    rope_sections: tuple[int, int, int] | None = None
    sliding_rope_theta: float | None = None
    layers_without_rope: tuple[int, ...] = ()
    rope_factors_tensors: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    quantization: str | None = None
    text_part: bool = False
    notes: tuple[str, ...] = ()
    mixture: MixtureSpec | None = None
    generation: Mapping[str, float] = field(default_factory=dict)
    encoder: EncoderSpec | None = None
    vision: VisionSpec | None = None
    path: str = "native"
    path_reason: str = ""

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
        if self.head_dim % 2 and self.path == "native":
            raise ModelFileError(path, f"head_dim is {self.head_dim}; rotary positions need an even number")
        if self.path == "native" and (self.rope_dim % 2 or not 2 <= self.rope_dim <= self.head_dim):
            raise ModelFileError(
                path, f"{self.rope_dim} of {self.head_dim} values of a head are rotated; an even number is needed"
            )
        self._check_yarn(path)
        self._check_layers(path)
        if self.mixture is not None:
            self.mixture.check(path)
        ids = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelFileError(path, f"token id {token_id} lies outside the vocabulary of {self.vocab_size}")
        return self

    def _check_yarn(self, path: Path) -> None:
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "yarn":
            return
        logs = (scaling.original_max_len, scaling.beta_fast, scaling.beta_slow, self.rope_theta - 1.0)
        if not all(map(is_positive, logs)):
            raise ModelFileError(
                path,
                f"yarn rope has original length {scaling.original_max_len}, beta_fast {scaling.beta_fast}, beta_slow "
                f"{scaling.beta_slow}, rope_theta {self.rope_theta}; positive numbers, and a theta above 1, are needed",
            )

    def _check_layers(self, path: Path) -> None:
        sections = self.rope_sections
        if sections is not None and (min(sections) < 1 or 2 * sum(sections) != self.rope_dim):
            raise ModelFileError(path, f"mrope_section is {list(sections)}; {self.rope_dim} values are rotated")
        if len(self.layer_windows) not in (0, self.num_layers):
            raise ModelFileError(path, f"{len(self.layer_windows)} of {self.num_layers} layers have an attention type")
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise ModelFileError(path, f"sliding_window is {window}; 1 or more is needed")

    @property
    def vector_size(self) -> int:
        """The size of a text's vector; of a classifier, the number of its labels."""
        return self.hidden_size if self.encoder is None else self.encoder.output_size(self.hidden_size)

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a query of this layer sees, including itself; None means all."""
        return self.layer_windows[layer] if self.layer_windows else None

    def notes_at(self, max_model_len: int) -> tuple[str, ...]:
        """Return sentences for the user about contexts of up to `max_model_len`, and the `notes`."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind not in ("longrope", "dynamic"):
            return self.notes
        original = scaling.original_max_len
        if scaling.kind == "dynamic":
            note = f"dynamic rope scaling is not applied: it is for contexts beyond {self.max_model_len} tokens"
        elif max_model_len > original:
            note = (
                f"contexts of any length have longrope's long factors; give max_model_len {original} for the short ones"
            )
        else:
            note = f"contexts have longrope's short factors, because max_model_len is not above {original}"
        return (*self.notes, note)

    @property
    def rope_dim(self) -> int:
        """Rotated values of each head."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def rope_index(self, layer: int) -> int | None:
        """Return which rope a layer has: 0, or 1 for the rope of layers with a window; None if it has none."""
        if layer in self.layers_without_rope:
            return None
        return int(self.sliding_rope_theta is not None and self.window_of(layer) is not None)

    @property
    def stream_scale(self) -> float:
        """Return what the decoders multiply the embedding by.

        Their residual stream is the model's divided by `residual_multiplier`, so that the halves of a layer are added
        as they are. Norms of the stream are equal if their `eps` is divided by its square.
        """
        return self.embedding_scale / self.residual_multiplier

    @property
    def stream_eps(self) -> float:
        """Return `rms_norm_eps` for norms of the decoders' residual stream."""
        return self.rms_norm_eps / self.residual_multiplier**2


def is_positive(value: Any) -> bool:
    """Return True for a positive number that is within any model's range."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 < value < 1e9


def long_rope_attention_factor(kind: str, factor: float, original: float, mscales: Sequence[float] = ()) -> float:
    """Return the factor of cosines and sines that yarn's or longrope's paper recommends, as transformers has it."""
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1.0 + math.log(factor) / math.log(original)) if original > 1 else 1.0
    if mscales and all(mscales):
        over, under = (0.1 * mscale * math.log(factor) + 1.0 for mscale in mscales)
        return over / under
    return 0.1 * math.log(factor) + 1.0
