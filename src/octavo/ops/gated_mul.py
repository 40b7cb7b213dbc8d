"""Gated product of a fused gate and up projection, with SiLU or with the tanh form of GELU.

Owns: the operations. Does not: multiply by weights. Invariants: a token's result depends on that token alone.
Shapes: T tokens, I intermediate size, G = 2 I: the gate first, then the up projection.

Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU, GEGLU). As in transformers, the activated gate is
rounded before the product.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up_TG: Tensor) -> Tensor:
    """Return silu(gate) * up as a new contiguous tensor [T, I]."""
    size = gate_up_TG.shape[-1] // 2
    return functional.silu(gate_up_TG[:, :size]).mul_(gate_up_TG[:, size:])


def gelu_mul(gate_up_TG: Tensor) -> Tensor:
    """Return gelu(gate) * up as a new contiguous tensor [T, I]."""
    size = gate_up_TG.shape[-1] // 2
    return functional.gelu(gate_up_TG[:, :size], approximate="tanh").mul_(gate_up_TG[:, size:])
