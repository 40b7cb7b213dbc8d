"""Keys and values of 8 bits: rounding them to the bytes of a KV pool, and reading them back.

Owns: the layout of a position's row for each type of pool, and the torch twin of csrc/attention_codes.h.
Does not: own the pool.
Invariants: a row is [KV head, size]. An int8 row has a scale of each KV head after these, as bfloat16, so that a block
is one run of bytes; a number is code * scale. float8 (e4m3) has no scales, and larger numbers become its largest, 448.
What is not finite is read as NaN. Bits are those of the C++ kernels.
Shapes: T tokens, K KV heads, D size of a head, R numbers of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
CODES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
_SMALLEST = 2.0**-126  # scales below it would have no inverse


def row_shape(dtype: torch.dtype, num_heads: int, size: int) -> tuple[int, ...]:
    """Return the shape of a position's row."""
    return (num_heads * (size + SCALE_BYTES),) if dtype == torch.int8 else (num_heads, size)


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the pool's memory: torch cannot index float8, so types of 8 bits are kept as bytes."""
    return torch.uint8 if dtype in CODES else dtype


def encode(x_TKD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of a pool of this type, [T, R] for int8 and else [T, K, D], in `stored_dtype`."""
    if dtype == torch.int8:
        return _encode_int8(x_TKD.float())
    if dtype == torch.float8_e4m3fn:
        x_TKD = x_TKD.float()
        x_TKD = x_TKD.clamp(-448.0, 448.0) + (x_TKD - x_TKD)  # adds 0, and NaN where a number is not finite
        return x_TKD.to(dtype).view(torch.uint8)
    return x_TKD.to(dtype)


def _encode_int8(x_TKD: Tensor) -> Tensor:
    largest_TK1 = x_TKD.abs().amax(dim=-1, keepdim=True)
    step = largest_TK1 / 127.0
    step = ((step.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)  # up to bfloat16: no code is above 127
    step = torch.where(step < _SMALLEST, 0.0, step)
    step = torch.where(largest_TK1.isfinite(), step, torch.nan)
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    codes = torch.where(step > 0, x_TKD * inverse, 0.0).round().to(torch.int8)
    scales = step.squeeze(-1).bfloat16()
    return torch.cat((codes.flatten(1).view(torch.uint8), scales.view(torch.uint8)), dim=1)


def decode(rows: Tensor, dtype: torch.dtype, num_heads: int, size: int) -> Tensor:
    """Return the numbers [..., K, D] of rows that `encode` made; 8 bits become float32."""
    if dtype == torch.int8:
        codes, scales = rows[..., : num_heads * size], rows[..., num_heads * size :]
        scales = scales.contiguous().view(torch.bfloat16).float()
        return codes.view(torch.int8).reshape(*rows.shape[:-1], num_heads, size).float() * scales[..., None]
    return rows.view(dtype).float() if dtype == torch.float8_e4m3fn else rows
