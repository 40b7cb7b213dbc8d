"""Times of the attention kernel alone: one layer, its twin beside it, and the machine's own limits.

Owns: the cases, and how they are timed. Does not: print (the CLI does), or measure the machine's limits.
Invariants: the kernel and its twin take turns, and the best time of each counts, so that other load on the machine
affects both. Layers' pools are read in turn, so that small cases are as cold as in a model.
Shapes: T tokens, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.ops.attention import AttentionBackend, AttentionBatch
from octavo.ops.attention_batched import BatchedAttention
from octavo.ops.attention_kernel import KernelAttention, has_kernel
from octavo.ops.attention_pool import KVPool, PoolShape

COLUMNS = ("heads", "KV kind", "case", "kernel ms", "twin ms", "times", "GB/s", "GFLOP/s", "% memory", "% product")
BLOCK = 16
LAYERS = 4
BUDGET_S = 0.6  # of one case


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Rows of a step: contexts and tokens of each, and how many first positions are in the same blocks."""

    name: str
    contexts: tuple[int, ...]
    counts: tuple[int, ...]
    shared: int = 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention heads of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The machine's rates: bytes a second read from memory, and operations a second of a large float32 product."""

    bytes_per_s: float
    flops_per_s: float


CASES = (
    AttentionCase("32 decodes x 200", (200,) * 32, (1,) * 32),
    AttentionCase("32 decodes x 1000", (1000,) * 32, (1,) * 32),
    AttentionCase("1 decode x 4096", (4096,), (1,)),
    AttentionCase("prompt of 512", (512,), (512,)),
    AttentionCase("last 512 of 4096", (4096,), (512,)),
    AttentionCase("32 decodes x 500, 384 shared", (500,) * 32, (1,) * 32, 384),
)
SHAPES = (AttentionShape("9/3 x 64", 9, 3, 64), AttentionShape("16/8 x 128", 16, 8, 128))


def measure(
    limits: MachineLimits,
    shapes: Sequence[AttentionShape] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    cases: Sequence[AttentionCase] = CASES,
) -> list[tuple[object, ...]]:
    """Return rows of COLUMNS, measured with torch's current number of threads. Empty without the kernel library."""
    rows: list[tuple[object, ...]] = []
    for shape in shapes:
        for dtype in dtypes:
            for case in cases:
                row = _measure_case(limits, shape, dtype, case)
                rows += [] if row is None else [row]
    return rows


def batch_of(case: AttentionCase) -> AttentionBatch:
    """Return the case as a step; shared positions are in the first row's blocks."""
    contexts, counts = np.array(case.contexts), np.array(case.counts)
    widths = -(-contexts // BLOCK)
    table = np.zeros((len(contexts), widths.max()), dtype=np.int64)
    firsts = np.cumsum(widths) - widths
    for row, (first, width) in enumerate(zip(firsts.tolist(), widths.tolist(), strict=True)):
        table[row, :width] = np.arange(first, first + width)
    table[:, : case.shared // BLOCK] = table[0, : case.shared // BLOCK]
    row_T = np.repeat(np.arange(len(counts)), counts)
    starts = np.concatenate(([0], np.cumsum(counts)))
    position_T = np.arange(starts[-1]) - starts[row_T] + (contexts - counts)[row_T]
    slots_T = table[row_T, position_T // BLOCK] * BLOCK + position_T % BLOCK
    return AttentionBatch(
        num_tokens=int(starts[-1]),
        num_rows=len(counts),
        num_decodes=int((counts == 1).sum()),
        positions_T=torch.from_numpy(position_T),
        slot_mapping_T=torch.from_numpy(slots_T),
        row_start_N1=torch.from_numpy(starts),
        context_len_N=torch.from_numpy(contexts),
        block_table_NM=torch.from_numpy(table),
        counts=counts,
        contexts=contexts,
    )


def work_of(case: AttentionCase, shape: AttentionShape, itemsize: int) -> tuple[int, int]:
    """Return the bytes of keys and values that one layer must read at least, and twice its multiply-adds."""
    positions = sum(case.contexts) - (len(case.contexts) - 1) * case.shared
    seen = sum(
        count * context - count * (count - 1) // 2 for context, count in zip(case.contexts, case.counts, strict=True)
    )
    num_bytes = 2 * positions * shape.num_kv_heads * shape.head_dim * itemsize
    return num_bytes, 4 * seen * shape.num_heads * shape.head_dim


def _measure_case(
    limits: MachineLimits, shape: AttentionShape, dtype: torch.dtype, case: AttentionCase
) -> tuple[object, ...] | None:
    blocks = sum(-(-context // BLOCK) for context in case.contexts)
    pool = KVPool(PoolShape(LAYERS, blocks, BLOCK, shape.num_kv_heads, shape.head_dim, dtype), torch.device("cpu"))
    if not has_kernel(pool, shape.num_heads):
        return None
    for layer in (*pool.keys, *pool.values):
        layer.normal_()
    backends = (KernelAttention(pool, shape.num_heads), BatchedAttention(pool, shape.num_heads))
    kernel_s, twin_s = _best_of_each(backends, batch_of(case), shape)
    num_bytes, flops = work_of(case, shape, dtype.itemsize)
    return (
        shape.name, str(dtype).removeprefix("torch."), case.name, kernel_s * 1e3, twin_s * 1e3, twin_s / kernel_s,
        num_bytes / kernel_s / 1e9, flops / kernel_s / 1e9, 100 * num_bytes / kernel_s / limits.bytes_per_s,
        100 * flops / kernel_s / limits.flops_per_s,
    )  # fmt: skip


def _best_of_each(backends: Sequence[AttentionBackend], batch: AttentionBatch, shape: AttentionShape) -> list[float]:
    """Return seconds of one layer, by backend; the backends take turns."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(batch.num_tokens, heads, shape.head_dim, generator=generator)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    best = [float("inf")] * len(backends)
    end = time.perf_counter() + BUDGET_S
    for turn in range(1000):
        for index, backend in enumerate(backends):
            backend.begin(batch)
            start = time.perf_counter()
            for layer in range(LAYERS):
                backend.attend(layer, query, keys, values)
            if turn > 0:
                best[index] = min(best[index], (time.perf_counter() - start) / LAYERS)
        if turn > 1 and time.perf_counter() > end:
            break
    return best
