"""Paged attention over splits of the context: one arithmetic for decodes and prompts.

Owns: `attend_tiles` (a tile of queries over one split or over all), `join_parts` (the splits of a query), the launches.
Does not: list the work (ops.attention_triton does), write KV, or keep state between steps.
Invariants: splits and KV tiles are at fixed positions of the context, and a query's splits are joined in ascending
order from an empty state, wherever they are joined. The rows of a tile are independent, and weights are summed by the
same product as values, so a sum's order does not depend on the tile's height. Scores are in units of log2.
Shapes: T tokens, N rows, H query heads = K KV heads x G, D size of keys, V size of values (DP, VP: padded to powers of
two), S block size, I work items, P parts: one token's result over one split.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention_triton import SHARED_HEAD, SPLIT, tile_positions
from octavo.ops.triton.kv_write import storage_kind
from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

MAX_PROGRAMS = 2048  # of one launch: some waves of any device; the rest is a loop
SHARED_SIZE = tl.constexpr(SHARED_HEAD)
UNROLLED = 2 if INTERPRETED else 8  # parts whose loads are under way together
# What describes a step's rows lies anywhere in one uploaded buffer: a kernel is compiled once, wherever it lies.
_ROWS = ["first_token", "contexts", "slots", "seen", "shared", "items", "joins", "num_work"]


@triton.jit
def widen(codes, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Return stored numbers in the type of the products; all conversions are exact. An int8's scale comes later."""
    if KIND == 0:
        return codes
    if KIND == 2:
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(COMPUTE)
    bits = codes.to(tl.int32)
    number = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120: another bias
    number = tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
    return tl.where(bits >= 0x80, -number, number).to(COMPUTE)


@triton.jit
def load_scales(pool, where_R, head, seen, SIZE: tl.constexpr, K: tl.constexpr):
    """Return the scale of each position's int8 codes, a bfloat16 after the codes of all heads."""
    at = pool + where_R + K * SIZE + 2 * head
    low = tl.load(at, mask=seen, other=0).to(tl.int32)
    high = tl.load(at + 1, mask=seen, other=0).to(tl.int32)
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)


@triton.jit
def add_product(a, b, sum, UPCAST: tl.constexpr):
    """Return sum + a @ b in float32, float32 as three products of tf32. See variant.INTERPRETED for UPCAST."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sum, input_precision="ieee")
    return tl.dot(a, b, sum, input_precision="tf32x3")


@triton.jit
def rescale(top, other):
    """Return the larger of two maxima, and the factors of what was summed under each; -inf has summed nothing."""
    new = tl.maximum(top, other)
    safe = tl.where(new == -float("inf"), 0.0, new)
    return new, tl.exp2(top - safe), tl.exp2(other - safe)


@triton.jit
def tile_scores(
    query, keys, slopes, where_k, kv_head, head, live, at, is_held, position, end, scale, soft_cap, window,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr, HEIGHT: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return the scores of queries and a tile's keys; -inf where a query, at `position`, does not see a key."""
    d = tl.arange(0, DP)
    k_mask = is_held[None, :] & (d < D)[:, None]
    codes = tl.load(keys + (where_k + kv_head * D)[None, :] + d[:, None], mask=k_mask, other=0)
    key = widen(codes, KIND, query.dtype)
    score = add_product(query, key, tl.zeros([HEIGHT, TILE], tl.float32), UPCAST)
    if KIND == 2:
        score = score * load_scales(keys, where_k, kv_head, is_held, D, K)[None, :]
    score = score * scale
    if HAS_CAP:
        shrunk = tl.exp2(tl.abs(score) * -2.8853900817779268)  # -2 / ln 2
        bent = (1.0 - shrunk) / (1.0 + shrunk)
        score = tl.where(score < 0, -bent, bent) * soft_cap
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=live, other=0.0)
        score = score + slope[:, None] * (at[None, :] - position[:, None]).to(tl.float32)
    is_seen = (at[None, :] < end[:, None]) & is_held[None, :]
    if HAS_WINDOW:
        is_seen = is_seen & (at[None, :] > position[:, None] - window)
    return tl.where(is_seen, score, -float("inf"))


