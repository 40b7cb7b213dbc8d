"""Linear layers whose rows have the same bits in any company: of float weights, and of weights that stay coded.

Owns: two kernels, the layout of codes on a device, the sizes of tiles, and the products that the kernels of experts
have too. Does not: hold weights.
Invariants: an output is one sum over ascending steps of BLOCK_K inputs, without splits. Outputs are the tall side
of a tile and tokens the wide one, so any number of tokens takes the same instructions. A coded weight is
code * scale + minimum in float32, rounded to x's dtype, in every tile.
Shapes: T tokens, F outputs, E inputs, C chunks of 32 bytes of codes, G groups of inputs with one scale.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

_UPCAST = tl.constexpr(INTERPRETED)
_EXACT = tl.constexpr(8388608.0)  # 2^23: a code in the low bits of this number is its exact sum with the code
_TOGETHER = 8  # tiles of tokens whose programs are neighbours, so that they find weights in the cache


@triton.jit
def _add_product(w, x, acc):
    if _UPCAST:
        return acc + tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def _tile(num_tokens, outputs, BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the first output and the first token of this program."""
    across, down = tl.cdiv(outputs, BLOCK_F), tl.cdiv(num_tokens, BLOCK_T)
    band = tl.program_id(0) // (TOGETHER * across)
    height = tl.minimum(down - band * TOGETHER, TOGETHER)
    rest = tl.program_id(0) % (TOGETHER * across)
    return rest // height * BLOCK_F, (band * TOGETHER + rest % height) * BLOCK_T


@triton.jit
def store(out, bias, acc, f, t, is_token, outputs, out_step, HAS_BIAS: tl.constexpr):
    """Write the outputs `f` of the tokens `t` that are tokens."""
    if HAS_BIAS:
        acc += tl.load(bias + f, mask=f < outputs, other=0.0).to(tl.float32)[:, None]
    where = t[None, :].to(tl.int64) * out_step + f[:, None]
    tl.store(out + where, rounded(acc, out.dtype.element_ty), mask=(f < outputs)[:, None] & is_token[None, :])


