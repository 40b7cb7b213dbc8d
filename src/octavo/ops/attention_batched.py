"""Paged attention in torch, without a loop over sequences of one token each.

Owns: buckets of decode rows by padded context, gather buffers and masks, all built once per step.
Does not: own the pool. Each longer row (prompt chunk) takes one call, since such rows are few and large.
Shapes: T tokens, N rows, H query heads = K KV heads x G, D head size, S block size, C padded context.
Invariants: blocks before a row's window are not read. Padding reads the null block or zeros and is masked, so padding
does not change a row's values. C is a multiple of 32, so the vector loops of torch's kernels use the same lanes
for any padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.attention import AttentionBatch, HostColumn, KVPool

PAD_TOKENS = 32  # contexts are padded to multiples of this, for equal vector lanes
MERGE_TOKENS = 512  # padding that is cheaper than another call: a call costs about 30 us, a token 0.08 us
GATHER_TOKENS = 16384  # most padded tokens in a bucket, so that its buffers stay in the shared cache


@dataclass(slots=True)
class _Decodes:
    """Rows [first, end) of one token each, padded to one context length. The buffers are views made once per step."""

    first: int
    end: int
    blocks: Tensor
    mask_N11C: Tensor
    k_blocks: Tensor
    v_blocks: Tensor
    k_NKCD: Tensor
    v_NKCD: Tensor


@dataclass(slots=True)
class _Chunk:
    """Tokens [first, end) of one row. `blocks` is None if the step's own keys are the whole context."""

    first: int
    end: int
    blocks: Tensor | None
    mask_TC: Tensor | None


