"""Rotary position tables.

Owns: the frequencies of each kind of scaling, and cosines and sines for every position up to max_len.
Does not: rotate (ops/rope.py does).
Invariants: frequencies, angles, cosines and sines are computed in float32 and rounded to the dtype once.
Shapes: P positions, T tokens, D head size.

Sources: Su et al., "RoFormer", 2021; Chen et al., "Extending Context Window of Large Language Models via Positional
Interpolation", 2023 (linear); the Llama 3.1 model card's wavelength rule (llama3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec, RopeScaling


class RopeTable:
    """Table of cosines and signed sines by position, in the layout that ops.rope.apply_rope takes.

    `factors` [D / 2], when given, divide the inverse frequencies (GGUF's rope_freqs). The table takes
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
