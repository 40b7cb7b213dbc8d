"""The layers of a decoder with their weights: linear, norm, embedding, rotary table.

Owns: weights in the form that a layer needs; the choice of a linear layer's implementation when its weight is loaded;
the frequencies of each kind of rope scaling. Does not: load, quantise, or compute norms and rotations (ops does).
Invariants: a linear layer's path depends on dtype, device and machine, never on the number of rows, so a row's result
does not change with the other rows of the batch. Frequencies, angles, cosines and sines are computed in float32
and rounded to the dtype once.
Shapes: T rows (tokens), E inputs (hidden size), F outputs, V vocabulary, P positions, D head size.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.artifacts.model_spec import ModelSpec, RopeScaling
from octavo.ops.rms_norm import add_layer_norm, add_rms_norm
from octavo.ops.triton import available

Multiply = Callable[[Tensor], Tensor]

# With more inputs than this, oneDNN sums a single row in another order than several rows (measured for 1 to 512 rows,
# 17 input and 8 output sizes, both dtypes). A single row is therefore multiplied as two equal rows, which costs 2 us.
_ONE_ORDER_INPUTS = 1024


class Linear:
    """y_TF = x_TE W_FE^T + b_F. `path` is "plain", "packed" (CPUs) or "invariant" (devices); None: the faster one.

    On a device, "plain" is cuBLAS's, whose rows may have other bits in other company.
    """

    __slots__ = ("_multiply", "in_features", "nbytes", "num_weights", "out_features", "path")

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None = None, path: str | None = None) -> None:
        self.out_features, self.in_features = weight_FE.shape
        self.num_weights = weight_FE.numel()
        self.nbytes = weight_FE.nbytes + (0 if bias_F is None else bias_F.nbytes)
        self.path = choose_path(weight_FE.dtype, weight_FE.device) if path is None else path
        self._multiply = _PATHS[self.path](weight_FE, bias_F)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return a new tensor [T, F] of the weight's dtype."""
        return self._multiply(x_TE)


def choose_path(dtype: torch.dtype, device: torch.device) -> str:
    """Return the path for weights of this dtype on this device.

    Times of all linear layers of a 135M model on two Zen 5 cores, in ms per step of 1 / 8 / 32 / 128 rows:
    bfloat16 packed 5.4 / 8.1 / 14 / 41, plain 13 / 12 / 19 / 58;
    float32 packed 13 / 15 / 27 / 77, plain 31 / 42 / 67 / 224.
    """
    return "packed" if device.type == "cpu" and _can_pack(dtype) else "plain"


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    if platform.machine() not in ("x86_64", "AMD64") or not torch._C._has_mkldnn:
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _plain(weight_FE: Tensor, bias_F: Tensor | None) -> Multiply:
    if weight_FE.device.type != "cpu":  # cuBLAS would add partial sums in 16 bits
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return functools.partial(functional.linear, weight=weight_FE, bias=bias_F)


