"""The interface between a model's layers and paged attention, and a slow reference backend.

Owns: the KV memory (its allocation, null block, copies and clearing of blocks), a backend's two methods and its inputs
per step, and ReferenceAttention. Does not: optimise for speed, or know which sequences hold a block (core does).
Shapes: T tokens of the step, N rows, M table width, H query heads, K KV heads, D head size, L layers, B blocks, S block
size, C context of one row.
Invariants: rows of one token are first, in ascending context length, before longer rows. Token t of row n is at
row_start[n] + t. Its query sees exactly the positions up to its own (and inside the window). Block `null_block` is all
zero and is never written. A position not written since its block was cleared is zero, so masked values are finite and
add exactly zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HostColumn = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Sizes of the pool; `num_blocks` does not count the null block."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Paged keys and values. On a CPU the kernel provides zeroed memory, page by page on first use."""

    def __init__(self, shape: PoolShape, device: torch.device) -> None:
        self.shape = shape
        self.null_block = shape.num_blocks
        size = (2, shape.num_layers, shape.num_blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
        if device.type == "cpu" and shape.num_layers:  # a rank may have no layer of a cache group
            # numpy's zeros is calloc, which touches no page; torch.zeros would write every page
            raw = np.zeros(int(np.prod(size)) * shape.dtype.itemsize, dtype=np.uint8)
            self._both_2LBSKD = torch.from_numpy(raw).view(shape.dtype).view(size)
        else:
            self._both_2LBSKD = torch.zeros(size, dtype=shape.dtype, device=device)
        self.keys: tuple[Tensor, ...] = self._both_2LBSKD[0].unbind(0)
        self.values: tuple[Tensor, ...] = self._both_2LBSKD[1].unbind(0)

    @property
    def device(self) -> torch.device:
        """The pool's device."""
        return self._both_2LBSKD.device

    def read_blocks(self, blocks: Tensor) -> Tensor:
        """Return a copy of blocks of every layer, [2, L, len(blocks), S, K, D]."""
        return self._both_2LBSKD.index_select(2, blocks)

    def write_blocks(self, blocks: Tensor, content: Tensor) -> None:
        """Overwrite blocks in every layer; no block may occur twice."""
        self._both_2LBSKD.index_copy_(2, blocks, content)

    def copy_blocks(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy blocks in every layer; all sources are read before a destination is written."""
        self.write_blocks(destinations, self.read_blocks(sources))

    def clear_blocks(self, blocks: Tensor) -> None:
        """Zero blocks in every layer."""
        self._both_2LBSKD.index_fill_(2, blocks, 0)


@dataclass(slots=True)
class AttentionBatch:
    """Attention's inputs of one step: device tensors with host copies, so that reading a size needs no sync.

    `slot_mapping_T` is block * block_size + offset, the flat pool position of each token's KV.
    `context_len_N` counts KV positions including this step's. `block_table_NM` holds block numbers. Entries after a
    row's last block are the pool's null block; entries before a window may be any block of the pool, with any content.
    Index tensors are int64.
    `counts` and `contexts` are host copies per row; rows [0, num_decodes) have one token each.
    """

    num_tokens: int
    num_rows: int
    num_decodes: int
    positions_T: Tensor
    slot_mapping_T: Tensor
    row_start_N1: Tensor
    context_len_N: Tensor
    block_table_NM: Tensor
    counts: HostColumn
    contexts: HostColumn

    @property
    def max_count(self) -> int:
        """Tokens of the longest row."""
        return int(self.counts.max(initial=0))

    @property
    def max_context(self) -> int:
        """KV positions of the longest context."""
        return int(self.contexts.max(initial=0))


class AttentionBackend(Protocol):
    """Paged attention over one pool. Call `begin` once per step, then `attend` once per layer, in order.

    `reads_unwritten`: the backend reads (and masks) positions after a context, so a block must be cleared before its
    first use.
    """

    reads_unwritten: bool

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare what all layers share: indices, masks, buckets."""
        ...

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write the step's K and V of `layer` into the pool, attend causally, and return o_THD.

        The scale is D ** -0.5. The result may be a buffer that the next call overwrites.
        """
        ...


class GroupedAttention:
    """An AttentionBackend over several cache groups. `places` has each layer's backend and the layer's index there.

    A rank that has only some of a model's layers has places for these.
    """

    reads_unwritten = True  # CacheGroups asks each group's own backend

    def __init__(self, places: Mapping[int, tuple[AttentionBackend, int]]) -> None:
        self.places = dict(places)

    def begin(self, batch: AttentionBatch) -> None:
        """Raise AssertionError, because each group has its own batch."""
        raise AssertionError("each cache group's attention begins by itself")

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attend in the layer's group."""
        backend, local = self.places[layer]
        return backend.attend(local, q_THD, k_TKD, v_TKD)


class ReferenceAttention:
    """An AttentionBackend that loops over rows in Python; softmax and products are in float32."""

    reads_unwritten = True

    def __init__(self, pool: KVPool, num_heads: int, window: int | None = None) -> None:
        self._pool = pool
        self._group = num_heads // pool.shape.num_kv_heads
        self._window = window
        self._batch: AttentionBatch | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """Keep the step's batch."""
        self._batch = batch

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write this step's keys and values, then attend each row by itself."""
        batch = self._batch
        assert batch is not None, "attend before begin"
        keys, values = self._pool.keys[layer].flatten(0, 1), self._pool.values[layer].flatten(0, 1)
        keys[batch.slot_mapping_T] = k_TKD.to(keys.dtype)
        values[batch.slot_mapping_T] = v_TKD.to(values.dtype)
        output_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        start = 0
        for row, (count, context) in enumerate(zip(batch.counts.tolist(), batch.contexts.tolist(), strict=True)):
            end = start + count
            # positions before the first query's window are not read: other sequences may hold their blocks
            first = 0 if self._window is None else max(0, context - count - self._window + 1)
            where_C = torch.arange(first, context, device=keys.device)
            size = self._pool.shape.block_size
            slots_C = batch.block_table_NM[row][where_C // size] * size + where_C % size
            k_KCD = keys[slots_C].float().transpose(0, 1).repeat_interleave(self._group, dim=0)
            v_KCD = values[slots_C].float().transpose(0, 1).repeat_interleave(self._group, dim=0)
            scores = q_THD[start:end].float().transpose(0, 1) @ k_KCD.transpose(1, 2) * q_THD.shape[-1] ** -0.5
            seen = where_C <= batch.positions_T[start:end, None]
            if self._window is not None:
                seen &= where_C > batch.positions_T[start:end, None] - self._window
            weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
            output_THD[start:end] = (weights @ v_KCD).transpose(0, 1).to(q_THD.dtype)
            start = end
        return output_THD
