"""Paged attention in torch, without a loop over sequences of one token each.

Owns: buckets of decode rows by padded context, gather buffers and masks, all built once per step.
Does not: own the pool. Each longer row (prompt chunk) takes one call, since such rows are few and large.
Shapes: T tokens, N rows, H query heads = K KV heads x G, D size of keys, V size of values, S block size, C padded
context.
Invariants: blocks before a row's window are not read. Padding reads the null block or zeros and is masked, so padding
does not change a row's values. C is a multiple of 32, so the vector loops of torch's kernels use the same lanes
for any padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import kv_codes
from octavo.ops.attention import AttentionBatch, HostColumn, KVPool, LayerAttention

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
    distance_NC: Tensor
    gathered: _Gathered


@dataclass(slots=True)
class _Chunk:
    """Tokens [first, end) of one row. `blocks` is None if the step's own keys are the whole context."""

    first: int
    end: int
    blocks: Tensor | None
    mask_TC: Tensor | None
    distance_TC: Tensor | None


@dataclass(slots=True)
class _Gathered:
    """Views of the gather buffers: as blocks, which are copied from the pool, and by row and position."""

    k_blocks: Tensor
    v_blocks: Tensor
    k_rows_NC: Tensor
    v_rows_NC: Tensor


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

    def __init__(self, pool: KVPool, layers: Sequence[LayerAttention]) -> None:
        shape = pool.shape
        self._pool = pool
        self._layers = tuple(layers)
        (self._window,) = {layer.window for layer in layers}
        self._is_plain = all(layer.is_plain for layer in layers)
        self._levels = padded_levels(PAD_TOKENS, shape.block_size)
        self._key_blocks = [layer.flatten(1) for layer in pool.keys]
        self._value_blocks = [layer.flatten(1) for layer in pool.values]
        self._sizes = prod(shape.row_shape(shape.head_dim)), prod(shape.row_shape(shape.value_dim))
        self._keys = torch.empty(0, dtype=kv_codes.stored_dtype(shape.dtype), device=pool.device)
        self._values = torch.empty(0, dtype=kv_codes.stored_dtype(shape.dtype), device=pool.device)
        # what the products are computed in: numbers of 8 bits are read as float32
        self._dtype = shape.dtype if shape.dtype not in kv_codes.CODES else torch.float32
        self._output_THV = torch.empty((0, 0, 0), device=pool.device)
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
        key_size, value_size = self._sizes
        if self._keys.numel() < tokens * key_size or self._values.numel() < tokens * value_size:
            tokens += tokens // 4
            self._keys = self._keys.new_empty(tokens * key_size)
            self._values = self._values.new_empty(tokens * value_size)

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

    def _mask(
        self, positions: Tensor, padded: int, begin: Tensor | None, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return an additive mask [..., padded] over the positions from `begin` on, for queries at `positions`.

        `seen` is how many positions each query sees, if not those up to its own. Return also each position minus the
        query's.
        """
        where_C = torch.arange(padded, device=positions.device)
        if begin is not None:
            where_C = where_C + begin
        distance = where_C - positions
        hidden = distance > 0 if seen is None else where_C >= seen
        if self._window is not None:
            hidden |= distance <= -self._window
        zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
        return zeros.masked_fill_(hidden, float("-inf")), distance

    def _gathered(self, rows: int, padded: int) -> _Gathered:
        shape, (key_size, value_size) = self._pool.shape, self._sizes
        k_flat, v_flat = self._keys[: rows * padded * key_size], self._values[: rows * padded * value_size]
        blocks, wide = (rows * padded // shape.block_size, -1), (rows, padded)
        return _Gathered(
            k_flat.view(blocks),
            v_flat.view(blocks),
            k_flat.view(*wide, *shape.row_shape(shape.head_dim)),
            v_flat.view(*wide, *shape.row_shape(shape.value_dim)),
        )

    def _gather(self, layer: int, blocks: Tensor, gathered: _Gathered) -> tuple[Tensor, Tensor]:
        """Copy blocks of the pool to the buffers; return keys [N, K, C, D] and values."""
        torch.index_select(self._key_blocks[layer], 0, blocks, out=gathered.k_blocks)
        torch.index_select(self._value_blocks[layer], 0, blocks, out=gathered.v_blocks)
        k_NCKD, v_NCKV = self._pool.read(gathered.k_rows_NC, gathered.v_rows_NC)
        return k_NCKD.transpose(1, 2), v_NCKV.transpose(1, 2)

    def _begin_decodes(self, batch: AttentionBatch, first: int, end: int, padded: int) -> _Decodes:
        positions_N1 = batch.positions_T[first:end, None]
        blocks, begin_N1 = self._table(batch, first, end, padded, positions_N1)
        mask_NC, distance_NC = self._mask(positions_N1, padded, begin_N1)
        return _Decodes(first, end, blocks, mask_NC[:, None, None], distance_NC, self._gathered(end - first, padded))

    def _begin_chunk(self, batch: AttentionBatch, row: int, first: int, end: int, padded: int) -> _Chunk:
        context = int(batch.contexts[row])
        positions_T1 = batch.positions_T[first:end, None]
        seen_T1 = None
        if batch.seen_T is not None:
            seen_T1 = torch.from_numpy(batch.seen_T[first:end, None]).to(positions_T1.device)
        if context == end - first and (self._window is None or context <= self._window):
            if self._is_plain and seen_T1 is None:
                return _Chunk(first, end, None, None, None)
            return _Chunk(first, end, None, *self._mask(positions_T1, context, None, seen_T1))
        blocks, begin_11 = self._table(batch, row, row + 1, padded, positions_T1[:1])
        return _Chunk(first, end, blocks, *self._mask(positions_T1, padded, begin_11, seen_T1))

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKV: Tensor) -> Tensor:
        """Write the step's keys and values into the pool, then attend all buckets and chunks."""
        assert self._slots_T is not None, "attend before begin"
        k_TKD, v_TKV = self._pool.write(layer, self._slots_T, k_TKD, v_TKV)
        if len(self._decodes) == 1 and not self._chunks:
            return self._attend_decodes(layer, self._decodes[0], q_THD)
        output_THV = self._output(q_THD, self._layers[layer])
        for decodes in self._decodes:
            output_THV[decodes.first : decodes.end] = self._attend_decodes(layer, decodes, q_THD)
        for chunk in self._chunks:
            self._attend_chunk(layer, chunk, (q_THD, k_TKD, v_TKV), output_THV)
        return output_THV

    def _output(self, q_THD: Tensor, own: LayerAttention) -> Tensor:
        held, size = self._output_THV, (own.num_heads, own.value_dim)
        if held.shape[0] < q_THD.shape[0] or held.shape[1:] != size or held.dtype != q_THD.dtype:
            self._output_THV = q_THD.new_empty((q_THD.shape[0], *size))
        return self._output_THV[: q_THD.shape[0]]

    def _attend_decodes(self, layer: int, decodes: _Decodes, q_THD: Tensor) -> Tensor:
        rows, own = decodes.end - decodes.first, self._layers[layer]
        k_NKCD, v_NKCV = self._gather(layer, decodes.blocks, decodes.gathered)
        # the G queries that share a KV head are the call's "length" dimension, so K and V are not copied per head
        q_NKGD = q_THD[decodes.first : decodes.end].reshape(rows, own.num_kv_heads, -1, own.head_dim)
        if own.is_plain:
            out_NKGV = functional.scaled_dot_product_attention(
                q_NKGD.to(k_NKCD.dtype), k_NKCD, v_NKCV, attn_mask=decodes.mask_N11C, scale=own.scale
            )
        else:
            scores_HNC = (q_NKGD.float() @ k_NKCD.float().transpose(2, 3)).flatten(1, 2).transpose(0, 1)
            weights_HNC = own.weights(scores_HNC, decodes.distance_NC, decodes.mask_N11C[:, 0, 0] < 0)
            out_NKGV = weights_HNC.transpose(0, 1).reshape(q_NKGD.shape[:3] + scores_HNC.shape[2:]) @ v_NKCV.float()
        return out_NKGV.reshape(rows, own.num_heads, own.value_dim).to(q_THD.dtype)

    def _attend_chunk(self, layer: int, chunk: _Chunk, qkv: tuple[Tensor, Tensor, Tensor], output_THV: Tensor) -> None:
        own = self._layers[layer]
        q_THD, k_TKD, v_TKV = (part[chunk.first : chunk.end] for part in qkv)
        group = own.num_heads // own.num_kv_heads
        if chunk.blocks is None:
            k_KCD, v_KCV = k_TKD.transpose(0, 1), v_TKV.transpose(0, 1)
        else:
            gathered = self._gathered(1, chunk.blocks.shape[0] * self._pool.shape.block_size)
            (k_KCD,), (v_KCV,) = self._gather(layer, chunk.blocks, gathered)
        q_KGTD = q_THD.reshape(-1, own.num_kv_heads, group, own.head_dim).permute(1, 2, 0, 3)
        if own.is_plain:
            out_KGTV = functional.scaled_dot_product_attention(
                q_KGTD.to(k_KCD.dtype),
                k_KCD[:, None].expand(-1, group, -1, -1),
                v_KCV[:, None].expand(-1, group, -1, -1),
                attn_mask=chunk.mask_TC,
                is_causal=chunk.mask_TC is None,
                scale=own.scale,
            )
        else:
            assert chunk.mask_TC is not None and chunk.distance_TC is not None, "made where a layer is not plain"
            scores_HTC = (q_KGTD.float() @ k_KCD.float()[:, None].transpose(2, 3)).flatten(0, 1)
            weights_HTC = own.weights(scores_HTC, chunk.distance_TC, chunk.mask_TC < 0)
            out_KGTV = weights_HTC.view(own.num_kv_heads, group, *scores_HTC.shape[1:]) @ v_KCV.float()[:, None]
        output_THV[chunk.first : chunk.end] = out_KGTV.permute(2, 0, 1, 3).flatten(1, 2)
