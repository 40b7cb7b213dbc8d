"""Attention by the C++ kernel, which reads the pool in place through the block tables.

Owns: the call, its per-step index columns and buffers. Its torch twin is attention_batched.
Does not: own the pool. Decode rows and prompt chunks are the same to it: each token is a unit of work.
Shapes: T tokens, N rows, H query heads, K KV heads, D head size, P parts of all tokens' contexts or windows.
Invariants: a token's result depends on its row alone, by bits: not on the rows beside it, on how the prompt was
cut into chunks, on a cache hit or on threads, because parts are cut at fixed positions and joined in order.
Parts before a token's window are no work, and table entries before it are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float, c_int32, c_void_p
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops import cpu
from octavo.ops.attention import AttentionBatch
from octavo.ops.attention_pool import KVPool

HEAD_DIMS = (32, 64, 96, 128, 256)
MAX_HEADS = 128  # kMaxHeads of csrc/paged_attention.cpp
PART = 256  # kPart of csrc/paged_attention.cpp
MAX_PARTS = 2048  # of one call, which bounds its scratch memory: 5 MiB at 9 heads of 64
_KERNELS = {torch.float32: "octavo_paged_attention_f32", torch.bfloat16: "octavo_paged_attention_bf16"}
Ints = NDArray[np.int64]


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    name = _KERNELS.get(dtype)
    return None if name is None else cpu.function(name, *[c_void_p] * 11, c_float, c_int32)


def has_kernel(pool: KVPool, num_heads: int) -> bool:
    """Whether the kernel can read this pool."""
    shape = pool.shape
    fits = pool.device.type == "cpu" and shape.head_dim in HEAD_DIMS and num_heads <= MAX_HEADS
    return fits and _kernel(shape.dtype) is not None


def is_faster() -> bool:
    """Whether the kernel beats its torch twin on this machine's instruction set.

    One layer, 9 heads of 64 over 3, one Zen 5 core, bfloat16, ms against the twin's: 32 rows x 200 positions
    0.28 / 0.75 (memory's speed); a prompt of 512 3.4 / 11; the last 512 of 8192 109 / 138. With AVX2 the compiler
    spills the 16 lanes, and decoding takes 2.0.
    """
    return cpu.status().isa == "avx512"


@dataclass(slots=True)
class _Call:
    """Tokens [first, end) of a step. The columns are kept because the kernel gets their addresses."""

    first: int
    end: int
    columns: tuple[Ints, ...]
    addresses: tuple[int, ...]
    num_parts: int
    num_threads: int


class KernelAttention:
    """The AttentionBackend of CPUs where `has_kernel`."""

    def __init__(self, pool: KVPool, num_heads: int, window: int | None = None) -> None:
        kernel = _kernel(pool.shape.dtype)
        assert kernel is not None and has_kernel(pool, num_heads), "no kernel for this pool; see has_kernel"
        self._kernel = kernel
        self._shape = pool.shape
        self._num_heads = num_heads
        self._window = window
        self._scale = pool.shape.head_dim**-0.5
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(pool.keys, pool.values, strict=True)]
        self._pools = [(keys.data_ptr(), values.data_ptr()) for keys, values in self._slots]
        self._sizes = np.zeros(8, dtype=np.int64)
        self._sizes[2:7] = pool.shape.block_size, num_heads, pool.shape.num_kv_heads, pool.shape.head_dim, window or 0
        self._partial = torch.empty(0)
        self._batch: AttentionBatch | None = None
        self._calls: list[_Call] = []

    def begin(self, batch: AttentionBatch) -> None:
        """Cut the contexts of the step's tokens into parts, and the tokens into calls."""
        self._batch = batch
        row_T = np.repeat(np.arange(batch.num_rows), batch.counts)
        ends_N = np.cumsum(batch.counts)
        context_T = (batch.contexts - ends_N)[row_T] + np.arange(1, batch.num_tokens + 1)
        skipped_T = np.maximum(context_T - (self._window or batch.max_context), 0) // PART
        parts_T = -(-context_T // PART) - skipped_T
        call_T = np.cumsum(parts_T) // MAX_PARTS
        firsts = np.flatnonzero(np.diff(call_T, prepend=-1)).tolist()
        self._calls = [
            self._begin_call(first, row_T[first:end], context_T[first:end], parts_T[first:end], skipped_T[first:end])
            for first, end in zip(firsts, [*firsts[1:], batch.num_tokens], strict=True)
        ]
        size = max(call.num_parts for call in self._calls) * self._num_heads * (self._shape.head_dim + 2)
        if self._partial.numel() < size:
            self._partial = torch.empty(size + size // 4)

    def _begin_call(self, first: int, row_T: Ints, context_T: Ints, parts_T: Ints, skipped_T: Ints) -> _Call:
        first_part_T1 = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(parts_T)))
        token_P = np.repeat(np.arange(len(row_T)), parts_T)
        place_P = np.arange(first_part_T1[-1]) - (first_part_T1[:-1] - skipped_T)[token_P]
        if parts_T[-1] > 1:
            # tokens of one row side by side on the same part: its keys and values are still in the cache
            order_P = np.lexsort((place_P, row_T[token_P]))
            token_P, place_P = token_P[order_P], place_P[order_P]
        columns = (row_T, context_T, first_part_T1, np.stack((token_P, place_P), axis=1))
        addresses = tuple(column.ctypes.data for column in columns)
        seen_T = context_T if self._window is None else np.minimum(context_T, self._window)
        elements = int(seen_T.sum()) * self._shape.num_kv_heads * self._shape.head_dim
        return _Call(first, first + len(row_T), columns, addresses, int(first_part_T1[-1]), cpu.num_threads(elements))

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write the step's keys and values into the pool, then attend every token. Returns a new tensor."""
        batch, dtype, head_dim = self._batch, self._shape.dtype, self._shape.head_dim
        assert batch is not None, "attend before begin"
        keys, values = self._slots[layer]
        keys.index_copy_(0, batch.slot_mapping_T, k_TKD.to(dtype))
        values.index_copy_(0, batch.slot_mapping_T, v_TKD.to(dtype))
        query_THD = q_THD.to(dtype)
        if query_THD.stride(1) != head_dim or query_THD.stride(2) != 1:
            query_THD = query_THD.contiguous()
        output_THD = torch.empty((batch.num_tokens, self._num_heads, head_dim), dtype=dtype)
        sizes, table_NM = self._sizes, batch.block_table_NM
        sizes[0], sizes[1] = query_THD.stride(0), table_NM.stride(0)
        for call in self._calls:
            sizes[7] = call.end - call.first
            self._kernel(
                query_THD.data_ptr() + call.first * query_THD.stride(0) * dtype.itemsize, *self._pools[layer],
                table_NM.data_ptr(), *call.addresses, self._partial.data_ptr(),
                output_THD.data_ptr() + call.first * output_THD.stride(0) * dtype.itemsize,
                sizes.ctypes.data, self._scale, call.num_threads,
            )  # fmt: skip
        return output_THD.to(q_THD.dtype)
