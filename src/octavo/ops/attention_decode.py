"""Decode attention by the C++ kernel, which reads the pool in place through the block tables.

Owns: the call, its per-step index columns and buffers. Its torch twin is in attention_batched.
Does not: write keys and values, or handle rows of more than one token.
Shapes: N rows, H query heads, D head size, P parts of all contexts (the kernel's unit of work).
Invariants: a row's result depends on that row alone, by bits: parts are cut at fixed positions.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int32, c_void_p
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import cpu
from octavo.ops.attention import AttentionBatch
from octavo.ops.attention_pool import KVPool

HEAD_DIMS = (32, 64, 96, 128)
MAX_HEADS = 128  # kMaxHeads of csrc/paged_attention.cpp
PART = 256  # kPart of csrc/paged_attention.cpp
_KERNELS = {torch.float32: "octavo_paged_decode_f32", torch.bfloat16: "octavo_paged_decode_bf16"}


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    name = _KERNELS.get(dtype)
    return None if name is None else cpu.function(name, *[c_void_p] * 10, c_float, c_int32)


def has_kernel(pool: KVPool, num_heads: int) -> bool:
    """Whether the kernel can read this pool."""
    shape = pool.shape
    fits = pool.device.type == "cpu" and shape.head_dim in HEAD_DIMS and num_heads <= MAX_HEADS
    return fits and _kernel(shape.dtype) is not None


def is_faster() -> bool:
    """Whether the kernel beats its torch twin on this machine's instruction set.

    A layer of 32 rows x 200 positions, 9 heads over 3, one Zen 5 core, bfloat16: 0.28 ms with AVX-512 (memory's
    speed) against 0.75; 2.0 ms with AVX2, where the compiler spills the 16 lanes.
    """
    return cpu.status().isa == "avx512"


class PagedDecode:
    """Attends the step's first `num_rows` rows, of one token each. `begin` once per step, `attend` per layer."""

    def __init__(self, pool: KVPool, num_heads: int, window: int | None) -> None:
        kernel = _kernel(pool.shape.dtype)
        assert kernel is not None, "no kernel for this pool; see has_kernel"
        self._kernel = kernel
        self._pools = [
            (keys.data_ptr(), values.data_ptr()) for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        self._shape = pool.shape
        self._num_heads = num_heads
        self._scale = pool.shape.head_dim**-0.5
        self._partial = torch.empty(0)
        self._table_NM = torch.empty((0, 0), dtype=torch.int64)
        self._columns: list[NDArray[np.int64]] = []
        self._sizes = np.zeros(8, dtype=np.int64)
        self._sizes[2:7] = pool.shape.block_size, num_heads, pool.shape.num_kv_heads, pool.shape.head_dim, window or 0
        self._addresses: tuple[int, ...] = ()
        self._num_threads = 1
        self.num_rows = 0

    def begin(self, batch: AttentionBatch) -> None:
        """Cut the contexts of the decode rows into parts. Keeps alive whatever the kernel gets the address of."""
        self.num_rows = batch.num_decodes
        contexts_N = np.ascontiguousarray(batch.contexts[: self.num_rows], dtype=np.int64)
        parts_N = -(-contexts_N // PART)
        first_part_N1 = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(parts_N)))
        size = int(first_part_N1[-1]) * self._num_heads * (self._shape.head_dim + 2)
        if self._partial.numel() < size:
            self._partial = torch.empty(size + size // 4)
        self._table_NM = batch.block_table_NM
        self._columns = [contexts_N, first_part_N1, np.repeat(np.arange(self.num_rows), parts_N)]
        self._sizes[1], self._sizes[7] = self._table_NM.stride(0), self.num_rows
        columns = (column.ctypes.data for column in self._columns)
        self._addresses = (self._table_NM.data_ptr(), *columns, self._partial.data_ptr())
        elements = int(contexts_N.sum()) * self._shape.num_kv_heads * self._shape.head_dim
        self._num_threads = cpu.num_threads(elements)

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        """Return o_NHD of the decode rows, which are the first of `q_THD`: a new tensor of the pool's dtype."""
        head_dim = self._shape.head_dim
        q_NHD = q_THD[: self.num_rows].to(self._shape.dtype)
        if q_NHD.stride(1) != head_dim or q_NHD.stride(2) != 1:
            q_NHD = q_NHD.contiguous()
        output_NHD = torch.empty((self.num_rows, self._num_heads, head_dim), dtype=self._shape.dtype)
        self._sizes[0] = q_NHD.stride(0)
        self._kernel(
            q_NHD.data_ptr(), *self._pools[layer], *self._addresses, output_NHD.data_ptr(),
            self._sizes.ctypes.data, self._scale, self._num_threads,
        )  # fmt: skip
        return output_NHD
