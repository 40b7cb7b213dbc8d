"""Writing a step's keys and values into the pool, for layers whose rotation does not write them.

Owns: one kernel for keys and values, and its launch. Does not: encode numbers (ops/triton/rope.py does).
Invariants: bytes are those of ops/kv_codes.py, NaN's sign apart. A token whose slot is -1 is not written.
Shapes: T tokens, K KV heads, D size of keys, V size of values, S block size, B blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.rope import write_heads
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}  # how a pool of this type stores numbers, else 0
_TILE = 1 << 15 if INTERPRETED else 1 << 10  # values of a program


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
        values.stride(1), num_heads, head_dim, value_dim, block, rows, CODES.get(pool_dtype, 0), num_warps=4, **OPTIONS,
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
