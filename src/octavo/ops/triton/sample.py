"""The sampler of CUDA devices: one id per row of float32 logits, and log-softmax, with integer sums and no sort.

Owns: the kernels and ops `octavo::sample`, `octavo::kept_probs` and `octavo::log_softmax`. Does not: edit logits, or
support typical-p and the other rare parameters (sampling/selection.py's torch twin does).
Invariants: a row's result depends on its own logits and parameters only. Ids equal those of csrc/sampling.cpp: a weight
is the same polynomial in float32, without fused multiply-adds, as an integer number of 2^-34, so that sums are exact in
any order. The order of candidates is (logit descending, id ascending): `rank` below is an integer that orders logits.
Method: bins of equal width count and weigh the candidates of a row by atomic adds. A search then finds the bin of a
cut or of the drawn id, lists the bin's ids, and narrows their ranks by 16 at a time.
Shapes: R rows, V vocabulary, B blocks of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.sample_kernel import MAX_VOCAB_SIZE
from octavo.ops.triton.variant import INTERPRETED, OPTIONS, Variant

BLOCK = 2048  # logits that one program reads, and bins of a row; less for a smaller vocabulary
LISTED = tl.constexpr(4096)  # ids of a bin that are listed; the ids of a larger bin are found in the row each time
LEAST = tl.constexpr(-25.0)  # e^-25 < 2^-35: the weight is 0 below it
NAN_RANK = tl.constexpr(-0x80000000)  # NaN is before all logits
LAST_RANK = tl.constexpr(0x7FFFFFFF)  # after all logits
BANNED_RANK = tl.constexpr(0x7F800000)  # of -inf
BEST_RANK = tl.constexpr(-0x7F800001)  # of +inf
PIVOTS = tl.constexpr(16)
TILE = tl.constexpr(512 if INTERPRETED else 128)  # entries of a bin that are read together, at most a block
WARPS = 8
ROWS = 128 if INTERPRETED else 1  # of one program, at most: in the interpreter, an operation costs more than elements
ANY_ROWS = {"do_not_specialize": ["num_rows"], "do_not_specialize_on_alignment": ["packed"]}  # one compilation for all
WORDS = 7  # of a row's parameters; see sampling.selection.Draws.pack


@triton.jit
def _rank(x):
    """Return an int32 that is lower for a better logit. -0 counts as 0, any NaN is the best."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == 0.0, 0, bits)
    rank = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(x != x, NAN_RANK, rank)


@triton.jit
def _logit(rank):
    """Return the logit of a rank."""
    bits = ~rank
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _exponential(x):
    """Return e^x of x <= 0, with the operations of csrc/sampling_passes.h (Moshier, Cephes, 1989)."""
    x = tl.where(x < -30.0, -30.0, x)
    whole = (x * 1.44269504088896341 + 12582912.0) - 12582912.0
    r = (x - whole * 0.693359375) + whole * 2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = y * (r * r) + r + 1.0
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return y * power


@triton.jit
def _weight(scaled):
    """Return e^scaled in units of 2^-34, to the nearest integer, ties to even."""
    value = _exponential(scaled) * 17179869184.0
    nearest = (value + 8388608.0) - 8388608.0  # from 2^23 on, a float32 is an integer
    return tl.where(value < 8388608.0, nearest, value).to(tl.int64)


@triton.jit
def _bin(x, best, scale, BLOCK: tl.constexpr):
    """Return the bin of a logit: lower for a better one. Where it overflows it is the last, so that it keeps order."""
    place = (best - x) * scale
    return tl.where(place < BLOCK - 1, place, BLOCK - 1).to(tl.int32)


@triton.constexpr_function
def _tile(block):
    return min(TILE.value, block)


@triton.jit
def _any(x):
    return tl.sum(x.to(tl.int32)) > 0