def _packed(weight_FE: Tensor, bias_F: Tensor | None) -> Multiply:
    """Reorder the weight into oneDNN's blocked layout; the caller may free the plain weight."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_FE.contiguous())
    run = torch.ops.mkldnn._linear_pointwise.default

    def multiply(x_TE: Tensor) -> Tensor:
        result: Tensor = run(x_TE, packed, bias_F, "none", [], "")
        return result

    def multiply_wide(x_TE: Tensor) -> Tensor:
        return multiply(x_TE) if x_TE.shape[0] > 1 else multiply(x_TE.repeat(2, 1))[:1]

    return multiply if weight_FE.shape[1] <= _ONE_ORDER_INPUTS else multiply_wide


def _invariant(weight_FE: Tensor, bias_F: Tensor | None) -> Multiply:
    assert available.uses_kernels(weight_FE), "the kernels are of devices"

    def multiply(x_TE: Tensor) -> Tensor:
        out_TF = x_TE.new_empty((x_TE.shape[0], weight_FE.shape[0]))
        torch.ops.octavo.linear(x_TE, weight_FE, bias_F, out_TF)
        return out_TF

    return multiply


_PATHS: dict[str, Callable[[Tensor, Tensor | None], Multiply]] = {
    "plain": _plain,
    "packed": _packed,
    "invariant": _invariant,
}


class RMSNorm:
    """y = x / rms(x) * weight, with an optional residual added to x first.

    If the weight is float32 and x has fewer bits, the product with the weight is computed before rounding to x's
    dtype (Gemma's rule). If the weight has x's dtype, the norm is rounded before the product (Llama's rule).
    """

    __slots__ = ("eps", "weight_E")

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        self.weight_E = weight_E
        self.eps = eps

    def __call__(self, x_TE: Tensor, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual). x may have any leading dimensions."""
        return add_rms_norm(x_TE, residual_TE, self.weight_E, self.eps)


class LayerNorm:
    """y = (x - mean(x)) / std(x) * weight + bias, with an optional residual added to x first."""

    __slots__ = ("bias_E", "eps", "weight_E")

    def __init__(self, weight_E: Tensor, bias_E: Tensor | None, eps: float) -> None:
        self.weight_E = weight_E
        self.bias_E = bias_E
        self.eps = eps

    def __call__(self, x_TE: Tensor, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual). x may have any leading dimensions."""
        return add_layer_norm(x_TE, residual_TE, self.weight_E, self.bias_E, self.eps)


class NoNorm:
    """The sum of x and the residual, where a family has no norm."""

    __slots__ = ()

    def __call__(self, x_TE: Tensor, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (x + residual, x + residual)."""
        sum_TE = x_TE if residual_TE is None else x_TE + residual_TE
        return sum_TE, sum_TE


class Embedding:
    """Lookup of a table's rows. Ids must be in [0, V): the engine refuses others earlier."""

    __slots__ = ("weight_VE",)

    def __init__(self, weight_VE: Tensor) -> None:
        self.weight_VE = weight_VE

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return the rows as a new tensor [T, E]."""
        return functional.embedding(token_ids_T, self.weight_VE)


class ScaledEmbedding(Embedding):
    """Lookup of rows, times a scale; scale and products are rounded to the table's dtype, as in transformers."""

    __slots__ = ("scale",)

    def __init__(self, weight_VE: Tensor, scale: float) -> None:
        super().__init__(weight_VE)
        self.scale = float(torch.tensor(scale, dtype=weight_VE.dtype))

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return the scaled rows as a new tensor [T, E]."""
        return super().__call__(token_ids_T).mul_(self.scale)


class RopeTable:
    """Table of cosines and signed sines by position, in the layout that ops.rope.apply_rope takes.

    `factors_NF` [N, rope_dim / 2], if not None, divide the inverse frequencies (GGUF's rope_freqs): one row, or
    longrope's short and long ones. The table has 2 * max_len * rope_dim elements. `max_len` is also the longest
    context, by which longrope chooses its factors.
    """

    __slots__ = ("table_P2D",)

    def __init__(
        self, spec: ModelSpec, max_len: int, dtype: torch.dtype, device: torch.device, factors_NF: Tensor | None = None
    ) -> None:
        scaling = spec.rope_scaling
        inverse = inverse_frequencies(spec.rope_dim, spec.rope_theta, scaling, max_len)
        if factors_NF is not None:
            inverse = inverse / factors_NF[int(len(factors_NF) > 1 and has_long_factors(scaling, max_len))]
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse
        cos, sin = angles.cos(), angles.sin()
        if scaling is not None and scaling.attention_factor != 1.0:
            cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
        if spec.rope_is_interleaved:
            table = torch.stack((cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)), 1)
        else:
            table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self.table_P2D = table.to(device=device, dtype=dtype)

    @property
    def max_len(self) -> int:
        """Positions in the table."""
        return self.table_P2D.shape[0]

    def lookup(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos_T1D, signed_sin_T1D) of each position in [0, max_len)."""
        rows_T2D = self.table_P2D.index_select(0, positions_T)
        return rows_T2D[:, 0:1], rows_T2D[:, 1:2]

    def lookup_sections(self, positions_AT: Tensor, sections: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return (cos_T1D, signed_sin_T1D) where axis A turns its section of the pairs by its own positions."""
        rows_AT2D = self.table_P2D[positions_AT]
        split = torch.split(rows_AT2D, list(sections * 2), dim=-1)
        parts = [part[axis % len(sections)] for axis, part in enumerate(split)]
        rows_T2D = torch.cat(parts, dim=-1)
        return rows_T2D[:, 0:1], rows_T2D[:, 1:2]


def inverse_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None, max_len: int) -> Tensor:
    """Return radians per position [rope_dim / 2], float32. `max_len` is the longest context."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.int64).to(torch.float32) / rope_dim
    powers = theta**exponents
    inverse = 1.0 / powers
    if scaling is None or scaling.kind == "dynamic":
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(powers, theta, scaling)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if has_long_factors(scaling, max_len) else scaling.short_factors
        return 1.0 / (torch.tensor(factors) * powers) if factors else inverse
    assert scaling.kind == "llama3", f"the specification lets no rope scaling {scaling.kind!r} through"
    return _llama3(inverse, scaling)


def has_long_factors(scaling: RopeScaling | None, max_len: int) -> bool:
    """Return True if contexts of up to `max_len` take longrope's long factors.

    All contexts take the same ones, so that cached keys are never of another rope than the queries that read them.
    """
    return scaling is not None and scaling.kind == "longrope" and max_len > scaling.original_max_len


def _yarn(powers: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Keep the frequencies that turn often within the original context, divide those that turn little."""
    count = len(powers)

    def index_of(turns: float) -> float:
        return count * math.log(scaling.original_max_len / (turns * 2 * math.pi)) / math.log(theta)

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    high += 0.001 if high == low else 0.0
    kept = 1.0 - ((torch.arange(count, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / (scaling.factor * powers) * (1.0 - kept) + 1.0 / powers * kept


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, interpolate between."""
    length, low, high = scaling.original_max_len, scaling.low_freq_factor, scaling.high_freq_factor
    turns = length * inverse / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inverse / scaling.factor + keep * inverse
