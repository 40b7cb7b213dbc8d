"""Rounding of float32 to a narrower type inside kernels, equal on devices and in the interpreter.

The interpreter cuts the lower bits off where a device rounds to nearest; it gets the bits rounded first. On a device
the function is the conversion alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.variant import INTERPRETED

_ROUNDS: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Convert float32 to `dtype`, to nearest, ties to even."""
    if _ROUNDS and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)
