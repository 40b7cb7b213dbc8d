"""RMSNorm with its weight.

Owns: the weight and epsilon. Does not: compute (ops/rms_norm.py does). Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.rms_norm import add_rms_norm


class RMSNorm:
    """y = x / rms(x) * weight, with an optional residual added to x first.

    A float32 weight beside x of fewer bits is multiplied before the result is rounded (Gemma's rule), one of
    x's dtype after (Llama's).
    """

    __slots__ = ("eps", "weight_E")

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        self.weight_E = weight_E
        self.eps = eps

    def __call__(self, x_TE: Tensor, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual). Leading dimensions may be any."""
        return add_rms_norm(x_TE, residual_TE, self.weight_E, self.eps)
