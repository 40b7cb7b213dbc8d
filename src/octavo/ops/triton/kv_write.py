"""Writing a step's keys and values into the pool.

Owns: how numbers are encoded, the kernel of layers whose rotation does not write (rope.py's does), and its launch.
Invariants: bytes are those of ops/kv_codes.py, NaN's sign apart. A token whose slot is -1 is not written.
Shapes: T tokens, K KV heads, D size of keys, V size of values, S block size, B blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

_TILE = 1 << 15 if INTERPRETED else 1 << 10  # values of a program
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to an integer, ties to even


def storage_kind(pool_dtype: torch.dtype) -> int:
    """Return how a pool of this type stores numbers, the KIND of kernels: 0 as they are, 1 e4m3, 2 int8 with scales."""
    return {torch.float8_e4m3fn: 1, torch.int8: 2}.get(pool_dtype, 0)


@triton.jit
def _e4m3(x):
    """Return the bits of float8_e4m3fn nearest to float32 numbers, as int32; beyond 448 its largest, or NaN."""
    is_finite = tl.abs(x) < float("inf")
    size = tl.minimum(tl.where(is_finite, tl.abs(x), 0.0), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = ((size * 512.0 + _ROUNDER) - _ROUNDER).to(tl.int32)  # multiples of 2^-9
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(is_finite, code, 0x7F)
    return code | tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)


@triton.jit
def _int8_scale(x, here):
    """Return the scale of each row, a bfloat16 number as float32: 0 of zeros, NaN where a number is not finite."""
    is_finite = tl.abs(x) < float("inf")
    step = tl.div_rn(tl.max(tl.where(here & is_finite, tl.abs(x), 0.0), axis=1), 127.0)
    bits = (step.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    step = tl.where(bits < 0x00800000, 0, bits).to(tl.float32, bitcast=True)  # below 2^-126 it has no inverse
    return tl.where(tl.max((here & ~is_finite).to(tl.int32), axis=1) > 0, float("nan"), step)


@triton.jit
def write_heads(
    plane, slot, head, at, value, here, slot_step, HEADS: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr
):
    """Write heads at flat positions of a plane of the pool; see `storage_kind`."""
    start = plane + slot * slot_step
    where = (start + head * SIZE)[:, None] + at[None, :]
    if KIND == 0:
        tl.store(where, rounded(value, plane.dtype.element_ty), mask=here)
    elif KIND == 1:
        tl.store(where, _e4m3(value).to(tl.uint8), mask=here)
    else:
        step = _int8_scale(value, here)
        has_step = step > 0.0
        inverse = tl.where(has_step, tl.div_rn(1.0, tl.where(has_step, step, 1.0)), 0.0)
        code = (tl.where(has_step[:, None], value, 0.0) * inverse[:, None] + _ROUNDER) - _ROUNDER
        tl.store(where, (code.to(tl.int32) & 255).to(tl.uint8), mask=here)
        bits = tl.where(step == step, step.to(tl.int32, bitcast=True) >> 16, 0x7FC0)
        scale = start + HEADS * SIZE + 2 * head
        is_first = tl.max(here.to(tl.int32), axis=1) > 0
        tl.store(scale, (bits & 255).to(tl.uint8), mask=is_first)
        tl.store(scale + 1, ((bits >> 8) & 255).to(tl.uint8), mask=is_first)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def write_rows(
    k, v, slots, keys, values, num_tokens, k_token, v_token, key_slot, value_slot,
    HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows, which are (token, head), of keys or of values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, at = row // HEADS, row % HEADS, tl.arange(0, BLOCK)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
    if tl.program_id(1) == 0:
        here = (slot >= 0)[:, None] & (at < D)[None, :]
        x = tl.load(k + (token * k_token + head * D)[:, None] + at[None, :], mask=here, other=0.0).to(tl.float32)
        write_heads(keys, slot, head, at, x, here, key_slot, HEADS, D, KIND)
    else:
        here = (slot >= 0)[:, None] & (at < V)[None, :]
        x = tl.load(v + (token * v_token + head * V)[:, None] + at[None, :], mask=here, other=0.0).to(tl.float32)
        write_heads(values, slot, head, at, x, here, value_slot, HEADS, V, KIND)


@torch.library.custom_op("octavo::write_kv", mutates_args=("keys", "values"))
def write_kv(
    k_TKD: Tensor, v_TKV: Tensor, slots_T: Tensor, keys: Tensor, values: Tensor, pool_dtype: torch.dtype
) -> None:
    """Write tokens' KV, whose heads are dense, at flat positions of a pool's planes [B, S, *row], -1 for none."""
    num_tokens, num_heads, head_dim = k_TKD.shape
    value_dim = v_TKV.shape[2]
    if not num_tokens:
        return
    block = triton.next_power_of_2(max(head_dim, value_dim))
    rows = max(1, _TILE // block)
    write_rows[(triton.cdiv(num_tokens * num_heads, rows), 2)](
        k_TKD, v_TKV, slots_T, keys, values, num_tokens, k_TKD.stride(0), v_TKV.stride(0), keys.stride(1),
        values.stride(1), num_heads, head_dim, value_dim, block, rows, storage_kind(pool_dtype), num_warps=4, **OPTIONS,
    )  # fmt: skip


@write_kv.register_fake
def _(*arguments: object) -> None:
    """Change nothing."""


def _variant(pool: str, kind: int, sizes: tuple[int, int]) -> Variant:
    block = triton.next_power_of_2(max(sizes))
    strides = ("k_token", "v_token", "key_slot", "value_slot")
    types = {"k": "*bf16", "v": "*bf16", "slots": "*i64", "keys": pool, "values": pool}
    constants = {"HEADS": 8, "D": sizes[0], "V": sizes[1], "BLOCK": block, "ROWS": (1 << 10) // block, "KIND": kind}
    types |= dict.fromkeys(("num_tokens", *strides), "i32")
    return Variant(write_rows, types, constants, aligned=strides)


VARIANTS: tuple[Variant, ...] = (
    _variant("*bf16", 0, (128, 128)),
    _variant("*u8", 1, (192, 128)),
    _variant("*u8", 2, (128, 128)),
)
