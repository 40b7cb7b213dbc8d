"""Mixtures of experts without a wait of the host: the choice, its order by experts, their products, and their sum.

Owns: the kernels. Does not: hold weights, or activate (gates.py).
Invariants: a token's experts and their sum, in ascending order of experts, depend on its row alone; so does a product,
which is linear.py's in a tile of other tokens. A tile is of one expert, and tiles are as wide as an expert's share of
the pairs would need if all were equal, so no shape depends on what is chosen. Nothing is added by atomics.
Shapes: T tokens, X experts, C chosen experts of a token, P = T * C pairs of a token and an expert, in order of tokens;
N tiles of B pairs of one expert, F outputs of an expert, E inputs or hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.triton.linear import block_k, coded_product, kind_of, product, store, tile_sizes
from octavo.ops.triton.rounding import rounded
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

_SOFTMAX, _OF_CHOSEN, _SIGMOID = (tl.constexpr(index) for index in range(3))
_PAIRS = 1024  # that a program looks at together
_ROWS, _BLOCK = (64, 256) if INTERPRETED else (1, 1024)  # of a tile of sums
_NONE = tl.constexpr(-(1 << 62))  # less than any key


@triton.jit
def _key(score, index):
    """Return numbers in the order of the scores, of which none is NaN; of equal ones, a lower index is more."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.int64) * 65536 + (65535 - index)


@triton.jit
def _best(key, count):
    """Return which of the keys [G, S] are among the `count` highest."""
    is_best = key < _NONE
    for _ in range(count):
        highest = tl.max(tl.max(tl.where(is_best, _NONE, key), 1), 0)
        is_best = is_best | (key == highest)
    return is_best


