"""Torch twins of the kernels that a captured decode step needs, so that tapes replay quickly.

They read only what a graph may read: the step's words, tables and the pool. Interpreted kernels do the same, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.ops.attention import AttentionBatch, KVPool, LayerAttention
from octavo.ops.attention_triton import WorkPlanner


class TwinAttention:
    """An AttentionBackend for rows of one token: each attends over its whole table, masked by its context."""

    reads_unwritten = True

    def __init__(self, pool: KVPool, layers: Sequence[LayerAttention]) -> None:
        self._pool, self._layers = pool, tuple(layers)
        self.planner = WorkPlanner(1, 1, 4, layers[0].window)
        self._batch: AttentionBatch | None = None

    def begin(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def attend(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor) -> torch.Tensor:
        batch, own = self._batch, self._layers[layer]
        assert batch is not None and batch.device is not None
        rows, shape = batch.device, self._pool.shape
        null = self._pool.null_block * shape.block_size
        slots_T = batch.slot_mapping_T.long()
        slots_T = torch.where(slots_T < 0, null, slots_T)
        keep = (slots_T != null)[:, None, None]
        self._pool.write(layer, slots_T, k_TKD * keep, v_TKV * keep)
        width = rows.table_SM.shape[1] * shape.block_size
        of_token_T = torch.bucketize(torch.arange(len(q_THD), device=q_THD.device), rows.first_token_N1[1:], right=True)
        tables_TM = rows.table_SM.index_select(0, rows.slots_N.index_select(0, of_token_T)).long()
        k_TCKD = self._pool.keys[layer][tables_TM].view(len(q_THD), width, shape.num_kv_heads, -1)
        v_TCKV = self._pool.values[layer][tables_TM].view(len(q_THD), width, shape.num_kv_heads, -1)
        group = own.num_heads // own.num_kv_heads
        k_TCHD, v_TCHV = (x.repeat_interleave(group, dim=2) for x in (k_TCKD, v_TCKV))
        scores_HTC = torch.einsum("thd,tchd->htc", q_THD, k_TCHD)
        distance_TC = torch.arange(width, device=q_THD.device) - batch.positions_T[:, None]
        has_context_T = rows.contexts_N.index_select(0, of_token_T) > 0
        weights_HTC = own.weights(scores_HTC, distance_TC, distance_TC > 0)
        return torch.einsum("htc,tchv->thv", weights_HTC, v_TCHV) * has_context_T[:, None, None]


def sample_best(logits_RV: torch.Tensor, packed_KR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sampler of greedy rows."""
    best_R, ids_R = logits_RV.max(dim=1)
    return ids_R.int(), best_R
