"""A linear layer whose implementation is chosen once, when its weight is loaded.

Owns: the weight in the form that its path needs, and the choice of the path.
Does not: load or quantise. Another path (4 bit, C++) is one function from a weight to a `Multiply` and one
line in `_PATHS`.
Invariants: the path depends on dtype, device and machine only, never on the number of rows, so that a row's
result does not change with the rows beside it. Shapes: T rows, E inputs, F outputs.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Multiply = Callable[[Tensor], Tensor]

# oneDNN sums a single row in another order than several when it has more inputs than this (measured for 1 to 512
# rows, 17 input and 8 output sizes, both dtypes). Such a row is therefore multiplied twice, which costs 2 us.
_ONE_ORDER_INPUTS = 1024


class Linear:
    """y_TF = x_TE W_FE^T + b_F. `path` is "plain" or "packed"; None takes the faster one."""

    __slots__ = ("_multiply", "in_features", "nbytes", "out_features", "path")

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None = None, path: str | None = None) -> None:
        self.out_features, self.in_features = weight_FE.shape
        self.nbytes = weight_FE.nbytes + (0 if bias_F is None else bias_F.nbytes)
        self.path = choose_path(weight_FE.dtype, weight_FE.device) if path is None else path
        self._multiply = _PATHS[self.path](weight_FE, bias_F)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return a new tensor [T, F] of the weight's dtype."""
        return self._multiply(x_TE)


def choose_path(dtype: torch.dtype, device: torch.device) -> str:
    """Return the path by which weights of this kind are multiplied here.

    Packed, all linears of a 135M model on two Zen 5 cores against plain ones, in ms a step, at 1 / 8 / 32 / 128 rows:
    bfloat16 5.4 / 8.1 / 14 / 41 against 13 / 12 / 19 / 58; float32 13 / 15 / 27 / 77 against 31 / 42 / 67 / 224.
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
    """Reorder the weight into oneDNN's blocked layout; the plain one may then be freed."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_FE.contiguous())
    run = torch.ops.mkldnn._linear_pointwise.default

    def multiply(x_TE: Tensor) -> Tensor:
        result: Tensor = run(x_TE, packed, bias_F, "none", [], "")
        return result

    def multiply_wide(x_TE: Tensor) -> Tensor:
        return multiply(x_TE) if x_TE.shape[0] > 1 else multiply(x_TE.repeat(2, 1))[:1]

    return multiply if weight_FE.shape[1] <= _ONE_ORDER_INPUTS else multiply_wide


_PATHS: dict[str, Callable[[Tensor, Tensor | None], Multiply]] = {"plain": _plain, "packed": _packed}
