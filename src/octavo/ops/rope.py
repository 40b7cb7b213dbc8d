"""Rotary position embedding of query and key heads.

Owns: the rotation of one step's heads, given each token's cosines and sines, by torch on a CPU and by Triton's kernel
elsewhere, which also norms the heads and writes keys and values.
Does not: compute the tables (nn/layers.py does). Invariants: a token's result depends on that token alone.
Shapes: T tokens, H heads, D head size, R rotated size.

Source: Su et al., "RoFormer", 2021. Hugging Face checkpoints of most families pair i with i + D/2; others, like the
paper, pair neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.attention import KVPlace
from octavo.ops.rms_norm import add_rms_norm
from octavo.ops.triton import available


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What happens to heads [T, J, D] before attention: a norm of each with its weight, if any, then rotation, if any.

    `angles` are (cos_T1R, signed_sin_T1R). `signed_sin` has the sine of each pair's first value negated.
    """

    norm_JD: Tensor | None
    eps: float
    angles: tuple[Tensor, Tensor] | None
    is_interleaved: bool

    def apply(self, qk_TJD: Tensor) -> Tensor:
        """Return the heads as a new contiguous tensor."""
        if available.uses_kernels(qk_TJD):
            angles = self.angles or (None, None)
            out_TJD: Tensor = torch.ops.octavo.rope(qk_TJD, self.norm_JD, *angles, self.eps, self.is_interleaved)
            return out_TJD
        if self.norm_JD is not None:
            qk_TJD = add_rms_norm(qk_TJD, None, self.norm_JD, self.eps)[0]
        return qk_TJD.contiguous() if self.angles is None else apply_rope(qk_TJD, *self.angles, self.is_interleaved)

    def apply_and_write(self, qk_TJD: Tensor, v_TKD: Tensor, place: KVPlace) -> Tensor:
        """Return the query heads, the first J - K, and write keys and values. For devices with kernels."""
        norm, angles = (self.norm_JD, *(self.angles or (None, None))), (self.eps, self.is_interleaved)
        written = (place.keys, place.values, place.slots_T, place.dtype)
        q_THD: Tensor = torch.ops.octavo.rope_write(qk_TJD, v_TKD, *norm, *angles, *written)
        return q_THD


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
