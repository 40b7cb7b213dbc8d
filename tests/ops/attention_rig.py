"""Rows over a paged pool for the tests of the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from octavo import machine
from octavo.ops import cpu
from octavo.ops.attention import AttentionBackend, AttentionBatch, KVPool, LayerAttention, PoolShape, ReferenceAttention
from octavo.ops.attention_kernel import KernelAttention

# context and count of each row: decodes first
ROWS = ((1, 1), (2, 1), (15, 1), (16, 1), (17, 1), (100, 1), (127, 1), (128, 1), (129, 1), (700, 1))
ROWS += ((9, 9), (30, 7), (132, 8), (260, 40), (300, 150))
Row = tuple[int, int, int]  # index of a row, and its positions [start, end)


def whole(rows: Sequence[tuple[int, int]]) -> list[Row]:
    return [(index, context - count, context) for index, (context, count) in enumerate(rows)]


WHOLE = whole(ROWS)


def has_pairs(kind: torch.dtype) -> bool:
    """Whether the kernel in use rounds queries and weights to bfloat16, to multiply pairs of numbers."""
    isa = cpu.function("octavo_kernels_isa", result=c_int32)
    is_wide = isa is not None and isa() >= cpu.ISA_NAMES.index("avx512")
    return kind == torch.bfloat16 and is_wide and "avx512_bf16" in machine.look().features


def check_close(found: torch.Tensor, expected: torch.Tensor, is_rounded: bool = False) -> None:
    """Equal but for the order of sums; with rounded queries and weights, but for two roundings of at most 2^-9."""
    if not is_rounded:
        torch.testing.assert_close(found, expected, atol=4e-6, rtol=4e-6)
        return
    error = found - expected
    assert error.abs().max() < 0.03 and error.square().mean() < 2**-16 * expected.square().mean()


class Rig:
    """A pool whose keys and values are random everywhere; a step writes what is there already.

    The first `shared` positions of all rows that are long enough are the same blocks.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 64,
        block: int = 16,
        rows: Sequence[tuple[int, int]] = ROWS,
        shared: int = 0,
        value_dim: int = 0,
    ):
        self.rows, self.heads, self.head_dim, self.value_dim = rows, heads, head_dim, value_dim or head_dim
        generator = torch.Generator().manual_seed(head_dim)
        widths = [-(-context // block) for context, _ in rows]
        self.pool = KVPool(
            PoolShape(1, sum(widths), block, heads[1], head_dim, self.value_dim, dtype), torch.device("cpu")
        )
        # values are those of the positions, wherever their blocks lie
        numbers = np.random.default_rng(0).permutation(sum(widths)).tolist()
        self.table = np.full((len(rows), max(widths)), self.pool.null_block)
        for row, width in enumerate(widths):
            self.table[row, :width] = [numbers.pop() for _ in range(width)]
        longest = int(np.argmax(widths))
        self.content: dict[int, list[torch.Tensor]] = {}  # keys and values of each row, before rounding
        for row, (context, count) in enumerate(rows):
            same = min(shared, context - count) // block
            self.table[row, :same] = self.table[longest, :same]
        for row, (context, _) in enumerate(rows):
            at = torch.arange(context)
            slots = torch.from_numpy(self.table[row])[at // block] * block + at % block
            new = [torch.randn(context, heads[1], size, generator=generator) for size in (head_dim, self.value_dim)]
            self.pool.write(0, slots, *new)
            self.content[row] = new
        # as in a model: queries are a slice of a wider tensor
        self.query = [
            torch.randn(context, heads[0] + 3, head_dim, generator=generator)[:, : heads[0]] for context, _ in rows
        ]

    def batch(self, rows: list[Row]) -> AttentionBatch:
        index = np.array([row for row, _, _ in rows])
        contexts = np.array([end for _, _, end in rows])
        counts = contexts - np.array([start for _, start, _ in rows])
        positions = np.concatenate([np.arange(start, end) for _, start, end in rows])
        of, size = np.repeat(index, counts), self.pool.shape.block_size
        slots = self.table[of, positions // size] * size + positions % size
        return AttentionBatch(
            num_tokens=len(positions),
            num_rows=len(rows),
            num_decodes=int((counts == 1).sum()),
            positions_T=torch.from_numpy(positions),
            slot_mapping_T=torch.from_numpy(slots),
            block_table_NM=torch.from_numpy(self.table[index]),
            counts=counts,
            contexts=contexts,
        )

    def layers(self, window: int | None = None, **how: Any) -> list[LayerAttention]:
        """How the pool's only layer attends."""
        layer = LayerAttention(*self.heads, self.head_dim, self.value_dim, self.head_dim**-0.5, window)
        return [replace(layer, **how)]

    def kernel(self, window: int | None = None, **how: Any) -> KernelAttention:
        return KernelAttention(self.pool, self.layers(window, **how))

    def run(self, rows: list[Row], window: int | None = None, **how: Any) -> torch.Tensor:
        return self.attend(self.kernel(window, **how), rows)

    def attend(self, backend: AttentionBackend, rows: list[Row]) -> torch.Tensor:
        batch = self.batch(rows)
        backend.begin(batch)
        queries = torch.cat([self.query[row][start:end] for row, start, end in rows])
        keys, values = (pool[0].flatten(0, 1)[batch.slot_mapping_T] for pool in (self.pool.keys, self.pool.values))
        if keys.dtype == torch.uint8:  # numbers that were read do not always round to the same codes
            of_rows = [[part[start:end] for part in self.content[row]] for row, start, end in rows]
            keys, values = (torch.cat(parts) for parts in zip(*of_rows, strict=True))
        return backend.attend(0, queries, keys, values)

    def reference(self, window: int | None = None, **how: Any) -> torch.Tensor:
        return self.attend(ReferenceAttention(self.pool, self.layers(window, **how)), whole(self.rows))

    def split(self, output: torch.Tensor) -> list[torch.Tensor]:
        return list(output.split([count for _, count in self.rows]))