@triton.jit
def _rows_of(num_rows, ROWS: tl.constexpr):
    """Return the program's rows, and which of them are rows of the call."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return rows, rows < num_rows


@triton.jit
def _read(row_logits, is_in, ids, size):
    """Return these logits of each row; -inf beyond the vocabulary and in rows that are not read."""
    return tl.load(row_logits + ids, mask=is_in & (ids < size), other=-float("inf"))


@triton.jit
def _of_blocks(row_values, is_in, num_blocks, other, WIDE: tl.constexpr):
    """Return what a row has of each of its blocks; `other` after them and in rows that are not read."""
    blocks = tl.arange(0, WIDE)[None, :]
    return tl.load(row_values + blocks, mask=is_in & (blocks < num_blocks), other=other)


@triton.jit
def _best_rank(row_extremes, is_row, num_blocks, WIDE: tl.constexpr):
    """Return each row's best rank, and whether its logit is finite."""
    best = tl.min(_of_blocks(row_extremes, is_row, num_blocks, LAST_RANK, WIDE), 1, keep_dims=True)
    return best, is_row & (best > BEST_RANK) & (best < BANNED_RANK)


@triton.jit
def _total(row_sums, is_in, num_blocks, WIDE: tl.constexpr):
    return tl.sum(_of_blocks(row_sums, is_in, num_blocks, 0, WIDE), 1, keep_dims=True)


@triton.jit
def _logit_of(rank, is_in):
    """Return the logit of a rank, or some finite logit where there is none."""
    return _logit(tl.where(is_in, rank, -1))


@triton.jit
def _parameters(packed, rows, is_row, num_rows, best_rank, is_finite):
    """Return whether each row is drawn, whether it has a cut, and its best logit, 1 / temperature, floor and cuts."""
    at = packed + rows
    inverse = tl.load(at, mask=is_row, other=0).to(tl.float32, bitcast=True)
    floor = tl.load(at + num_rows, mask=is_row, other=0).to(tl.float32, bitcast=True)
    top_k = tl.load(at + 2 * num_rows, mask=is_row, other=0)
    top_p = _double(at + 3 * num_rows, is_row, num_rows)
    is_drawn = is_finite & (inverse > 0.0)
    has_cut = is_drawn & ((top_k > 0) | (top_p < 1.0))
    best = _logit_of(best_rank, is_drawn)
    return is_drawn, has_cut, best, tl.where(is_drawn, inverse, 1.0), floor, top_k, top_p


