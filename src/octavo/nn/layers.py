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
from octavo.ops.rms_norm import add_rms_norm

Multiply = Callable[[Tensor], Tensor]

# With more inputs than this, oneDNN sums a single row in another order than several rows (measured for 1 to 512 rows,
# 17 input and 8 output sizes, both dtypes). A single row is therefore multiplied as two equal rows, which costs 2 us.
_ONE_ORDER_INPUTS = 1024


class Linear:
    """y_TF = x_TE W_FE^T + b_F. `path` is "plain" or "packed"; None means the faster one."""

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


_PATHS: dict[str, Callable[[Tensor, Tensor | None], Multiply]] = {"plain": _plain, "packed": _packed}


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

    `factors` [D / 2], if not None, divide the inverse frequencies (GGUF's rope_freqs). The table has
    2 * max_len * D elements.
    """

    __slots__ = ("table_P2D",)

    def __init__(
        self, spec: ModelSpec, max_len: int, dtype: torch.dtype, device: torch.device, factors: Tensor | None = None
    ) -> None:
        inverse = inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        if factors is not None:
            inverse = inverse / factors.to(torch.float32)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse
        cos, sin = angles.cos(), angles.sin()
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


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return radians per position [head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    inverse = 1.0 / (theta**exponents)
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    assert scaling.kind == "llama3", f"the specification lets no rope scaling {scaling.kind!r} through"
    return _llama3(inverse, scaling)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, interpolate between."""
    length, low, high = scaling.original_max_len, scaling.low_freq_factor, scaling.high_freq_factor
    turns = length * inverse / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inverse / scaling.factor + keep * inverse