@triton.jit
def product(x_row, w_row, inputs, BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the sums [BLOCK_F, BLOCK_T] of the rows of weights and of x that begin at these pointers."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        at = first + k
        w = tl.load(w_row[:, None] + at[None, :], mask=(at < inputs)[None, :], other=0.0)
        acc = _add_product(w, tl.load(x_row[None, :] + at[:, None], mask=(at < inputs)[:, None], other=0.0), acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens"])  # a step of another size needs no new compilation
def _multiply(
    x, weight, bias, out, num_tokens, outputs, inputs, x_step, weight_step, out_step,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program: a tile of BLOCK_F outputs and BLOCK_T tokens."""
    first_f, first_t = _tile(num_tokens, outputs, BLOCK_F, BLOCK_T, TOGETHER)
    f, t = first_f + tl.arange(0, BLOCK_F), first_t + tl.arange(0, BLOCK_T)
    w_row = weight + tl.minimum(f, outputs - 1).to(tl.int64) * weight_step
    x_row = x + tl.minimum(t, num_tokens - 1).to(tl.int64) * x_step
    acc = product(x_row, w_row, inputs, BLOCK_F, BLOCK_T, BLOCK_K)
    store(out, bias, acc, f, t, t < num_tokens, outputs, out_step, HAS_BIAS)


@triton.jit
def _decoded(code, scales, minima, table, first, f, k, num_rows, GROUP: tl.constexpr, KIND: tl.constexpr):
    """Return the float32 weights [BLOCK_F, 32] of codes of the inputs from `first` on."""
    # a group of 32 has one scale for each output, which is loaded once
    group = tl.full([1], first // 32, tl.int64) if GROUP == 32 else ((first + k) // GROUP).to(tl.int64)
    where = group[None, :] * num_rows + f[:, None]
    scale = tl.load(scales + where).to(tl.float32)
    if KIND == 2:  # values of a table
        return tl.load(table + code).to(tl.float32) * scale
    exact = (code | 0x4B000000).to(tl.float32, bitcast=True)
    if KIND == 1:  # a minimum
        return tl.fma(exact - _EXACT, tl.broadcast_to(scale, code.shape), tl.load(minima + where).to(tl.float32))
    else:
        return (exact - (_EXACT + 128.0)) * scale


@triton.jit
def coded_product(
    x_row, codes, scales, minima, table, row, inputs, num_rows,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return as `product`, of the coded weights' rows `row`. Chunks are [C, num_rows, 32], scales [G, num_rows]."""
    k = tl.arange(0, 32)
    bytes_at = codes + (row.to(tl.int64) * 32)[:, None] + k[None, :]
    halves: tl.constexpr = 8 // BITS
    acc = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for chunk in range(0, tl.cdiv(inputs, 32 * halves)):
        byte = tl.load(bytes_at).to(tl.int32)
        bytes_at += num_rows * 32
        for half in tl.static_range(halves):
            part = chunk * halves + half
            code = (byte >> (4 * half)) & 15 if BITS == 4 else byte
            w = _decoded(code, scales, minima, table, part * 32, row, k, num_rows, GROUP, KIND)
            at = part * 32 + k
            moved = tl.load(x_row[None, :] + at[:, None], mask=(at < inputs)[:, None], other=0.0)
            acc = _add_product(rounded(w, x_row.dtype.element_ty), moved, acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_coded(
    x, codes, scales, minima, table, bias, out, num_tokens, outputs, inputs, num_rows, x_step, out_step,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, TOGETHER: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program: as `_multiply`."""
    first_f, first_t = _tile(num_tokens, outputs, BLOCK_F, BLOCK_T, TOGETHER)
    f, t = first_f + tl.arange(0, BLOCK_F), first_t + tl.arange(0, BLOCK_T)
    x_row = x + tl.minimum(t, num_tokens - 1).to(tl.int64) * x_step
    row = tl.minimum(f, outputs - 1)
    acc = coded_product(x_row, codes, scales, minima, table, row, inputs, num_rows, BLOCK_F, BLOCK_T, GROUP, BITS, KIND)
    store(out, bias, acc, f, t, t < num_tokens, outputs, out_step, HAS_BIAS)


@torch.library.custom_op("octavo::linear", mutates_args=("out",))
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write x W^T + b into `out` [T, F], for x [T, E] and W [F, E] of one dtype; the last dimensions are contiguous."""
    num_tokens, (outputs, inputs) = x.shape[0], weight.shape
    if not num_tokens or not outputs:
        return
    tile = tile_sizes(num_tokens, x.dtype)
    _multiply[(triton.cdiv(outputs, tile["BLOCK_F"]) * triton.cdiv(num_tokens, tile["BLOCK_T"]),)](
        x, weight, weight if bias is None else bias, out, num_tokens, outputs, inputs,
        x.stride(0), weight.stride(0), out.stride(0),
        BLOCK_K=block_k(x.dtype), TOGETHER=_TOGETHER, HAS_BIAS=bias is not None, **tile, **OPTIONS,
    )  # fmt: skip


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    return None


@torch.library.custom_op("octavo::coded_linear", mutates_args=("out",))
def coded_linear(
    x: Tensor, codes: Tensor, scales: Tensor, minima: Tensor | None, table: Tensor | None, bias: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    """Write x W^T + b into `out` [T, F], for x [T, E] and W of codes [C, F, 32] (see nn/coded_linear.py).

    `scales` and `minima` are float16 [G, F]. Codes have 4 bits with minima or a table of 16 values, else 8 bits. Codes,
    scales and minima may be windows of the outputs of larger ones.
    """
    num_tokens, inputs, outputs = x.shape[0], x.shape[1], codes.shape[1]
    if not num_tokens or not outputs:
        return
    tile = tile_sizes(num_tokens, x.dtype, is_coded=True)
    _multiply_coded[(triton.cdiv(outputs, tile["BLOCK_F"]) * triton.cdiv(num_tokens, tile["BLOCK_T"]),)](
        x, codes, scales, scales if minima is None else minima, scales if table is None else table,
        scales if bias is None else bias, out, num_tokens, outputs, inputs, scales.stride(0), x.stride(0),
        out.stride(0),
        TOGETHER=_TOGETHER, HAS_BIAS=bias is not None, **kind_of(codes, scales, minima, table), **tile, **OPTIONS,
    )  # fmt: skip


@coded_linear.register_fake
def _(x: Tensor, *others: Tensor | None) -> None:
    return None


def kind_of(codes: Tensor, scales: Tensor, minima: Tensor | None, table: Tensor | None) -> dict[str, int]:
    """Return the constants of these codes."""
    bits = 8 if minima is None and table is None else 4
    num_values = codes.shape[0] * codes.shape[2] * 8 // bits
    kind = 2 if table is not None else int(minima is not None)
    return {"GROUP": num_values // scales.shape[0], "BITS": bits, "KIND": kind}


def tile_sizes(num_tokens: int, dtype: torch.dtype, is_coded: bool = False) -> dict[str, Any]:
    """Return the tile of a launch: as wide as the tokens, up to 128; floats' twice as tall where these are many."""
    wide = min(64 if dtype == torch.float32 else 128, max(16, triton.next_power_of_2(num_tokens)))
    is_tall = wide == 128 and not is_coded
    return {
        "BLOCK_F": 128 if is_tall else 64,
        "BLOCK_T": wide,
        "num_warps": 8 if is_tall else 4,
        "num_stages": 2 if dtype == torch.float32 else 3 if wide == 128 else 4,
    }


def block_k(dtype: torch.dtype) -> int:
    """Return how many inputs are multiplied at once."""
    return 32 if dtype == torch.float32 else 64


def _variant(kernel: Any, num_tokens: int, dtype: torch.dtype = torch.bfloat16, **constants: int | bool) -> Variant:
    name = "*fp32" if dtype == torch.float32 else "*bf16"
    tile = tile_sizes(num_tokens, dtype, kernel is _multiply_coded)
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    types = dict.fromkeys(("x", "weight", "bias", "out"), name)
    types |= {"codes": "*u8", "scales": "*fp16", "minima": "*fp16", "table": "*i8"}
    strides = ("inputs", "num_rows", "x_step", "weight_step", "out_step")
    types |= dict.fromkeys(("num_tokens", "outputs", *strides), "i32")
    return Variant(
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {**tile, "TOGETHER": _TOGETHER, "HAS_BIAS": False, **constants},
        num_warps=warps,
        num_stages=stages,
        aligned=tuple(name for name in strides if name in kernel.arg_names),
        instruction=None if dtype == torch.float32 else "mma",
    )


VARIANTS: tuple[Variant, ...] = (
    *(_variant(_multiply, count, BLOCK_K=64) for count in (1, 32, 64, 128)),
    _variant(_multiply, 64, torch.float32, BLOCK_K=32),
    *(_variant(_multiply_coded, count, GROUP=32, BITS=4, KIND=1) for count in (1, 64, 128)),
    _variant(_multiply_coded, 16, GROUP=32, BITS=8, KIND=0, HAS_BIAS=True),
    _variant(_multiply_coded, 128, GROUP=16, BITS=8, KIND=0),
    *(_variant(_multiply_coded, count, GROUP=32, BITS=4, KIND=2) for count in (16, 128)),
    _variant(_multiply_coded, 16, GROUP=16, BITS=4, KIND=2),
)
