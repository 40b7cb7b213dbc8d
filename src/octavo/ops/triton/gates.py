"""The activation of an MLP in one launch: of a fused gate and up projection, or of the up projection alone.

Owns: the kernel. Invariants: a value depends on its own inputs alone; roundings are those of ops/gated_mul.py.
Shapes: T tokens, I intermediate size, G = 2 I (the gate first) or I.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gated_mul import ACTIVATION_KINDS, SWIGLU_LIMIT, SWIGLU_SLOPE
from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

_ROWS, _BLOCK = (64, 256) if INTERPRETED else (1, 1024)
_SILU, _GELU_TANH, _GELU = (tl.constexpr(ACTIVATION_KINDS[name]) for name in ("silu", "gelu_tanh", "gelu"))
_RELU2, _SWIGLU = (tl.constexpr(ACTIVATION_KINDS[name]) for name in ("relu2", "clamped_swiglu"))
_LIMIT, _SLOPE = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_SLOPE)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == _SILU:
        return tl.div_rn(x, 1.0 + tl.exp(-x))
    elif KIND == _GELU_TANH:  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y))
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        return tl.div_rn(x, 1.0 + tl.exp(-inner))
    elif KIND == _GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # NaN stays
        return tl.where(x < 0.0, 0.0, x)


@triton.jit(do_not_specialize=["num_rows"])
def _activate(
    x, out, num_rows, size, x_step,
    KIND: tl.constexpr, IS_GATED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: a tile of ROWS tokens and BLOCK values."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (row < num_rows)[:, None] & (at < size)[None, :]
    where = (row * x_step)[:, None] + at[None, :]
    gate = tl.load(x + where, mask=here, other=0.0).to(tl.float32)
    if KIND == _SWIGLU:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.load(x + where + size, mask=here, other=0.0).to(tl.float32)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        steep = rounded(gate * _SLOPE, dtype).to(tl.float32)
        share = rounded(tl.div_rn(1.0, 1.0 + tl.exp(-steep)), dtype).to(tl.float32)
        gate = rounded(gate * share, dtype).to(tl.float32)
        result = gate * rounded(up + 1.0, dtype).to(tl.float32)
    else:
        result = rounded(_activated(gate, KIND), dtype).to(tl.float32)
        if KIND == _RELU2:
            result = rounded(result * result, dtype).to(tl.float32)
        if IS_GATED:
            result *= tl.load(x + where + size, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * size + at[None, :], rounded(result, dtype), mask=here)


@torch.library.custom_op("octavo::activate", mutates_args=())
def activate(x: Tensor, kind: int, is_gated: bool) -> Tensor:
    """Return [T, I] of rows [T, G], whose values are contiguous. `kind` is one of gated_mul.ACTIVATION_KINDS."""
    out = _out(x, is_gated)
    num_rows, size = out.shape
    if out.numel():
        _activate[(triton.cdiv(num_rows, _ROWS), triton.cdiv(size, _BLOCK))](
            x, out, num_rows, size, x.stride(0),
            KIND=kind, IS_GATED=is_gated, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out


@activate.register_fake
def _(x: Tensor, kind: int, is_gated: bool) -> Tensor:
    return _out(x, is_gated)


def _out(x: Tensor, is_gated: bool) -> Tensor:
    size = x.shape[1] // 2 if is_gated else x.shape[1]
    return torch.empty((x.shape[0], size), dtype=x.dtype, device=x.device)


def _variant(kind: int) -> Variant:
    types = {"x": "*bf16", "out": "*bf16", "num_rows": "i32", "size": "i32", "x_step": "i32"}
    constants = {"KIND": kind, "IS_GATED": True, "ROWS": 1, "BLOCK": 1024}
    return Variant(_activate, types, constants, aligned=("size", "x_step"))


VARIANTS: tuple[Variant, ...] = tuple(_variant(kind) for kind in ACTIVATION_KINDS.values())
