"""Rotation of query and key heads after an optional norm of each head, and the write of keys and values into a pool.

Owns: one kernel for all of it, and its launches. Does not: make tables of angles, encode what the pool stores
(kv_write.py does), or own the pool.
Invariants: a head's result depends on its token alone. Roundings are those of ops/rope.py and ops/rms_norm.py. A token
whose slot is -1 is not written.
Shapes: T tokens, H query heads, K KV heads, J = H + K, D size of a head, R rotated size, S block size, B blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.kv_write import storage_kind, write_heads
from octavo.ops.triton.norms import rms_scale, weighted
from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

_TILE = 1 << 15 if INTERPRETED else 1 << 10  # values of a program


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def _rotate_rows(
    qk, v, weight, cos, signed_sin, out, keys, values, slots, num_tokens, qk_token, qk_head, v_token, v_head,
    angle_token, key_slot, value_slot, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROTATED: tl.constexpr,
    ROWS: tl.constexpr, HAS_NORM: tl.constexpr, IS_INTERLEAVED: tl.constexpr, WRITES: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows, which are (token, head). With WRITES, `out` has the query heads and values are rows too."""
    heads: tl.constexpr = Q_HEADS + KV_HEADS
    all_heads: tl.constexpr = heads + KV_HEADS if WRITES else heads
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head, at = row // all_heads, row % all_heads, tl.arange(0, BLOCK)
    dtype: tl.constexpr = qk.dtype.element_ty
    here = (token < num_tokens)[:, None] & (at < SIZE)[None, :]
    turns = here & (head < heads)[:, None]
    x_row = qk + token * qk_token + head * qk_head
    x = tl.load(x_row[:, None] + at[None, :], mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = rms_scale(x, SIZE, eps)
        w_row = weight + head * SIZE
        x = weighted(x * scale, tl.load(w_row[:, None] + at[None, :], mask=turns, other=0.0), dtype)
    if ROTATED > 0:
        if IS_INTERLEAVED:
            other = at ^ 1
        else:
            other = tl.where(at < ROTATED // 2, at + ROTATED // 2, at - ROTATED // 2)
        pairs = turns & (at < ROTATED)[None, :]
        y = tl.load(x_row[:, None] + other[None, :], mask=pairs, other=0.0).to(tl.float32)
        if HAS_NORM:
            y = weighted(y * scale, tl.load(w_row[:, None] + other[None, :], mask=pairs, other=0.0), dtype)
        angle = (token * angle_token)[:, None] + at[None, :]
        c = tl.load(cos + angle, mask=pairs, other=1.0).to(tl.float32)
        s = tl.load(signed_sin + angle, mask=pairs, other=0.0).to(tl.float32)
        turned = rounded(rounded(x * c, dtype).to(tl.float32) + y * s, dtype).to(tl.float32)
        x = tl.where(pairs, turned, x)
    if not WRITES:
        tl.store(out + row[:, None] * SIZE + at[None, :], rounded(x, dtype), mask=here)
    else:
        to_out = here & (head < Q_HEADS)[:, None]
        tl.store(out + (token * Q_HEADS + head)[:, None] * SIZE + at[None, :], rounded(x, dtype), mask=to_out)
        slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
        to_keys = turns & (head >= Q_HEADS)[:, None] & (slot >= 0)[:, None]
        write_heads(keys, slot, head - Q_HEADS, at, x, to_keys, key_slot, KV_HEADS, SIZE, KIND)
        to_values = here & (head >= heads)[:, None] & (slot >= 0)[:, None]
        from_v = (v + token * v_token + (head - heads) * v_head)[:, None] + at[None, :]
        value = tl.load(from_v, mask=to_values, other=0.0).to(tl.float32)
        write_heads(values, slot, head - heads, at, value, to_values, value_slot, KV_HEADS, SIZE, KIND)


@torch.library.custom_op("octavo::rope", mutates_args=())
def rope(
    qk: Tensor, weight: Tensor | None, cos: Tensor | None, signed_sin: Tensor | None, eps: float, is_interleaved: bool
) -> Tensor:
    """Return [T, J, D], contiguous: each head of `qk` normed if there is a weight [J, D], then rotated.

    `cos` and `signed_sin` [T, 1, R] have one stride; without them nothing is rotated.
    """
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    _launch(qk, None, (weight, eps), (cos, signed_sin, is_interleaved), out, None)
    return out


@rope.register_fake
def _(
    qk: Tensor, weight: Tensor | None, cos: Tensor | None, signed_sin: Tensor | None, eps: float, is_interleaved: bool
) -> Tensor:
    return torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)


@torch.library.custom_op("octavo::rope_write", mutates_args=("keys", "values"))
def rope_write(
    qk: Tensor, v: Tensor, weight: Tensor | None, cos: Tensor | None, signed_sin: Tensor | None, eps: float,
    is_interleaved: bool, keys: Tensor, values: Tensor, slots: Tensor, pool_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the query heads [T, H, D] as `rope` does, and write keys and values [T, K, D] into a pool's planes.

    Planes are [B, S, *row] (ops/kv_codes.py). `slots` [T] has flat positions, or -1 for a token that is not written.
    """
    num_heads = qk.shape[1] - v.shape[1]
    out = torch.empty((qk.shape[0], num_heads, qk.shape[2]), dtype=qk.dtype, device=qk.device)
    _launch(qk, v, (weight, eps), (cos, signed_sin, is_interleaved), out, (keys, values, slots, pool_dtype))
    return out


@rope_write.register_fake
def _(qk: Tensor, v: Tensor, *others: object) -> Tensor:
    num_heads = qk.shape[1] - v.shape[1]
    return torch.empty((qk.shape[0], num_heads, qk.shape[2]), dtype=qk.dtype, device=qk.device)


def _launch(
    qk: Tensor,
    v: Tensor | None,
    norm: tuple[Tensor | None, float],
    angles: tuple[Tensor | None, Tensor | None, bool],
    out: Tensor,
    pool: tuple[Tensor, Tensor, Tensor, torch.dtype] | None,
) -> None:
    num_tokens, heads, size = qk.shape
    if not num_tokens:
        return
    (weight, eps), (cos, signed_sin, is_interleaved) = norm, angles
    keys, values, slots, dtype = (out, out, out, out.dtype) if pool is None else pool
    from_v = qk if v is None else v
    kv_heads = 0 if v is None else v.shape[1]
    block = triton.next_power_of_2(size)
    rows = max(1, _TILE // block)
    angle, sine = qk if cos is None else cos, qk if signed_sin is None else signed_sin
    _rotate_rows[(triton.cdiv(num_tokens * (heads + kv_heads), rows),)](
        qk, from_v, qk if weight is None else weight, angle, sine, out, keys, values, slots, num_tokens,
        qk.stride(0), qk.stride(1), from_v.stride(0), from_v.stride(1), angle.stride(0),
        keys.stride(1), values.stride(1), eps,
        Q_HEADS=heads - kv_heads, KV_HEADS=kv_heads, SIZE=size, BLOCK=block,
        ROTATED=0 if cos is None else cos.shape[-1], ROWS=rows, HAS_NORM=weight is not None,
        IS_INTERLEAVED=is_interleaved, WRITES=pool is not None, KIND=storage_kind(dtype), num_warps=4, **OPTIONS,
    )  # fmt: skip


def _variant(pool: str = "*bf16", **constants: bool | int) -> Variant:
    given = {"Q_HEADS": 32, "KV_HEADS": 8, "SIZE": 128, "BLOCK": 128, "ROTATED": 128, "ROWS": 8, "HAS_NORM": False}
    given |= {"IS_INTERLEAVED": False, "WRITES": True, "KIND": 0, **constants}
    types = dict.fromkeys(("qk", "v", "weight", "cos", "signed_sin", "out"), "*bf16")
    types |= {"keys": pool, "values": pool, "slots": "*i32"}
    strides = ("qk_token", "qk_head", "v_token", "v_head", "angle_token", "key_slot", "value_slot")
    return Variant(
        _rotate_rows,
        {**types, **dict.fromkeys(("num_tokens", *strides), "i32"), "eps": "fp32"},
        given,
        aligned=strides,
    )


VARIANTS: tuple[Variant, ...] = (
    _variant(),
    _variant(HAS_NORM=True, ROTATED=64, IS_INTERLEAVED=True),
    _variant("*u8", HAS_NORM=True, KIND=1),
    _variant("*u8", KIND=2),
    _variant(WRITES=False, HAS_NORM=True),
)
