"""Root-mean-square norm, preceded by the residual addition.

Owns: the torch twins, and the choice among them and the kernels: in C++ on a CPU, in Triton elsewhere.
Does not: hold weights (nn/layers.py does), or compute gradients.
Invariants: a row's result depends on that row alone; kernel and twin agree within the bounds that
tests/ops/test_rms_norm.py states. Shapes: T tokens, E hidden size.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, rounded as transformers'
LlamaRMSNorm does: normalise in float32, round to the dtype, multiply by the weight in the dtype. If the weight has
another dtype (float32), the product is computed before rounding, as in Gemma3RMSNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import cpu
from octavo.ops.triton import available

_KERNELS = {torch.float32: "octavo_add_rms_norm_f32", torch.bfloat16: "octavo_add_rms_norm_bf16"}


def rms_norm_reference(x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add in the dtype, then normalise. Slow; the kernel is tested against this function."""
    sum_TE = x_TE if residual_TE is None else x_TE + residual_TE
    wide_TE = sum_TE.to(torch.float32)
    scale_T1 = torch.rsqrt(wide_TE.pow(2).mean(-1, keepdim=True) + eps)
    normed_TE = wide_TE * scale_T1
    if weight_E.dtype is not sum_TE.dtype:
        return (normed_TE * weight_E).to(sum_TE.dtype), sum_TE
    return weight_E * normed_TE.to(sum_TE.dtype), sum_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual) * weight, x + residual); without a residual, the second tensor is x itself.

    Writes to neither argument. x may have any leading dimensions; the last one is normalised. The kernel
    takes two-dimensional float32 and bfloat16 tensors on the CPU, and the torch twin takes all others.
    """
    if _fits_device(x_TE, residual_TE):
        return _norm(x_TE, residual_TE, weight_E, None, eps)
    kernel = _kernel(x_TE.dtype) if x_TE.is_cpu else None
    if kernel is None or not _fits_kernel(x_TE, residual_TE, weight_E):
        return rms_norm_reference(x_TE, residual_TE, weight_E, eps)
    width = x_TE.shape[-1]
    x_stride, residual_stride = x_TE.stride(0), 0
    normed_TE, sum_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype), x_TE
    residual = None
    if residual_TE is not None:
        residual, residual_stride = residual_TE.data_ptr(), residual_TE.stride(0)
        sum_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype)
    num_rows = x_TE.shape[0]
    kernel(
        x_TE.data_ptr(), x_stride, residual, residual_stride, weight_E.data_ptr(), eps,
        normed_TE.data_ptr(), width, sum_TE.data_ptr(), width, num_rows, width, cpu.num_threads(num_rows * width),
    )  # fmt: skip
    return normed_TE, sum_TE


def add_layer_norm(
    x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, bias_E: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (layer norm of x + residual, x + residual); without a residual, the second tensor is x itself."""
    if _fits_device(x_TE, residual_TE):
        return _norm(x_TE, residual_TE, weight_E, bias_E, eps, is_layer=True)
    sum_TE = x_TE if residual_TE is None else x_TE + residual_TE
    return functional.layer_norm(sum_TE, weight_E.shape, weight_E, bias_E, eps), sum_TE


def _fits_device(x_TE: Tensor, residual_TE: Tensor | None) -> bool:
    """Return True if Triton's kernel takes these tensors: rows, or heads of tokens, not on a CPU."""
    if not available.uses_kernels(x_TE) or x_TE.dim() not in (2, 3) or x_TE.stride(-1) != 1:
        return False
    return residual_TE is None or (residual_TE.shape == x_TE.shape and residual_TE.stride(-1) == 1)


def _norm(
    x_TE: Tensor,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    bias_E: Tensor | None,
    eps: float,
    is_layer: bool = False,
) -> tuple[Tensor, Tensor]:
    normed_TE, sum_TE = torch.ops.octavo.norm(x_TE, residual_TE, weight_E, bias_E, eps, is_layer)
    return normed_TE, x_TE if residual_TE is None else sum_TE


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    name = _KERNELS.get(dtype)
    if name is None:
        return None
    row = (c_void_p, c_int64)
    return cpu.function(name, *row, *row, c_void_p, c_float, *row, *row, c_int64, c_int64, c_int32)


def _fits_kernel(x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor) -> bool:
    """Return True if the kernel takes these tensors: two-dimensional, contiguous rows, one dtype, no gradient."""
    if x_TE.dim() != 2 or x_TE.stride(1) != 1 or (torch.is_grad_enabled() and x_TE.requires_grad):
        return False
    if weight_E.shape != x_TE.shape[1:] or weight_E.dtype is not x_TE.dtype or weight_E.stride(0) != 1:
        return False
    if residual_TE is None:
        return True
    return residual_TE.shape == x_TE.shape and residual_TE.dtype is x_TE.dtype and residual_TE.stride(1) == 1