@triton.jit
def _of_best_groups(choice, at, top_groups, num_groups, SIZE: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """Return where [GROUPS, WIDE] a score is one of the groups whose two best scores have the highest sums."""
    highest = tl.max(choice, 1)
    first = tl.min(tl.where(choice == highest[:, None], at, GROUPS * WIDE), 1)
    if SIZE > 1:
        highest += tl.max(tl.where(at == first[:, None], float("-inf"), choice), 1)
    group = tl.arange(0, GROUPS)[:, None]
    key = tl.where(group < num_groups, _key(highest[:, None], group), _NONE)
    return _best(key, top_groups)


@triton.jit
def _choose(
    logits, bias, chosen, weights, num_experts, logits_step, top_k, num_groups, top_groups, least_sum, scale,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, SCORING: tl.constexpr, IS_NORMALISED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GROUPS: tl.constexpr,
):  # fmt: skip
    """Program: a token. Experts are [GROUPS, WIDE], of which SIZE of a group are experts."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDE)[None, :]
    at = group * SIZE + member
    is_expert = (member < SIZE) & (at < num_experts)
    logit = tl.load(logits + row * logits_step + at, mask=is_expert, other=float("-inf"))
    score = logit
    if SCORING == _SOFTMAX:
        raised = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        score = tl.div_rn(raised, tl.zeros_like(raised) + tl.sum(tl.sum(raised, 1), 0))
    elif SCORING == _SIGMOID:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-logit))
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + at, mask=is_expert, other=0.0)
    choice = tl.where(is_expert & (choice == choice), choice, float("-inf"))
    key = tl.where(is_expert, _key(choice, at), _NONE)
    if HAS_GROUPS:
        allowed = _of_best_groups(choice, at, top_groups, num_groups, SIZE, GROUPS, WIDE)
        key = tl.where(allowed & is_expert, key, _NONE)
    is_chosen = _best(key, top_k)
    if SCORING == _OF_CHOSEN:
        raised = tl.where(
            is_chosen, tl.exp(logit - tl.max(tl.max(tl.where(is_chosen, logit, float("-inf")), 1), 0)), 0.0
        )
        score = tl.div_rn(raised, tl.zeros_like(raised) + tl.sum(tl.sum(raised, 1), 0))
    if IS_NORMALISED:
        total = tl.sum(tl.sum(tl.where(is_chosen, score, 0.0), 1), 0)
        score = tl.div_rn(score, tl.zeros_like(score) + tl.where(total < least_sum, least_sum, total))
    score *= scale
    for index in range(top_k):
        expert = tl.min(tl.min(tl.where(is_chosen, at, num_experts - 1), 1), 0)
        weight = tl.sum(tl.sum(tl.where(at == expert, score, 0.0), 1), 0)
        tl.store(chosen + row * top_k + index, expert)
        tl.store(weights + row * top_k + index, weight)
        is_chosen = is_chosen & (at != expert)


@triton.jit(do_not_specialize=["num_pairs"])
def _count(chosen, counts, num_pairs, PAIRS: tl.constexpr):
    """Program: an expert; writes how many pairs it is in."""
    seen = tl.zeros([PAIRS], tl.int32)
    for first in range(0, num_pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        seen += (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == tl.program_id(0)).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(seen, 0))


@triton.jit(do_not_specialize=["num_pairs"])
def _arrange(
    chosen, counts, pairs, tiles, num_pairs, num_experts,
    EXPERTS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program: an expert; writes its pairs, tile after tile, filled up with -1, and what its tiles are of."""
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERTS)
    count = tl.load(counts + others, mask=others < num_experts, other=0)
    needed = (count + BLOCK_T - 1) // BLOCK_T
    first_tile = tl.sum(tl.where(others < expert, needed, 0), 0)
    num_tiles = tl.sum(tl.where(others == expert, needed, 0), 0)
    if expert == 0:
        tl.store(tiles, tl.sum(needed, 0))
    for first in range(0, num_tiles, PAIRS):
        tile = first + tl.arange(0, PAIRS)
        tl.store(tiles + 1 + first_tile + tile, tl.zeros_like(tile) + expert, mask=tile < num_tiles)
    end = first_tile * BLOCK_T
    for first in range(0, num_pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        is_own = (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(pairs + end + tl.cumsum(is_own, 0) - 1, pair, mask=is_own > 0)
        end += tl.sum(is_own, 0)
    rest = end + tl.arange(0, BLOCK_T)
    tl.store(pairs + rest, tl.zeros_like(rest) - 1, mask=rest < (first_tile + num_tiles) * BLOCK_T)


@triton.jit
def _place(pairs, tiles, outputs, BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return this program's outputs, its pairs (-1: none), its expert, and whether it has a tile.

    Neighbours have one tile, so that an expert's weights and the tile's rows are found in the cache.
    """
    across = tl.cdiv(outputs, BLOCK_F)
    tile = tl.program_id(0) // across
    f = tl.program_id(0) % across * BLOCK_F + tl.arange(0, BLOCK_F)
    has_tile = tile < tl.load(tiles)
    pair = tl.load(pairs + tile * BLOCK_T + tl.arange(0, BLOCK_T), mask=has_tile, other=-1)
    return f, pair, tl.load(tiles + 1 + tile, mask=has_tile, other=0), has_tile


@triton.jit
def _multiply(
    x, weight, bias, pairs, tiles, out, outputs, inputs, x_step, weight_step, bias_step, out_step,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, SHARED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program: a tile of BLOCK_F outputs and BLOCK_T pairs of one expert, of which SHARED have one row of x."""
    f, pair, expert, has_tile = _place(pairs, tiles, outputs, BLOCK_F, BLOCK_T)
    if has_tile:
        row = expert.to(tl.int64) * outputs + tl.minimum(f, outputs - 1)
        x_row = x + (tl.maximum(pair, 0) // SHARED).to(tl.int64) * x_step
        acc = product(x_row, weight + row * weight_step, inputs, BLOCK_F, BLOCK_T, BLOCK_K)
        store(out, bias + expert * bias_step, acc, f, pair, pair >= 0, outputs, out_step, HAS_BIAS)


@triton.jit
def _multiply_coded(
    x, codes, scales, minima, table, bias, pairs, tiles, out, outputs, inputs, num_rows, x_step, bias_step, out_step,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, SHARED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program: as `_multiply`."""
    f, pair, expert, has_tile = _place(pairs, tiles, outputs, BLOCK_F, BLOCK_T)
    if has_tile:
        row = expert * outputs + tl.minimum(f, outputs - 1)
        x_row = x + (tl.maximum(pair, 0) // SHARED).to(tl.int64) * x_step
        acc = coded_product(
            x_row, codes, scales, minima, table, row, inputs, num_rows, BLOCK_F, BLOCK_T, GROUP, BITS, KIND
        )
        store(out, bias + expert * bias_step, acc, f, pair, pair >= 0, outputs, out_step, HAS_BIAS)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum(
    parts, weights, shared, gates, out, num_tokens, size, top_k, shared_step, gates_step,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: a tile of ROWS tokens and BLOCK values."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = row < num_tokens
    here = is_token[:, None] & (at < size)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for index in range(top_k):
        pair = row * top_k + index
        weight = tl.load(weights + pair, mask=is_token, other=0.0)
        total += (
            tl.load(parts + pair[:, None] * size + at[None, :], mask=here, other=0.0).to(tl.float32) * weight[:, None]
        )
    if HAS_SHARED:
        value = tl.load(shared + row[:, None] * shared_step + at[None, :], mask=here, other=0.0).to(tl.float32)
        if HAS_GATE:
            gate = tl.load(gates + row * gates_step, mask=is_token, other=0.0)
            value *= tl.div_rn(1.0, 1.0 + tl.exp(-gate))[:, None]
        total += value
    tl.store(out + row[:, None] * size + at[None, :], rounded(total, out.dtype.element_ty), mask=here)


@torch.library.custom_op("octavo::choose_experts", mutates_args=())
def choose_experts(
    logits: Tensor, bias: Tensor | None, top_k: int, scoring: int, is_normalised: bool, least_sum: float, scale: float,
    num_groups: int, top_groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the indices of each token's experts, int32 and ascending, and their weights, float32, [T, C].

    `logits` are float32 rows [T, X], `scoring` is one of the three numbers above; see MixtureSpec.
    """
    num_tokens, num_experts = logits.shape
    chosen, weights = _choice(logits, top_k)
    groups = num_groups if num_groups > top_groups else 1
    size = num_experts // groups
    if num_tokens:
        _choose[(num_tokens,)](
            logits, logits if bias is None else bias, chosen, weights, num_experts, logits.stride(0), top_k, groups,
            top_groups, least_sum, scale,
            SIZE=size, GROUPS=triton.next_power_of_2(groups), WIDE=triton.next_power_of_2(size), SCORING=scoring,
            IS_NORMALISED=is_normalised, HAS_BIAS=bias is not None, HAS_GROUPS=groups > 1,
            num_warps=1 if num_experts <= 256 else 4, **OPTIONS,
        )  # fmt: skip
    return chosen, weights


@choose_experts.register_fake
def _(logits: Tensor, bias: Tensor | None, top_k: int, *others: float) -> tuple[Tensor, Tensor]:
    return _choice(logits, top_k)


def _choice(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return torch.empty(shape, dtype=torch.int32, device=logits.device), logits.new_empty(shape)


@torch.library.custom_op("octavo::arrange_pairs", mutates_args=())
def arrange_pairs(chosen: Tensor, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return pairs by experts [N, B], int32 and filled up with -1, and the tiles [1 + N]: how many, and their experts.

    `chosen` is int32 [T, C]; `dtype` is that of the rows that will be multiplied.
    """
    pairs, tiles = _arranged(chosen, num_experts, dtype)
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    count, width = chosen.numel(), triton.next_power_of_2(num_experts)
    _count[(num_experts,)](chosen, counts, count, PAIRS=_PAIRS, num_warps=4, **OPTIONS)
    _arrange[(num_experts,)](
        chosen, counts, pairs, tiles, count, num_experts,
        EXPERTS=width, PAIRS=_PAIRS, BLOCK_T=pairs.shape[1], num_warps=4, **OPTIONS,
    )  # fmt: skip
    return pairs, tiles


@arrange_pairs.register_fake
def _(chosen: Tensor, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _arranged(chosen, num_experts, dtype)


def _arranged(chosen: Tensor, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return room for the most tiles that there can be: all but one pair of each expert in full ones."""
    count = chosen.numel()
    wide = tile_sizes(triton.cdiv(count, num_experts), dtype)["BLOCK_T"]
    most = min(count, num_experts)
    num_tiles = most + (count - most) // wide
    return chosen.new_empty((num_tiles, wide)), chosen.new_empty(1 + num_tiles)


@torch.library.custom_op("octavo::expert_linear", mutates_args=("out",))
def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Tensor, tiles: Tensor, shared: int, out: Tensor
) -> None:
    """Write x W^T + b of each pair's expert into `out` [P, F]. A row of x is that of `shared` consecutive pairs.

    `weight` is [X * F, E], `bias` [X, F]; the last dimensions are contiguous. `pairs` and `tiles` are arrange_pairs'.
    """
    (num_tiles, wide), outputs = pairs.shape, out.shape[1]
    tile = tile_sizes(wide, x.dtype)
    if num_tiles:
        _multiply[(num_tiles * triton.cdiv(outputs, tile["BLOCK_F"]),)](
            x, weight, weight if bias is None else bias, pairs, tiles, out, outputs, x.shape[1], x.stride(0),
            weight.stride(0), 0 if bias is None else bias.stride(0), out.stride(0),
            BLOCK_K=block_k(x.dtype), SHARED=shared, HAS_BIAS=bias is not None, **tile, **OPTIONS,
        )  # fmt: skip


@expert_linear.register_fake
def _(x: Tensor, *others: Tensor | int | None) -> None:
    return None


@torch.library.custom_op("octavo::expert_coded_linear", mutates_args=("out",))
def expert_coded_linear(
    x: Tensor, codes: Tensor, scales: Tensor, minima: Tensor | None, table: Tensor | None, bias: Tensor | None,
    pairs: Tensor, tiles: Tensor, shared: int, out: Tensor,
) -> None:  # fmt: skip
    """Write as expert_linear, of codes [C, X * F, 32] (see linear.coded_linear)."""
    (num_tiles, wide), outputs = pairs.shape, out.shape[1]
    tile = tile_sizes(wide, x.dtype, is_coded=True)
    if num_tiles:
        _multiply_coded[(num_tiles * triton.cdiv(outputs, tile["BLOCK_F"]),)](
            x, codes, scales, scales if minima is None else minima, scales if table is None else table,
            scales if bias is None else bias, pairs, tiles, out, outputs, x.shape[1], scales.stride(0), x.stride(0),
            0 if bias is None else bias.stride(0), out.stride(0),
            SHARED=shared, HAS_BIAS=bias is not None, **kind_of(codes, scales, minima, table), **tile, **OPTIONS,
        )  # fmt: skip


@expert_coded_linear.register_fake
def _(x: Tensor, *others: Tensor | int | None) -> None:
    return None


@torch.library.custom_op("octavo::sum_experts", mutates_args=())
def sum_experts(parts: Tensor, weights: Tensor, shared: Tensor | None, gates: Tensor | None) -> Tensor:
    """Return the sum [T, E] of the pairs' `parts` [P, E], contiguous, times their `weights` [T, C], in float32.

    `shared` [T, E], if not None, is added; with `gates` [T, 1], float32, times their sigmoids.
    """
    (num_tokens, top_k), size = weights.shape, parts.shape[1]
    out = parts.new_empty((num_tokens, size))
    if num_tokens:
        _sum[(triton.cdiv(num_tokens, _ROWS), triton.cdiv(size, _BLOCK))](
            parts, weights, parts if shared is None else shared, weights if gates is None else gates, out, num_tokens,
            size, top_k, 0 if shared is None else shared.stride(0), 0 if gates is None else gates.stride(0),
            HAS_SHARED=shared is not None, HAS_GATE=gates is not None, ROWS=_ROWS, BLOCK=_BLOCK, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out


@sum_experts.register_fake
def _(parts: Tensor, weights: Tensor, shared: Tensor | None, gates: Tensor | None) -> Tensor:
    return parts.new_empty((weights.shape[0], parts.shape[1]))


def _variant(kernel: Any, constants: dict[str, Any], floats: str = "*bf16", **options: Any) -> Variant:
    types = dict.fromkeys(("x", "weight", "bias", "out", "parts", "shared"), floats)
    types |= dict.fromkeys(("logits", "weights", "gates"), "*fp32")
    types |= dict.fromkeys(("chosen", "counts", "pairs", "tiles"), "*i32")
    types |= {
        "codes": "*u8",
        "scales": "*fp16",
        "minima": "*fp16",
        "table": "*i8",
        "least_sum": "fp32",
        "scale": "fp32",
    }
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    steps = ("inputs", "num_rows", "x_step", "weight_step", "out_step", "size", "shared_step")
    return Variant(kernel, signature, constants, aligned=tuple(set(steps) & set(signature)), **options)


def _of_products(kernel: Any, wide: int, dtype: torch.dtype = torch.bfloat16, **constants: int) -> Variant:
    tile = tile_sizes(wide, dtype, kernel is _multiply_coded)
    options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
    is_float = dtype == torch.float32
    options["instruction"] = None if is_float else "mma"
    constants = {"SHARED": 8, "HAS_BIAS": False, **constants}
    return _variant(kernel, {**tile, **constants}, "*fp32" if is_float else "*bf16", **options)


def _of_choices(scoring: int, groups: int, size: int, **constants: bool) -> Variant:
    shape = {"SIZE": size, "GROUPS": groups, "WIDE": triton.next_power_of_2(size), "SCORING": scoring}
    flags = {"IS_NORMALISED": False, "HAS_BIAS": False, "HAS_GROUPS": groups > 1, **constants}
    return _variant(_choose, {**shape, **flags}, "*fp32", num_warps=1)


VARIANTS: tuple[Variant, ...] = (
    _of_choices(0, 1, 128, IS_NORMALISED=True),
    _of_choices(1, 1, 32),
    _of_choices(2, 8, 32, IS_NORMALISED=True, HAS_BIAS=True),
    _of_choices(2, 8, 20, IS_NORMALISED=True, HAS_BIAS=True),
    _variant(_count, {"PAIRS": _PAIRS}),
    *(_variant(_arrange, {"EXPERTS": 128, "PAIRS": _PAIRS, "BLOCK_T": wide}) for wide in (16, 128)),
    *(_of_products(_multiply, wide, BLOCK_K=64) for wide in (16, 64, 128)),
    _of_products(_multiply, 16, torch.float32, BLOCK_K=32),
    *(_of_products(_multiply_coded, wide, GROUP=32, BITS=4, KIND=1) for wide in (16, 128)),
    _of_products(_multiply_coded, 16, GROUP=32, BITS=8, KIND=0, SHARED=1),
    _of_products(_multiply_coded, 64, GROUP=32, BITS=4, KIND=2, HAS_BIAS=True),
    _variant(_sum, {"HAS_SHARED": True, "HAS_GATE": True, "ROWS": 1, "BLOCK": 1024}),
)