@triton.jit
def attend_split(
    query, keys, values, slopes, blocks, start, low, high, kv_head, head, live, position, end, scale, soft_cap, window,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, S: tl.constexpr,
    KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, KIND: tl.constexpr, HEIGHT: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend positions [start, start + SPLIT) of those that some query sees, [low, high): maximum, sum, mean * sum."""
    own_top = tl.full([HEIGHT], -float("inf"), tl.float32)
    own_total = tl.zeros([HEIGHT, 16], tl.float32)
    own_acc = tl.zeros([HEIGHT, VP], tl.float32)
    ones = tl.full([TILE, 16], 1.0, tl.float32).to(query.dtype)
    t, v = tl.arange(0, TILE), tl.arange(0, VP)
    begin = tl.maximum(start, low // TILE * TILE)  # a tile that is not seen would change nothing
    for tile in range(begin, tl.minimum(start + SPLIT, high), TILE):
        at = tile + t
        is_held = (at >= low) & (at < high)
        slot = tl.load(blocks + at // S, mask=is_held, other=0).to(tl.int64) * S + at % S
        score = tile_scores(
            query, keys, slopes, slot * KEY_ROW, kv_head, head, live, at, is_held, position, end, scale,
            soft_cap, window, K, D, DP, KIND, HEIGHT, TILE, HAS_WINDOW, HAS_CAP, HAS_SLOPES, UPCAST,
        )  # fmt: skip
        own_top, alpha, _ = rescale(own_top, tl.max(score, 1))
        safe = tl.where(own_top == -float("inf"), 0.0, own_top)
        weight = tl.exp2(score - safe[:, None])
        own_total = add_product(rounded(weight, query.dtype), ones, own_total * alpha[:, None], UPCAST)
        where_v, v_mask = slot * VALUE_ROW, is_held[:, None] & (v < V)[None, :]
        v_codes = tl.load(values + (where_v + kv_head * V)[:, None] + v[None, :], mask=v_mask, other=0)
        if KIND == 2:
            weight = weight * load_scales(values, where_v, kv_head, is_held, V, K)[None, :]
        value = widen(v_codes, KIND, query.dtype)
        own_acc = add_product(rounded(weight, query.dtype), value, own_acc * alpha[:, None], UPCAST)
    return own_top, tl.max(own_total, 1), own_acc  # all columns of the sum are equal


@triton.jit
def queries_of(first_token, contexts, shared, item, nth, in_tile, SHARES: tl.constexpr):
    """Return the row whose blocks an item reads, and each query's token, position, part, and whether it is there.

    `nth` counts the tokens of the tile: those of a row from `offset` on, or one of each of `offset` rows that share the
    split's blocks, from number `row` on of `shared`.
    """
    row, offset, split, part = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if SHARES and part == -2:
        live = in_tile & (nth < offset)
        at = shared + 2 * (row + nth)
        of_row = tl.load(at, mask=live, other=0)
        token = tl.load(first_token + of_row, mask=live, other=0)
        position = tl.load(contexts + of_row, mask=live, other=0) - 1
        own_part = tl.load(at + 1, mask=live, other=0) + split
        row = tl.load(shared + 2 * row)
    else:
        first = tl.load(first_token + row)
        count = tl.load(first_token + row + 1) - first
        live = in_tile & (offset + nth < count)
        token = first + offset + nth
        position = tl.load(contexts + row) - count + offset + nth
        own_part = part + nth
    return row, token, position, own_part, live


@triton.jit
def finish(top, total, acc, sinks, head, HAS_SINKS: tl.constexpr):
    """Return the weighted mean of values; zeros if nothing was summed. `top`, `total`, `head` broadcast to `acc`."""
    if HAS_SINKS:
        sink = tl.load(sinks + head)
        _, a, b = rescale(top, sink)
        total, acc = total * a + b, acc * a
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def attend_tiles(
    q, keys, values, sinks, slopes, first_token, contexts, slots, table, seen, shared, items, num_work, partials,
    states, out, q_stride, out_stride, table_stride, scale, soft_cap, window,
    WORK: tl.constexpr, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, S: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr, KIND: tl.constexpr,
    HEIGHT: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SEEN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attend tiles of HEIGHT // HEADS tokens x HEADS heads of one KV head.

    An item is (row, first token in the row, split, part). It covers one split, whose state becomes parts from that
    number on, or, with part -1, all splits, and the result is written. With part -2 it is (first, number, split, -2):
    the split of so many rows of one token that share its blocks; `shared` has each row and where its part of the split
    is, counted from its part of the first split. `num_work[WORK]` items are there.
    """
    COMPUTE: tl.constexpr = keys.dtype.element_ty if KIND == 0 else q.dtype.element_ty
    BLOCKS: tl.constexpr = (G + HEADS - 1) // HEADS
    TOKENS: tl.constexpr = HEIGHT // HEADS
    SHARES: tl.constexpr = WORK == 0 and D <= SHARED_SIZE and V <= SHARED_SIZE and not (HAS_WINDOW or HAS_SEEN)
    kv_head, block_of_heads = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    m, d, v = tl.arange(0, HEIGHT), tl.arange(0, DP), tl.arange(0, VP)
    in_group = block_of_heads * HEADS + m % HEADS
    head = kv_head * G + in_group
    for item in range(tl.program_id(0), tl.load(num_work + WORK), tl.num_programs(0)):
        split, part = tl.load(items + 4 * item + 2), tl.load(items + 4 * item + 3)
        in_tile = (m < TOKENS * HEADS) & (in_group < G)
        row, token, position, _, live = queries_of(
            first_token, contexts, shared, items + 4 * item, m // HEADS, in_tile, SHARES
        )
        blocks = table + tl.load(slots + row).to(tl.int64) * table_stride
        end = position + 1
        if HAS_SEEN:
            end = tl.load(seen + token, mask=live, other=0)
        end = tl.where(live, end, 0)
        low, high = 0, tl.max(end, 0)
        if HAS_WINDOW:
            low = tl.maximum(tl.min(position, 0) - window + 1, 0)
        first_split, end_split = split, split + 1
        if part == -1:
            first_split, end_split = low // SPLIT, (high + SPLIT - 1) // SPLIT
        where_q = token.to(tl.int64) * q_stride + head * D
        query = tl.load(q + where_q[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        query = rounded(query.to(tl.float32), COMPUTE)
        top = tl.full([HEIGHT], -float("inf"), tl.float32)
        total = tl.zeros([HEIGHT], tl.float32)
        acc = tl.zeros([HEIGHT, VP], tl.float32)
        for index in range(first_split, end_split):
            own_top, own_total, own_acc = attend_split(
                query, keys, values, slopes, blocks, index * SPLIT, low, high, kv_head, head, live, position, end,
                scale, soft_cap, window, K, D, DP, V, VP, S, KEY_ROW, VALUE_ROW, KIND, HEIGHT, TILE, SPLIT, HAS_WINDOW,
                HAS_CAP, HAS_SLOPES, UPCAST,
            )  # fmt: skip
            top, a, b = rescale(top, own_top)
            total = total * a + own_total * b
            acc = acc * a[:, None] + own_acc * b[:, None]
        # once more, since registers held over the loop would be spilled
        _, token, _, own_part, live = queries_of(
            first_token, contexts, shared, items + 4 * item, m // HEADS, in_tile, SHARES
        )
        mask = live[:, None] & (v < V)[None, :]
        if part == -1:
            result = finish(top[:, None], total[:, None], acc, sinks, tl.where(live, head, 0)[:, None], HAS_SINKS)
            where_out = token.to(tl.int64) * out_stride + head * V
            tl.store(out + where_out[:, None] + v[None, :], rounded(result, out.dtype.element_ty), mask=mask)
        else:
            base = own_part.to(tl.int64) * (K * G) + head
            tl.store(partials + base[:, None] * V + v[None, :], acc, mask=mask)
            tl.store(states + 2 * base, top, mask=live)
            tl.store(states + 2 * base + 1, total, mask=live)


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def join_parts(
    partials, states, sinks, first_token, joins, num_work, out, out_stride,
    H: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, TOKENS: tl.constexpr, UNROLLED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Join the parts of each token of a tile. A join is (row, first token in the row, first part, number of splits)."""
    head, v = tl.program_id(1), tl.arange(0, VP)
    for join in range(tl.program_id(0), tl.load(num_work + 1), tl.num_programs(0)):
        row, offset = tl.load(joins + 4 * join), tl.load(joins + 4 * join + 1)
        first_part, num_splits = tl.load(joins + 4 * join + 2), tl.load(joins + 4 * join + 3)
        first = tl.load(first_token + row)
        num_tokens = tl.minimum(TOKENS, tl.load(first_token + row + 1) - first - offset)
        for token in range(0, num_tokens):
            top, total = tl.full([1], -float("inf"), tl.float32), tl.zeros([1], tl.float32)
            acc = tl.zeros([VP], tl.float32)
            for begin in range(0, num_splits, UNROLLED):
                for ahead in tl.static_range(UNROLLED):  # a missing part changes nothing
                    split = begin + ahead
                    there = split < num_splits
                    base = (first_part + split * num_tokens + token).to(tl.int64) * H + head
                    at = states + 2 * base + tl.arange(0, 1)
                    own_top = tl.load(at, mask=there, other=-float("inf"))
                    own_total = tl.load(at + 1, mask=there, other=0.0)
                    own_acc = tl.load(partials + base * V + v, mask=there & (v < V), other=0.0)
                    top, a, b = rescale(top, own_top)
                    total, acc = total * a + own_total * b, acc * a + own_acc * b
            result = finish(top, total, acc, sinks, head + tl.arange(0, 1), HAS_SINKS)
            where_out = (first + offset + token).to(tl.int64) * out_stride + head * V
            tl.store(out + where_out + v, rounded(result, out.dtype.element_ty), mask=v < V)


def launch_options(height: int, head_size: int, itemsize: int) -> dict[str, Any]:
    """Return how a program is compiled so that it fits the registers and shared memory of every device.

    `head_size` is the larger size of keys and values, whose numbers have `itemsize` bytes in the pool.
    """
    is_large = height == 64 or height * head_size > 32 * 128
    stages = 1 if head_size * itemsize > 1024 else 2
    return {"num_warps": 8 if is_large else 4, "num_stages": stages, "maxnreg": 255, **OPTIONS}


@torch.library.custom_op("octavo::paged_attention", mutates_args=("partials", "states", "out"))
def paged_attention(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks_H: Tensor | None,
    slopes_H: Tensor | None,
    first_token_N1: Tensor,
    contexts_N: Tensor,
    slots_N: Tensor,
    table_SM: Tensor,
    seen_T: Tensor | None,
    shared_N2: Tensor,
    items_I4: Tensor,
    num_work_3: Tensor,
    partials: Tensor,
    states: Tensor,
    out: Tensor,
    scale: float,
    soft_cap: float,
    window: int,
    num_kv_heads: int,
    pool_dtype: torch.dtype,
    height: int,
    tile: int,
    split: int,
    work: int,
) -> None:
    """Attend the items of a work list (see attend_tiles), of which `num_work_3[work]` are in use.

    `keys` and `values` are a layer's planes of a pool of type `pool_dtype`. `scale`, `soft_cap`, sinks and slopes are
    in units of log2, and with a cap the scale is divided by it; 0 is no cap, or no window. A tile has `height` queries
    and `tile` positions of a `split`.
    """
    num_heads, head_dim, value_dim = q_THD.shape[1], q_THD.shape[2], out.shape[2]
    group = num_heads // num_kv_heads
    heads = min(group, height)
    kind = storage_kind(pool_dtype)
    programs_of_item = num_kv_heads * triton.cdiv(group, heads)
    grid = (min(items_I4.shape[0], max(1, MAX_PROGRAMS // programs_of_item)), programs_of_item)
    attend_tiles[grid](
        q_THD, keys, values, q_THD if sinks_H is None else sinks_H, q_THD if slopes_H is None else slopes_H,
        first_token_N1, contexts_N, slots_N, table_SM, first_token_N1 if seen_T is None else seen_T,
        shared_N2, items_I4, num_work_3, partials, states, out,
        q_THD.stride(0), out.stride(0), table_SM.stride(0), scale, soft_cap, window,
        work, num_kv_heads, group, head_dim, triton.next_power_of_2(max(16, head_dim)), value_dim,
        triton.next_power_of_2(max(16, value_dim)), keys.shape[1], keys.stride(1), values.stride(1), kind,
        height, heads, tile, split, window > 0, soft_cap > 0, sinks_H is not None, slopes_H is not None,
        seen_T is not None, INTERPRETED,
        **launch_options(height, max(head_dim, value_dim), keys.itemsize),
    )  # fmt: skip


@paged_attention.register_fake
def _(*arguments: object) -> None:
    """Change nothing: the result has its memory already."""


@torch.library.custom_op("octavo::join_attention", mutates_args=("out",))
def join_attention(
    partials: Tensor,
    states: Tensor,
    sinks_H: Tensor | None,
    first_token_N1: Tensor,
    joins_J4: Tensor,
    num_work_3: Tensor,
    out: Tensor,
    tokens: int,
) -> None:
    """Join the parts that paged_attention made; `tokens` is how many tokens its tiles have."""
    num_heads, value_dim = out.shape[1], out.shape[2]
    grid = (min(joins_J4.shape[0], max(1, 4 * MAX_PROGRAMS // num_heads)), num_heads)
    join_parts[grid](
        partials, states, out if sinks_H is None else sinks_H, first_token_N1, joins_J4, num_work_3, out, out.stride(0),
        num_heads, value_dim, triton.next_power_of_2(value_dim), tokens, UNROLLED, sinks_H is not None,
        num_warps=1, maxnreg=128, **OPTIONS,
    )  # fmt: skip


@join_attention.register_fake
def _(*arguments: object) -> None:
    """Change nothing: the result has its memory already."""


def _variant(
    heads: tuple[int, int], sizes: tuple[int, int], height: int, types: tuple[str, str], **how: bool
) -> Variant:
    """Return attend_tiles for query and KV heads, sizes of keys and values, and types of queries and pool."""
    (num_heads, num_kv_heads), (head_dim, value_dim), (query, pool) = heads, sizes, types
    kind = how.get("e4m3", False) + 2 * how.get("int8", False)
    group, extra = num_heads // num_kv_heads, num_kv_heads * (kind // 2) * 2
    names = {"window": "HAS_WINDOW", "cap": "HAS_CAP", "sinks": "HAS_SINKS", "slopes": "HAS_SLOPES", "seen": "HAS_SEEN"}
    itemsize = {"*fp32": 4, "*u8": 1}.get(pool, 2)
    constants = {
        "WORK": 0, "K": num_kv_heads, "G": group, "D": head_dim, "DP": triton.next_power_of_2(head_dim), "V": value_dim,
        "VP": triton.next_power_of_2(value_dim), "S": 16, "KEY_ROW": num_kv_heads * head_dim + extra,
        "VALUE_ROW": num_kv_heads * value_dim + extra, "KIND": kind, "HEIGHT": height, "HEADS": min(group, height),
        "TILE": tile_positions(max(head_dim, value_dim), itemsize), "SPLIT": SPLIT, "UPCAST": False,
        **{name: how.get(key, False) for key, name in names.items()},
    }  # fmt: skip
    floats = dict.fromkeys(("sinks", "slopes", "partials", "states"), "*fp32")
    pointers = ("first_token", "contexts", "slots", "table", "seen", "shared", "items", "num_work")
    numbers = {"q_stride": "i32", "out_stride": "i32", "table_stride": "i32", "window": "i32"}
    signature = {
        "q": query, "keys": pool, "values": pool, "out": query, **dict.fromkeys(pointers, "*i32"), **floats,
        **numbers, "scale": "fp32", "soft_cap": "fp32",
    }  # fmt: skip
    aligned = tuple(name for name, kind in signature.items() if kind.startswith("*") and name not in _ROWS)
    aligned += ("q_stride", "out_stride")
    options = launch_options(height, max(head_dim, value_dim), itemsize)
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    return Variant(attend_tiles, signature, constants, warps, stages, aligned, "mma", options)


_BF16, _FP32 = ("*bf16", "*bf16"), ("*fp32", "*fp32")
VARIANTS: tuple[Variant, ...] = (
    _variant((32, 8), (128, 128), 16, _BF16),
    _variant((32, 8), (128, 128), 32, _BF16),
    _variant((9, 3), (64, 64), 64, _BF16, seen=True),
    _variant((16, 8), (256, 256), 16, _BF16, window=True, cap=True),
    _variant((16, 8), (256, 256), 32, _BF16, window=True, cap=True),
    _variant((16, 2), (512, 512), 16, _BF16),
    _variant((64, 8), (64, 64), 32, _BF16, window=True, sinks=True),
    _variant((32, 32), (80, 80), 16, ("*fp16", "*fp16"), slopes=True),
    _variant((16, 16), (192, 128), 32, _BF16),
    _variant((32, 8), (128, 128), 16, ("*bf16", "*u8"), e4m3=True),
    _variant((32, 8), (128, 128), 32, ("*bf16", "*u8"), e4m3=True),
    _variant((32, 8), (128, 128), 16, ("*bf16", "*u8"), int8=True),
    _variant((32, 8), (128, 128), 32, ("*fp16", "*u8"), int8=True),
    _variant((32, 8), (128, 128), 16, _FP32),
    _variant((9, 3), (64, 64), 32, _FP32),
    _variant((16, 8), (256, 256), 32, ("*bf16", "*u8"), e4m3=True),
    _variant((16, 2), (512, 512), 16, ("*bf16", "*u8"), e4m3=True),
    Variant(
        join_parts,
        {"partials": "*fp32", "states": "*fp32", "sinks": "*fp32", "first_token": "*i32", "joins": "*i32",
         "num_work": "*i32", "out": "*bf16", "out_stride": "i32"},
        {"H": 32, "V": 128, "VP": 128, "TOKENS": 4, "UNROLLED": UNROLLED, "HAS_SINKS": True},
        num_warps=1,
        aligned=("partials", "states", "sinks", "out", "out_stride"),
        options={"maxnreg": 128, **OPTIONS},
    ),
)  # fmt: skip
