"""Root-mean-square norm, with the residual addition in front of it.

Owns: the torch twin and the choice between it and the C++ kernel.
Does not: hold weights (nn/norm.py does), or compute gradients.
Invariants: a row's result depends on that row alone; kernel and twin agree within the bounds that
tests/ops/test_rms_norm.py states. Shapes: T tokens, E hidden size.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, rounded as transformers'
LlamaRMSNorm does: normalise in float32, round to the dtype, multiply by the weight in the dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add in the dtype, then normalise: the slow twin that the kernel is tested against."""
    sum_TE = x_TE if residual_TE is None else x_TE + residual_TE
    wide_TE = sum_TE.to(torch.float32)
    scale_T1 = torch.rsqrt(wide_TE.pow(2).mean(-1, keepdim=True) + eps)
    return weight_E * (wide_TE * scale_T1).to(sum_TE.dtype), sum_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual) * weight, x + residual); without a residual the second is x itself.

    Writes to neither argument. Leading dimensions may be any; the last one is normalised.
    """
    return rms_norm_reference(x_TE, residual_TE, weight_E, eps)
