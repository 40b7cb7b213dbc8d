"""A plan's rows as the tensors of one forward pass.

Owns: the order of rows in the pass, and all index arithmetic of a step, vectorised on the host.
Does not: read or write slots' tensors, or compute on the device.
Shapes: T tokens, N rows, M table width, R rows that sample.

A row of slot s, positions [a, a + c) becomes c tokens. With W = width of the id buffer, S = block size:
    token j of the row   position p = a + j    id at s * W + p    KV to table[s][p // S] * S + p % S
Rows of one token come first, by ascending context, because that is how attention cuts them into buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from octavo.core.plan import ROW_POOL, ROW_SAMPLE, ROW_SCORE, StepPlan
from octavo.executors.columns import from_packed
from octavo.executors.slots import Slots
from octavo.ops.attention import AttentionBatch
from octavo.sampling.columns import Ints, SamplingRows
from octavo.sampling.upload import upload


@dataclass(slots=True)
class StepInputs:
    """One step, ready to run. `*_rows` are row indices of the plan; `*_last` their last token in the pass.

    `first_token_N` is where each plan row's tokens begin in the pass. `begun_blocks` are the blocks whose
    first position this step writes and whose last it does not (see attention_pool).
    """

    token_index_T: Tensor
    attention: AttentionBatch
    begun_blocks: Ints
    first_token_N: Ints
    slots_N: Ints
    starts_N: Ints
    counts_N: Ints
    sample_rows: Ints
    sample_last_R: Tensor
    sampling: SamplingRows
    sample_target_R: Tensor
    score_rows: Ints
    pool_rows: Ints


def build_inputs(plan: StepPlan, slots: Slots, block_size: int) -> StepInputs:
    """Turn the plan's columns into tensors on the slots' device. Tables must be up to date. Needs a row."""
    slots_N, starts_N, counts_N = from_packed(plan.slots), from_packed(plan.starts), from_packed(plan.counts)
    flags_N = from_packed(plan.flags)
    ends_N = starts_N + counts_N
    assert ends_N.max() <= slots.max_model_len, "a row reaches behind max_model_len"
    order_N = np.lexsort((ends_N, counts_N > 1))
    first_N1 = np.concatenate(([0], np.cumsum(counts_N[order_N])))
    first_token_N = np.empty_like(slots_N)
    first_token_N[order_N] = first_N1[:-1]

    of_T = np.repeat(order_N, counts_N[order_N])
    position_T = np.arange(first_N1[-1]) - first_token_N[of_T] + starts_N[of_T]
    slot_T = slots_N[of_T]
    block_T = slots.table_SM[slot_T, position_T // block_size]
    assert block_T.max() != slots.null_block, "a row writes behind its block table"
    width = slots.ids_SW.shape[1]
    contexts_N = ends_N[order_N]
    table_NM = slots.table_SM[slots_N[order_N], : -(-int(ends_N.max()) // block_size)]

    sample_rows = np.flatnonzero(flags_N & ROW_SAMPLE)
    sampling = SamplingRows(slots_N[sample_rows], ends_N[sample_rows])
    sample_last = first_token_N[sample_rows] + counts_N[sample_rows] - 1
    device_columns = upload(
        slots.ids_SW.device,
        slot_T * width + position_T,
        position_T,
        block_T * block_size + position_T % block_size,
        first_N1,
        contexts_N,
        table_NM,
        sample_last,
        sampling.slots * width + sampling.positions,
    )
    token_index_T, positions_T, slot_mapping_T, row_start_N1, context_len_N, block_table_NM, last_R, target_R = (
        device_columns
    )
    attention = AttentionBatch(
        num_tokens=int(first_N1[-1]),
        num_rows=len(slots_N),
        num_decodes=int((counts_N == 1).sum()),
        positions_T=positions_T,
        slot_mapping_T=slot_mapping_T,
        row_start_N1=row_start_N1,
        context_len_N=context_len_N,
        block_table_NM=block_table_NM,
        counts=counts_N[order_N],
        contexts=contexts_N,
    )
    last_block_N = (ends_N - 1) // block_size
    is_begun_N = (ends_N % block_size != 0) & (last_block_N * block_size >= starts_N)
    return StepInputs(
        token_index_T=token_index_T,
        attention=attention,
        begun_blocks=slots.table_SM[slots_N, last_block_N][is_begun_N],
        first_token_N=first_token_N,
        slots_N=slots_N,
        starts_N=starts_N,
        counts_N=counts_N,
        sample_rows=sample_rows,
        sample_last_R=last_R,
        sampling=sampling,
        sample_target_R=target_R,
        score_rows=np.flatnonzero(flags_N & ROW_SCORE),
        pool_rows=np.flatnonzero(flags_N & ROW_POOL),
    )
