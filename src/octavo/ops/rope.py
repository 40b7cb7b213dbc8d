"""Rotary position embedding of query and key heads.

Owns: the rotation of one step's heads, given each token's cosines and sines.
Does not: compute the tables (nn/layers.py does). Invariants: a token's result depends on that token alone.
Shapes: T tokens, H heads, D head size, R rotated size.

Source: Su et al., "RoFormer", 2021. Hugging Face checkpoints of most families pair i with i + D/2; others, like the
paper, pair neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x_THD: Tensor, cos_T1R: Tensor, signed_sin_T1R: Tensor, is_interleaved: bool = False) -> Tensor:
    """Return the heads with their first R values rotated, contiguous.

    `signed_sin` has the sine of each pair's first value negated, so one multiply-add suffices.
    """
    size = cos_T1R.shape[-1]
    if size < x_THD.shape[-1]:
        rotated_THR = apply_rope(x_THD[..., :size], cos_T1R, signed_sin_T1R, is_interleaved)
        return torch.cat((rotated_THR, x_THD[..., size:]), -1)
    out_THD = x_THD * cos_T1R
    swapped_THD = _swap_neighbours(x_THD) if is_interleaved else x_THD.roll(size // 2, -1)
    return out_THD.addcmul_(swapped_THD, signed_sin_T1R)


def _swap_neighbours(x_THD: Tensor) -> Tensor:
    return x_THD.reshape(*x_THD.shape[:-1], -1, 2).flip(-1).flatten(-2)
