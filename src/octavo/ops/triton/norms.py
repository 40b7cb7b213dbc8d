"""Norms of rows in one launch: residual addition, then root-mean-square or layer norm.

Owns: the kernel, and the norm of a tile of rows that rope.py shares. Does not: hold weights.
Invariants: a row's result depends on that row alone. Sums, products and roundings are those of ops/rms_norm.py, but
for the order in which a row's squares are added.
Shapes: T tokens, H heads (1 for the residual stream), E size of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

_TILE = 1 << 16 if INTERPRETED else 1 << 11  # values of a program, if a row has fewer


@triton.jit
def rms_scale(wide, size: tl.constexpr, eps):
    """Return 1 / sqrt(mean of squares + eps) of each row of a tile, [ROWS, 1]."""
    mean = tl.div_rn(tl.sum(wide * wide, axis=1), size * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]


@triton.jit
def weighted(normed, weight, dtype: tl.constexpr):
    """Multiply in `dtype`, or before rounding to it if the weight has another type; return rounded float32."""
    if weight.dtype == dtype:
        normed = rounded(normed, dtype).to(tl.float32)
    return rounded(normed * weight.to(tl.float32), dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rows(
    x, residual, weight, bias, normed, total, num_rows, num_heads, x_token, x_head, residual_token, residual_head,
    weight_head, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_LAYER: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows, which are (token, head). `total` is written if there is a residual."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, at = row // num_heads, row % num_heads, tl.arange(0, BLOCK)
    here = (row < num_rows)[:, None] & (at < SIZE)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + (token * x_token + head * x_head)[:, None] + at[None, :], mask=here, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        where = (token * residual_token + head * residual_head)[:, None] + at[None, :]
        wide += tl.load(residual + where, mask=here, other=0.0).to(tl.float32)
        added = rounded(wide, dtype)
        tl.store(total + row[:, None] * SIZE + at[None, :], added, mask=here)
        wide = added.to(tl.float32)
    w = tl.load(weight + (head * weight_head)[:, None] + at[None, :], mask=here, other=0.0)
    if IS_LAYER:
        wide -= tl.div_rn(tl.sum(wide, axis=1), SIZE * 1.0)[:, None]
        wide = tl.where(here, wide, 0.0)
        result = wide * rms_scale(wide, SIZE, eps) * w.to(tl.float32)
        if HAS_BIAS:
            result += tl.load(bias + at, mask=at < SIZE, other=0.0).to(tl.float32)[None, :]
    else:
        result = weighted(wide * rms_scale(wide, SIZE, eps), w, dtype)
    tl.store(normed + row[:, None] * SIZE + at[None, :], rounded(result, dtype), mask=here)


@torch.library.custom_op("octavo::norm", mutates_args=())
def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_layer: bool
) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual) of [T, E] or [T, H, E]; without a residual, the second is empty.

    `weight` is [E], or [H, E] for heads with weights of their own. The last dimension of all is contiguous.
    """
    size, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    normed, total = torch.empty(x.shape, dtype=x.dtype, device=x.device), _total(x, residual)
    added = x if residual is None else residual
    block = triton.next_power_of_2(size)
    num_rows, rows = x.numel() // size, max(1, _TILE // block)
    if num_rows:
        _norm_rows[(triton.cdiv(num_rows, rows),)](
            x, added, weight, weight if bias is None else bias, normed, total, num_rows, heads,
            x.stride(0), x.stride(1) if heads > 1 else 0, added.stride(0), added.stride(1) if heads > 1 else 0,
            size if weight.dim() == 2 else 0, eps, SIZE=size, BLOCK=block, ROWS=rows, IS_LAYER=is_layer,
            HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None, num_warps=_warps(block), **OPTIONS,
        )  # fmt: skip
    return normed, total


@norm.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, is_layer: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), _total(x, residual)


def _total(x: Tensor, residual: Tensor | None) -> Tensor:
    return torch.empty((0,) if residual is None else x.shape, dtype=x.dtype, device=x.device)


def _warps(block: int) -> int:
    return min(16, max(4, block // 512))


def _variant(size: int, weight: str, **flags: bool) -> Variant:
    block = triton.next_power_of_2(size)
    types: dict[str, str] = dict.fromkeys(("x", "residual", "normed", "total"), "*bf16")
    types |= dict.fromkeys(("weight", "bias"), weight)
    numbers = ("num_rows", "num_heads", "x_token", "x_head", "residual_token", "residual_head", "weight_head")
    constants: dict[str, Any] = {"IS_LAYER": False, "HAS_RESIDUAL": True, "HAS_BIAS": False, **flags}
    constants |= {"SIZE": size, "BLOCK": block, "ROWS": max(1, (1 << 11) // block)}
    return Variant(
        _norm_rows,
        {**types, **dict.fromkeys(numbers, "i32"), "eps": "fp32"},
        constants,
        num_warps=_warps(block),
        aligned=("x_token", "residual_token", "weight_head"),
    )


VARIANTS: tuple[Variant, ...] = (
    _variant(4096, "*bf16"),
    _variant(16384, "*bf16"),
    _variant(128, "*fp32", HAS_RESIDUAL=False),
    _variant(5120, "*bf16", IS_LAYER=True, HAS_BIAS=True),
)