@triton.jit
def _double(at, is_row, num_rows):
    """Return the float64 whose two words are in this parameter and the next."""
    low = tl.load(at, mask=is_row, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(at + num_rows, mask=is_row, other=0).to(tl.int64) << 32
    return (high | low).to(tl.float64, bitcast=True)


@triton.jit(**ANY_ROWS)
def find_extremes(
    logits, stride, extremes, bins, size, num_rows, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HAS_BINS: tl.constexpr,
):  # fmt: skip
    """Write the best rank and the last finite rank of each block, and clear the rows' bins."""
    rows, is_row = _rows_of(num_rows, ROWS)
    block, each = tl.program_id(1), tl.arange(0, BLOCK)[None, :]
    rank = _rank(_read(logits + rows * stride, is_row, block * BLOCK + each, size))
    at = extremes + rows * 2 * num_blocks + block
    tl.store(at, tl.min(rank, 1, keep_dims=True), mask=is_row)
    last = tl.max(tl.where(rank < BANNED_RANK, rank, NAN_RANK), 1, keep_dims=True)
    tl.store(at + num_blocks, last, mask=is_row)
    if HAS_BINS:
        for start in range(block * BLOCK, 2 * BLOCK, num_blocks * BLOCK):
            tl.store(bins + rows * 2 * BLOCK + start + each, tl.zeros([ROWS, BLOCK], tl.int64), mask=is_row)


@triton.jit(**ANY_ROWS)
def weigh_blocks(
    logits, stride, packed, extremes, sums, scales, bins, size, num_rows, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write each block's sum of weights, and of those that min-p keeps; fill the bins of rows with a cut."""
    rows, is_row = _rows_of(num_rows, ROWS)
    block, row_extremes = tl.program_id(1), extremes + rows * 2 * num_blocks
    best_rank, is_finite = _best_rank(row_extremes, is_row, num_blocks, WIDE)
    is_drawn, has_cut, best, inverse, floor, top_k, _ = _parameters(
        packed, rows, is_row, num_rows, best_rank, is_finite
    )
    if _any(is_drawn):
        x = _read(logits + rows * stride, is_drawn, block * BLOCK + tl.arange(0, BLOCK)[None, :], size)
        scaled = (x - best) * inverse
        weight = _weight(scaled)
        at = sums + rows * 2 * num_blocks + block
        tl.store(at, tl.sum(weight, 1, keep_dims=True), mask=is_drawn)
        floored = tl.where(scaled >= floor, weight, 0)
        tl.store(at + num_blocks, tl.sum(floored, 1, keep_dims=True), mask=is_drawn)
        if _any(has_cut):
            lows = _of_blocks(row_extremes + num_blocks, has_cut, num_blocks, NAN_RANK, WIDE)
            lowest = _logit(tl.maximum(tl.max(lows, 1, keep_dims=True), best_rank))
            span = tl.minimum(best - tl.where(has_cut, lowest, best), 25.1 / inverse)
            scale = tl.minimum(tl.maximum(BLOCK / tl.maximum(span, 1e-30), 1e-30), 1e30)
            tl.store(scales + rows, scale, mask=has_cut)
            is_in = has_cut & (scaled >= LEAST)
            where = bins + rows * 2 * BLOCK + _bin(x, best, scale, BLOCK)
            tl.atomic_add(where, weight, mask=is_in, sem="relaxed")
            ones = tl.full([ROWS, BLOCK], 1, tl.int64)
            tl.atomic_add(where + BLOCK, ones, mask=is_in & (top_k > 0), sem="relaxed")


@triton.jit
def _find(row, is_found, size, target, by_count, BLOCK: tl.constexpr):
    """Find the first candidate whose cumulative weight (or count, if `by_count`) exceeds the target, which some does.

    Return its rank, weight, bin and the bin's size; the count and the weight of the candidates of better ranks. The
    row's list then has the ids of the bin, ascending, if they are at most LISTED.
    """
    row_logits, best, inverse, scale, row_extremes, row_bins, row_list = row
    at = tl.arange(0, BLOCK)[None, :]
    weights = tl.load(row_bins + at, mask=is_found, other=0)
    counts = tl.load(row_bins + BLOCK + at, mask=is_found, other=0)
    is_before = tl.cumsum(tl.where(by_count, counts, weights), 1) <= target
    bin = tl.sum(is_before.to(tl.int32), 1, keep_dims=True)
    first_count = tl.sum(tl.where(is_before, counts, 0), 1, keep_dims=True)
    first_weight = tl.sum(tl.where(is_before, weights, 0), 1, keep_dims=True)
    num = tl.zeros(bin.shape, tl.int32)
    low, high = tl.full(bin.shape, 0x7FFFFFFF, tl.int64), tl.full(bin.shape, -0x80000000, tl.int64)
    tl.debug_barrier()  # other threads may still read the last list
    for start in range(0, size, BLOCK):
        block_best = _logit(tl.load(row_extremes + start // BLOCK, mask=is_found, other=BANNED_RANK))
        if _any(is_found & (_bin(block_best, best, scale, BLOCK) <= bin)):
            ids = start + tl.arange(0, BLOCK)[None, :]
            x = _read(row_logits, is_found, ids, size)
            is_in = ((x - best) * inverse >= LEAST) & (_bin(x, best, scale, BLOCK) == bin)
            places = num + tl.cumsum(is_in.to(tl.int32), 1) - 1
            tl.store(row_list + places, tl.broadcast_to(ids, places.shape), mask=is_in & (places < LISTED))
            rank = _rank(x).to(tl.int64)
            low = tl.minimum(low, tl.min(tl.where(is_in, rank, 0x7FFFFFFF), 1, keep_dims=True))
            high = tl.maximum(high, tl.max(tl.where(is_in, rank, -0x80000000), 1, keep_dims=True))
            num += tl.sum(is_in.to(tl.int32), 1, keep_dims=True)
    tl.debug_barrier()  # other threads read the list than wrote it
    length = tl.max(tl.where(num <= LISTED, num, size))
    count, weight = first_count, first_weight
    while _any(low < high):
        marks = low + ((high - low) * tl.arange(0, PIVOTS)[None, :] >> 4)
        counts_P = tl.zeros(marks.shape, tl.int64) + first_count
        weights_P = tl.zeros(marks.shape, tl.int64) + first_weight
        for start in range(0, length, _tile(BLOCK)):
            rank, worth, _ = _entries(row, is_found, size, bin, num, start, BLOCK)
            is_up_to = rank[:, :, None] <= marks[:, None, :]
            counts_P += tl.sum(is_up_to.to(tl.int64), 1)
            weights_P += tl.sum(tl.where(is_up_to, worth[:, :, None], 0), 1)
        is_below = (tl.where(by_count, counts_P, weights_P) <= target) & (low < high)
        count = tl.maximum(count, tl.max(tl.where(is_below, counts_P, 0), 1, keep_dims=True))
        weight = tl.maximum(weight, tl.max(tl.where(is_below, weights_P, 0), 1, keep_dims=True))
        new_low = tl.maximum(low, tl.max(tl.where(is_below, marks + 1, -0x80000000), 1, keep_dims=True))
        high = tl.minimum(high, tl.min(tl.where(is_below, 0x7FFFFFFF, marks), 1, keep_dims=True))
        low = new_low
    rank = low.to(tl.int32)
    return rank, _weight((_logit_of(rank, is_found) - best) * inverse), bin, num, count, weight


@triton.jit
def _entries(row, is_found, size, bin, num, start, BLOCK: tl.constexpr):
    """Return ranks, weights and ids of the next entries of each bin's list, or of the row if the bin is not listed.

    The rank of an entry that is not in the bin is after all ranks.
    """
    row_logits, best, inverse, scale, _, _, row_list = row
    is_listed, at = num <= LISTED, start + tl.arange(0, _tile(BLOCK))[None, :]
    is_in = is_found & (at < tl.where(is_listed, num, size))
    ids = tl.where(is_listed, tl.load(row_list + at, mask=is_in & is_listed, other=0), at)
    x = _read(row_logits, is_in, ids, size)
    scaled = (x - best) * inverse
    is_in &= (scaled >= LEAST) & (_bin(x, best, scale, BLOCK) == bin)
    return tl.where(is_in, _rank(x).to(tl.int64), 0x80000000), _weight(scaled), ids


@triton.jit
def _nth(row, is_found, size, bin, num, wanted, index, BLOCK: tl.constexpr):
    """Return the id, in ascending order from 0, with this index among those of the wanted rank."""
    id, seen = tl.full(bin.shape, -1, tl.int32), tl.zeros(bin.shape, tl.int64)
    start, length = tl.full((), 0, tl.int32), tl.max(tl.where(num <= LISTED, num, size))
    while _any(is_found & (id < 0)) & (start < length):
        rank, _, ids = _entries(row, is_found, size, bin, num, start, BLOCK)
        is_tie = (rank == wanted).to(tl.int32)
        is_it = (is_tie > 0) & (seen + tl.cumsum(is_tie, 1) - 1 == index)
        id = tl.maximum(id, tl.max(tl.where(is_it, ids, -1), 1, keep_dims=True))
        seen += tl.sum(is_tie, 1, keep_dims=True)
        start += _tile(BLOCK)
    return id


@triton.jit
def _draw_by_rank(
    row, has_cut, size, top_k, top_p, total, kept, uniform, BLOCK: tl.constexpr, CUTS: tl.constexpr
):  # fmt: skip
    """Draw among the candidates that top-k, top-p and min-p keep, of which each keeps a prefix; see `choose` for CUTS.

    `total` is the weight of all candidates, `kept` that of those that min-p keeps. Return the id, its rank, and the
    weight that is kept.
    """
    row_bins = row[5]
    num = tl.sum(tl.load(row_bins + BLOCK + tl.arange(0, BLOCK)[None, :], mask=has_cut, other=0), 1, keep_dims=True)
    is_found = has_cut & (top_k > 0) & (top_k < num)
    target = top_k.to(tl.int64) - 1
    id, rank = tl.zeros(top_k.shape, tl.int32), tl.zeros(top_k.shape, tl.int32)
    for step in range(3):  # top-k, top-p, the draw: one search in a loop compiles three times as fast as three
        if _any(is_found):
            rank, each, bin, num_in_bin, count, weight = _find(row, is_found, size, target, step == 0, BLOCK)
            up_to = tl.where(step == 0, target - count, (target - weight) // tl.maximum(each, 1)) + 1  # ties
            if step == 2:
                id = _nth(row, is_found, size, bin, num_in_bin, rank, up_to - 1, BLOCK)
            reached = weight + up_to * each
            kept = tl.where(is_found & (step < 2), tl.minimum(kept, reached), kept)
            total = tl.where(is_found & (step == 0), reached, total)
        if step == 0:
            share = top_p * total.to(tl.float64)
            mass = share.to(tl.int64)
            mass += (mass.to(tl.float64) < share).to(tl.int64)
            is_found, target = has_cut & (mass < kept), mass - 1
        else:
            is_found = has_cut
            if CUTS:
                target = kept - 1
            else:
                target = (uniform * kept.to(tl.float64)).to(tl.int64)
    return id, rank, kept


@triton.jit
def _first_in_row(
    row_logits, is_row, row_extremes, best_rank, size, num_blocks, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return the first id with the best rank."""
    ranks = _of_blocks(row_extremes, is_row, num_blocks, LAST_RANK, WIDE)
    block = tl.min(tl.where(ranks == best_rank, tl.arange(0, WIDE)[None, :], num_blocks), 1, keep_dims=True)
    ids = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_best = (_rank(_read(row_logits, is_row, ids, size)) == best_rank) & (ids < size)
    return tl.min(tl.where(is_best, ids, LAST_RANK), 1, keep_dims=True)


@triton.jit
def _draw_in_id_order(
    row_logits, is_whole, best, inverse, floor, uniform, row_sums, size, num_blocks,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the first id whose cumulative weight exceeds uniform * total."""
    parts = _of_blocks(row_sums + num_blocks, is_whole, num_blocks, 0, WIDE)
    target = (uniform * tl.sum(parts, 1, keep_dims=True).to(tl.float64)).to(tl.int64)
    is_before = tl.cumsum(parts, 1) <= target
    block = tl.sum(is_before.to(tl.int32), 1, keep_dims=True)
    before = tl.sum(tl.where(is_before, parts, 0), 1, keep_dims=True)
    scaled = (_read(row_logits, is_whole, block * BLOCK + tl.arange(0, BLOCK)[None, :], size) - best) * inverse
    reached = before + tl.cumsum(tl.where(scaled >= floor, _weight(scaled), 0), 1)
    return block * BLOCK + tl.sum((reached <= target).to(tl.int32), 1, keep_dims=True)


@triton.jit(**ANY_ROWS)
def choose(
    logits, stride, packed, extremes, sums, scales, bins, lists, ids, bests, cuts, size, num_rows, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """Write each row's id and best logit. With CUTS, the id is the last candidate's; `cuts` gets its rank and the
    weight of all candidates."""
    rows, is_row = _rows_of(num_rows, ROWS)
    row_logits, row_extremes = logits + rows * stride, extremes + rows * 2 * num_blocks
    row_sums = sums + rows * 2 * num_blocks
    best_rank, is_finite = _best_rank(row_extremes, is_row, num_blocks, WIDE)
    is_drawn, has_cut, best, inverse, floor, top_k, top_p = _parameters(
        packed, rows, is_row, num_rows, best_rank, is_finite
    )
    uniform = _double(packed + rows + 5 * num_rows, is_row, num_rows)
    total = _total(row_sums, is_drawn, num_blocks, WIDE)
    kept = _total(row_sums + num_blocks, is_drawn, num_blocks, WIDE)
    id, last_rank = tl.zeros([ROWS, 1], tl.int32), tl.full([ROWS, 1], LAST_RANK, tl.int32)
    if not CUTS:
        if _any(is_row & (is_drawn == 0)):
            id = _first_in_row(row_logits, is_row, row_extremes, best_rank, size, num_blocks, BLOCK, WIDE)
        is_whole = is_drawn & (has_cut == 0)
        if _any(is_whole):
            drawn = _draw_in_id_order(
                row_logits, is_whole, best, inverse, floor, uniform, row_sums, size, num_blocks, BLOCK, WIDE
            )  # fmt: skip
            id = tl.where(is_whole, drawn, id)
    if _any(has_cut):
        scale = tl.load(scales + rows, mask=has_cut, other=1.0)
        row = (row_logits, best, inverse, scale, row_extremes, bins + rows * 2 * BLOCK, lists + rows * LISTED)
        drawn, rank, kept = _draw_by_rank(
            row, has_cut, size, top_k, top_p, total, kept, uniform, BLOCK, CUTS
        )  # fmt: skip
        id, last_rank = tl.where(has_cut, drawn, id), tl.where(has_cut, rank, last_rank)
    tl.store(ids + rows, id, mask=is_row)
    tl.store(bests + rows, _logit(best_rank), mask=is_row)
    if CUTS:
        tl.store(cuts + rows, last_rank.to(tl.int64), mask=is_row)
        tl.store(cuts + num_rows + rows, kept, mask=is_row)


@triton.jit(**ANY_ROWS)
def keep_weights(
    logits, stride, packed, extremes, ids, cuts, probs, size, num_rows, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the probability with which each id of a block is drawn; NaN in a row that draws nothing."""
    rows, is_row = _rows_of(num_rows, ROWS)
    best_rank, is_finite = _best_rank(extremes + rows * 2 * num_blocks, is_row, num_blocks, WIDE)
    is_drawn, _, best, inverse, floor, _, _ = _parameters(packed, rows, is_row, num_rows, best_rank, is_finite)
    last_rank = tl.load(cuts + rows, mask=is_drawn, other=0).to(tl.int32)
    last_id = tl.load(ids + rows, mask=is_drawn, other=0)
    kept = tl.load(cuts + num_rows + rows, mask=is_drawn, other=1).to(tl.float64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _read(logits + rows * stride, is_drawn, at, size)
    scaled, rank = (x - best) * inverse, _rank(x)
    is_in = (scaled >= floor) & ((rank < last_rank) | ((rank == last_rank) & (at <= last_id)))
    prob = tl.where(is_in, _weight(scaled), 0).to(tl.float64) / kept
    tl.store(probs + rows * size + at, tl.where(is_drawn, prob, float("nan")), mask=is_row & (at < size))


@triton.jit(**ANY_ROWS)
def sum_exponentials(
    logits, stride, extremes, sums, size, num_rows, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write each block's sum of e^(logit - best) in units of 2^-43, which 2^19 ids do not overflow."""
    rows, is_row = _rows_of(num_rows, ROWS)
    best_rank, is_good = _best_rank(extremes + rows * 2 * num_blocks, is_row, num_blocks, WIDE)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _read(logits + rows * stride, is_good, ids, size) - _logit_of(best_rank, is_good)
    units = tl.where(x < -30.0, 0, (_exponential(x) * 8796093022208.0).to(tl.int64))
    tl.store(sums + rows * num_blocks + tl.program_id(1), tl.sum(units, 1, keep_dims=True), mask=is_good)


@triton.jit(**ANY_ROWS)
def subtract_logs(
    logits, stride, extremes, sums, logprobs, size, num_rows, num_blocks,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write (logit - best) - log(sum of e^(logit - best)); NaN in a row whose best logit is not finite."""
    rows, is_row = _rows_of(num_rows, ROWS)
    best_rank, is_good = _best_rank(extremes + rows * 2 * num_blocks, is_row, num_blocks, WIDE)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.where(is_good, _total(sums + rows * num_blocks, is_good, num_blocks, WIDE), 1 << 43)
    log = tl.log(total.to(tl.float64) * 1.1368683772161603e-13).to(tl.float32)
    x = _read(logits + rows * stride, is_good, ids, size)
    logprob = (x - _logit_of(best_rank, is_good)) - log
    tl.store(logprobs + rows * size + ids, tl.where(is_good, logprob, float("nan")), mask=is_row & (ids < size))


class _Rows:
    """The rows of a call: what all kernels get, and memory for intermediate values."""

    def __init__(self, logits_RV: Tensor) -> None:
        assert logits_RV.dtype is torch.float32 and logits_RV.stride(1) == 1, "float32 rows"
        self.logits, (self.num_rows, self.size) = logits_RV, logits_RV.shape
        assert 0 < self.size <= MAX_VOCAB_SIZE, "with more ids, sums of weights would not be exact"
        self.block = min(BLOCK, max(256, triton.next_power_of_2(self.size)))
        self.num_blocks = triton.cdiv(self.size, self.block)
        self.rows = min(ROWS, triton.next_power_of_2(self.num_rows))
        self.wide: int = triton.next_power_of_2(self.num_blocks)
        self.extremes = self.empty(2 * self.num_blocks, torch.int32)

    def empty(self, width: int, dtype: torch.dtype) -> Tensor:
        return self.logits.new_empty((self.num_rows, width), dtype=dtype)

    def launch(self, kernel: Any, *tensors: Tensor, is_by_row: bool = False, **constants: int) -> None:
        """Launch a kernel for each row, or for each block of each row."""
        grid = triton.cdiv(self.num_rows, self.rows), 1 if is_by_row else self.num_blocks
        constants = {"ROWS": self.rows, "BLOCK": self.block, **constants}
        sizes = self.size, self.num_rows, self.num_blocks
        kernel[grid](self.logits, self.logits.stride(0), *tensors, *sizes, **constants, num_warps=WARPS, **OPTIONS)

    def choose(self, packed_KR: Tensor, has_cuts: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Launch the three kernels that choose; return ids, best logits, and cuts."""
        assert packed_KR.shape == (WORDS, self.num_rows) and packed_KR.is_contiguous(), "see Draws.pack"
        sums, scales = self.empty(2 * self.num_blocks, torch.int64), self.empty(1, torch.float32)
        bins, lists = self.empty(2 * self.block, torch.int64), self.empty(LISTED.value, torch.int32)
        ids_R, best_R = self.empty(1, torch.int32)[:, 0], self.empty(1, torch.float32)[:, 0]
        cuts_2R = self.logits.new_empty((2, self.num_rows), dtype=torch.int64)
        self.launch(find_extremes, self.extremes, bins, HAS_BINS=True)
        self.launch(weigh_blocks, packed_KR, self.extremes, sums, scales, bins, WIDE=self.wide)
        self.launch(
            choose, packed_KR, self.extremes, sums, scales, bins, lists, ids_R, best_R, cuts_2R,
            is_by_row=True, WIDE=self.wide, CUTS=has_cuts,
        )  # fmt: skip
        return ids_R, best_R, cuts_2R


@torch.library.custom_op("octavo::sample", mutates_args=())
def sample(logits_RV: Tensor, packed_KR: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's id, int32, and its best logit, which is NaN if any logit is.

    The id is drawn, or the first of the best if the inverse temperature is 0 or the best logit is not finite.
    """
    if not len(logits_RV):
        return logits_RV.new_empty(0, dtype=torch.int32), logits_RV.new_empty(0)
    ids_R, best_R, _ = _Rows(logits_RV).choose(packed_KR, has_cuts=False)
    return ids_R, best_R


@sample.register_fake
def _(logits_RV: Tensor, packed_KR: Tensor) -> tuple[Tensor, Tensor]:
    return logits_RV.new_empty(len(logits_RV), dtype=torch.int32), logits_RV.new_empty(len(logits_RV))


@torch.library.custom_op("octavo::kept_probs", mutates_args=())
def kept_probs(logits_RV: Tensor, packed_KR: Tensor) -> Tensor:
    """Return the probability with which `sample` draws each id, float64; a row that draws nothing has NaN."""
    probs_RV = torch.empty_like(logits_RV, dtype=torch.float64, memory_format=torch.contiguous_format)
    if len(logits_RV):
        rows = _Rows(logits_RV)
        ids_R, _, cuts_2R = rows.choose(packed_KR, has_cuts=True)
        rows.launch(keep_weights, packed_KR, rows.extremes, ids_R, cuts_2R, probs_RV, WIDE=rows.wide)
    return probs_RV


@kept_probs.register_fake
def _(logits_RV: Tensor, packed_KR: Tensor) -> Tensor:
    return torch.empty_like(logits_RV, dtype=torch.float64, memory_format=torch.contiguous_format)


@torch.library.custom_op("octavo::log_softmax", mutates_args=())
def log_softmax(logits_RV: Tensor) -> Tensor:
    """Return log-probabilities, float32; a row whose best logit is not finite has NaN."""
    logprobs_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
    if len(logits_RV):
        rows = _Rows(logits_RV)
        sums = rows.empty(rows.num_blocks, torch.int64)
        rows.launch(find_extremes, rows.extremes, rows.extremes, HAS_BINS=False)
        rows.launch(sum_exponentials, rows.extremes, sums, WIDE=rows.wide)
        rows.launch(subtract_logs, rows.extremes, sums, logprobs_RV, WIDE=rows.wide)
    return logprobs_RV


@log_softmax.register_fake
def _(logits_RV: Tensor) -> Tensor:
    return torch.empty_like(logits_RV, memory_format=torch.contiguous_format)


def _variant(kernel: Any, **constants: int) -> Variant:
    """Return a kernel's variant for a vocabulary of 128 thousand ids."""
    types = dict.fromkeys(("packed", "extremes", "lists", "ids"), "*i32")
    types |= dict.fromkeys(("sums", "bins", "cuts"), "*i64")
    types |= dict.fromkeys(("logits", "scales", "bests", "logprobs"), "*fp32") | {"probs": "*fp64"}
    numbers = dict.fromkeys(("stride", "size", "num_rows", "num_blocks"), "i32")
    values = {"ROWS": 1, "BLOCK": BLOCK, "WIDE": 64, "HAS_BINS": True, **constants}
    names = kernel.arg_names
    return Variant(
        kernel,
        {name: (types | numbers)[name] for name in names if name not in values},
        {name: value for name, value in values.items() if name in names},
        num_warps=WARPS,
        aligned=("stride",),
    )


VARIANTS: tuple[Variant, ...] = (
    _variant(find_extremes),
    _variant(find_extremes, HAS_BINS=False),
    _variant(weigh_blocks),
    _variant(choose, CUTS=False),
    _variant(choose, CUTS=True),
    _variant(keep_weights),
    _variant(sum_exponentials),
    _variant(subtract_logs),
)
