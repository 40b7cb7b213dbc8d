"""Rotary position embedding of query and key heads.

Owns: the rotation of one step's heads, given each token's cosines and sines.
Does not: compute the tables (nn/layers.py does). Invariants: a token's result depends on that token alone.
Shapes: T tokens, H heads, D head size.

Source: Su et al., "RoFormer", 2021, in the half-split layout of Hugging Face checkpoints: i is paired with i + D/2.
"""

from __future__ import annotations

from torch import Tensor


def apply_rope(x_THD: Tensor, cos_T1D: Tensor, signed_sin_T1D: Tensor) -> Tensor:
    """Return the rotated heads, contiguous. `signed_sin` has its first half negated, so one multiply-add suffices."""
    out_THD = x_THD * cos_T1D
    return out_THD.addcmul_(x_THD.roll(x_THD.shape[-1] // 2, -1), signed_sin_T1D)