def padded_levels(longest: int, block_size: int) -> np.ndarray:
    """Return padded contexts: multiples of PAD_TOKENS and the block size, at most a quarter or one multiple apart."""
    unit = int(np.lcm(PAD_TOKENS, block_size))
    levels = [unit]
    while levels[-1] < longest:
        levels.append(levels[-1] + max(unit, levels[-1] // 4 // unit * unit))
    return np.asarray(levels, dtype=np.int64)


def decode_buckets(contexts: np.ndarray, levels: np.ndarray) -> list[tuple[int, int, int]]:
    """Split ascending contexts into (first, end, padded context); merge buckets if padding is cheaper than a call."""
    if not len(contexts):
        return []
    level_of_row = np.searchsorted(levels, contexts)
    firsts = np.flatnonzero(np.diff(level_of_row, prepend=-1))
    ends = np.append(firsts[1:], len(contexts))
    merged: list[tuple[int, int, int]] = []
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        padded = int(levels[level_of_row[first]])
        if merged and (merged[-1][1] - merged[-1][0]) * (padded - merged[-1][2]) <= MERGE_TOKENS:
            first = merged.pop()[0]
        merged.append((first, end, padded))
    cut: list[tuple[int, int, int]] = []
    for first, end, padded in merged:
        rows = max(1, GATHER_TOKENS // padded)
        cut.extend((at, min(at + rows, end), padded) for at in range(first, end, rows))
    return cut


class BatchedAttention:
    """The AttentionBackend in torch, for CPU and CUDA. The next `attend` may overwrite the result."""

    reads_unwritten = True

    def __init__(self, pool: KVPool, num_heads: int, window: int | None = None) -> None:
        shape = pool.shape
        self._pool = pool
        self._num_heads = num_heads
        self._window = window
        self._levels = padded_levels(PAD_TOKENS, shape.block_size)
        self._key_slots = [layer.flatten(0, 1) for layer in pool.keys]
        self._value_slots = [layer.flatten(0, 1) for layer in pool.values]
        self._key_blocks = [layer.flatten(1) for layer in pool.keys]
        self._value_blocks = [layer.flatten(1) for layer in pool.values]
        self._buffers = torch.empty((2, 0), dtype=shape.dtype, device=pool.device)
        self._output_THD = torch.empty((0, num_heads, shape.head_dim), device=pool.device)
        self._decodes: list[_Decodes] = []
        self._chunks: list[_Chunk] = []
        self._slots_T: Tensor | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """Build buckets, masks and index tensors for all layers of the step."""
        self._slots_T = batch.slot_mapping_T
        # positions to gather for each row; ascending for decodes, as the contexts are
        spans = batch.contexts if self._window is None else self._spans(batch, self._window)
        longest = int(spans.max(initial=0))
        if self._levels[-1] < longest:
            self._levels = padded_levels(longest, self._pool.shape.block_size)
        buckets = decode_buckets(spans[: batch.num_decodes], self._levels)
        padded_chunks = [int(self._levels[i]) for i in np.searchsorted(self._levels, spans[batch.num_decodes :])]
        self._reserve(max([(end - first) * padded for first, end, padded in buckets] + padded_chunks, default=0))
        self._decodes = [self._begin_decodes(batch, *bucket) for bucket in buckets]
        ends = np.cumsum(batch.counts).tolist()
        self._chunks = [
            self._begin_chunk(batch, row, ends[row - 1] if row else 0, ends[row], padded)
            for row, padded in enumerate(padded_chunks, start=batch.num_decodes)
        ]

    def _reserve(self, tokens: int) -> None:
        shape = self._pool.shape
        size = tokens * shape.num_kv_heads * shape.head_dim
        if self._buffers.shape[1] < size:
            self._buffers = torch.empty((2, size + size // 4), dtype=shape.dtype, device=self._pool.device)

    def _spans(self, batch: AttentionBatch, window: int) -> HostColumn:
        """Return an upper bound of the positions from the first block in a row's window to the end of its context."""
        size = self._pool.shape.block_size
        return np.minimum(batch.contexts, batch.counts + window - 1 + size - 1)

    def _table(
        self, batch: AttentionBatch, first: int, end: int, padded: int, queries_N1: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the block numbers of rows [first, end) for `padded` positions, flat, and each row's first position.

        Without a window every first position is 0 (returned as None). With a window it is the start of the first block
        in the window of the row's first query; the row no longer owns earlier blocks. Beyond the table are null blocks.
        """
        size = self._pool.shape.block_size
        width = padded // size
        if self._window is None:
            table_NM = batch.block_table_NM[first:end, :width]
            if table_NM.shape[1] < width:
                table_NM = functional.pad(table_NM, (0, width - table_NM.shape[1]), value=self._pool.null_block)
            return table_NM.reshape(-1), None
        begin_N1 = (queries_N1 - (self._window - 1)).clamp_(min=0) // size
        index_NM = begin_N1 + torch.arange(width, device=begin_N1.device)
        num_columns = batch.block_table_NM.shape[1]
        table_NM = batch.block_table_NM[first:end].gather(1, index_NM.clamp(max=num_columns - 1))
        return table_NM.masked_fill_(index_NM >= num_columns, self._pool.null_block).reshape(-1), begin_N1 * size

    def _mask(self, positions: Tensor, padded: int, begin: Tensor | None) -> Tensor:
        """Return an additive mask [..., padded] over the positions from `begin` on, for queries at `positions`."""
        where_C = torch.arange(padded, device=positions.device)
        if begin is not None:
            where_C = where_C + begin
        hidden = where_C > positions
        if self._window is not None:
            hidden |= where_C <= positions - self._window
        zeros = torch.zeros(hidden.shape, dtype=self._pool.shape.dtype, device=positions.device)
        return zeros.masked_fill_(hidden, float("-inf"))

    def _gathered(self, rows: int, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape = self._pool.shape
        size = rows * padded * shape.num_kv_heads * shape.head_dim
        k_flat, v_flat = self._buffers[0, :size], self._buffers[1, :size]
        blocks = (rows * padded // shape.block_size, -1)
        wide = (rows, padded, shape.num_kv_heads, shape.head_dim)
        return (
            k_flat.view(blocks),
            v_flat.view(blocks),
            k_flat.view(wide).transpose(1, 2),
            v_flat.view(wide).transpose(1, 2),
        )

    def _begin_decodes(self, batch: AttentionBatch, first: int, end: int, padded: int) -> _Decodes:
        positions_N1 = batch.positions_T[first:end, None]
        blocks, begin_N1 = self._table(batch, first, end, padded, positions_N1)
        mask_NC = self._mask(positions_N1, padded, begin_N1)
        return _Decodes(
            first,
            end,
            blocks,
            mask_NC[:, None, None],
            *self._gathered(end - first, padded),
        )

    def _begin_chunk(self, batch: AttentionBatch, row: int, first: int, end: int, padded: int) -> _Chunk:
        context = int(batch.contexts[row])
        if context == end - first and (self._window is None or context <= self._window):
            return _Chunk(first, end, None, None)
        positions_T1 = batch.positions_T[first:end, None]
        blocks, begin_11 = self._table(batch, row, row + 1, padded, positions_T1[:1])
        return _Chunk(first, end, blocks, self._mask(positions_T1, padded, begin_11))

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write the step's keys and values into the pool, then attend all buckets and chunks."""
        assert self._slots_T is not None, "attend before begin"
        k_TKD, v_TKD = k_TKD.to(self._pool.shape.dtype), v_TKD.to(self._pool.shape.dtype)
        self._key_slots[layer].index_copy_(0, self._slots_T, k_TKD)
        self._value_slots[layer].index_copy_(0, self._slots_T, v_TKD)
        if len(self._decodes) == 1 and not self._chunks:
            return self._attend_decodes(layer, self._decodes[0], q_THD)
        output_THD = self._output(q_THD)
        for decodes in self._decodes:
            output_THD[decodes.first : decodes.end] = self._attend_decodes(layer, decodes, q_THD)
        for chunk in self._chunks:
            self._attend_chunk(layer, chunk, (q_THD, k_TKD, v_TKD), output_THD)
        return output_THD

    def _output(self, q_THD: Tensor) -> Tensor:
        if self._output_THD.shape[0] < q_THD.shape[0] or self._output_THD.dtype != q_THD.dtype:
            self._output_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        return self._output_THD[: q_THD.shape[0]]

    def _attend_decodes(self, layer: int, decodes: _Decodes, q_THD: Tensor) -> Tensor:
        rows = decodes.end - decodes.first
        shape = self._pool.shape
        torch.index_select(self._key_blocks[layer], 0, decodes.blocks, out=decodes.k_blocks)
        torch.index_select(self._value_blocks[layer], 0, decodes.blocks, out=decodes.v_blocks)
        # the G queries that share a KV head are the call's "length" dimension, so K and V are not copied per head
        q_NKGD = q_THD[decodes.first : decodes.end].reshape(rows, shape.num_kv_heads, -1, shape.head_dim)
        out_NKGD = functional.scaled_dot_product_attention(
            q_NKGD.to(shape.dtype), decodes.k_NKCD, decodes.v_NKCD, attn_mask=decodes.mask_N11C
        )
        return out_NKGD.reshape(rows, self._num_heads, shape.head_dim).to(q_THD.dtype)

    def _attend_chunk(self, layer: int, chunk: _Chunk, qkv: tuple[Tensor, Tensor, Tensor], output_THD: Tensor) -> None:
        shape = self._pool.shape
        q_THD, k_TKD, v_TKD = (part[chunk.first : chunk.end] for part in qkv)
        group = self._num_heads // shape.num_kv_heads
        if chunk.blocks is None:
            k_KCD, v_KCD = k_TKD.transpose(0, 1), v_TKD.transpose(0, 1)
        else:
            k_blocks, v_blocks, k_NKCD, v_NKCD = self._gathered(1, chunk.blocks.shape[0] * shape.block_size)
            torch.index_select(self._key_blocks[layer], 0, chunk.blocks, out=k_blocks)
            torch.index_select(self._value_blocks[layer], 0, chunk.blocks, out=v_blocks)
            k_KCD, v_KCD = k_NKCD[0], v_NKCD[0]
        q_KGTD = q_THD.reshape(-1, shape.num_kv_heads, group, shape.head_dim).permute(1, 2, 0, 3)
        out_KGTD = functional.scaled_dot_product_attention(
            q_KGTD.to(shape.dtype),
            k_KCD[:, None].expand(-1, group, -1, -1),
            v_KCD[:, None].expand(-1, group, -1, -1),
            attn_mask=chunk.mask_TC,
            is_causal=chunk.mask_TC is None,
        )
        output_THD[chunk.first : chunk.end] = out_KGTD.permute(2, 0, 1, 3).flatten(1, 2)
