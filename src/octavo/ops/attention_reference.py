"""Attention row by row in float32: the slow twin that every other backend is compared with.

Owns: the simplest implementation of AttentionBatch. Does not: optimise for speed.
Shapes: T tokens, H query heads, K KV heads, D head size, C context of one row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.attention import AttentionBatch, KVPool


class ReferenceAttention:
    """An AttentionBackend with a Python loop over rows; softmax and products in float32."""

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
