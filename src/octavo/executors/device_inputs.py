"""The inputs of a step on an accelerator: everything the host knows of it, sent in one copy.

Owns: the order of the columns in that copy, and what the device derives from them. Does not: index rows (PassRows), or
own the buffers. Nothing here waits for the device.
Shapes: T tokens, N plan rows, A rows with tokens, R sampled positions, S slots, M blocks of the longest table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from octavo.core.plan import StepPlan
from octavo.executors.cache import CacheGroups
from octavo.executors.slots import Slots
from octavo.executors.step_buffers import BufferPair, rounded_words, split_words
from octavo.executors.step_inputs import PassRows, StepInputs, list_partial_blocks, slot_mappings
from octavo.ops.attention import AttentionBatch, DeviceRows, HostTables
from octavo.ops.triton import available

Columns = list[NDArray[Any]]


def device_inputs(
    plan: StepPlan, slots: Slots, block_size: int, cache: CacheGroups, pair: BufferPair, sees_ahead: bool
) -> StepInputs:
    """Send a step's columns and all pending edits of slots, and return the inputs.

    If tokens may see positions after their own, attention lists its work itself.
    """
    rows, on_device = PassRows.of(plan, slots), slots.on_device
    assert on_device is not None, "the slots of an accelerator"
    ends = rows.slots_N, rows.starts_N, rows.starts_N + rows.counts_N
    num_groups = len(slots.tables)
    counts_A, contexts_A = rows.counts_A, rows.contexts_A
    works = [
        None
        if sees_ahead or planner is None
        else planner.work(counts_A, contexts_A, tables=HostTables(table_SM, rows.slots_A, block_size))
        for planner, table_SM in zip(cache.planners, slots.tables, strict=True)
    ]
    wide: Columns = [rows.places_T, rows.positions_T, rows.last_R, rows.target_R, *_states(rows), rows.slots_A]
    num_shared = len(wide)
    wide += slot_mappings(slots, block_size, (rows.slots_T, rows.positions_T))
    wide += list_partial_blocks(slots, block_size, ends) if cache.reads_unwritten else []
    lists: Columns = [rows.first_A1, contexts_A]
    for work in works:
        lists += [] if work is None else list(work.lists)
    is_plain = available.is_available() and slots.sampler.is_plain(rows.sampling)
    draws = [slots.sampler.selection.draws(rows.sampling.slots, rows.sampling.positions).pack()] if is_plain else []
    columns = [*wide, *lists, *draws, on_device.take_edits()]
    words = pair.send(columns)
    sent = split_words(words, columns)
    on_device.apply(sent[-1])
    wider = split_words(words[: sum(map(rounded_words, wide))].long(), wide)  # as torch's own operations want
    places_T, positions_T, last_R, target_R, silent_last_R, pool_last_R, _ = wider[:num_shared]
    mappings, partial = wider[num_shared:][:num_groups], wider[num_shared:][num_groups:]
    for pool, blocks in zip(cache.pools if partial else (), partial, strict=True):
        if len(blocks):
            pool.clear_blocks(blocks)
    slots_A = sent[num_shared - 1]
    first_A1, contexts, *left = sent[len(wide) : -1]
    batches: list[AttentionBatch] = []
    width = -(-rows.longest // block_size)
    for work, table_SM, mapping_T in zip(works, on_device.tables, mappings, strict=True):
        if work is None:
            table_AM = table_SM[:, :width].index_select(0, slots_A).long()
            batches.append(rows.batch(positions_T, mapping_T, table_AM))
            continue
        batch = rows.batch(positions_T, mapping_T, table_SM)
        shared, items, joins, tiles, num_work, *left = left
        batch.device = DeviceRows(
            first_A1, contexts, slots_A, table_SM, shared, items, joins, tiles, num_work, work.num_parts
        )
        batches.append(batch)
    inputs = rows.inputs(
        token_ids_T=slots.flat_ids.index_select(0, places_T),
        attention=batches,
        partial_blocks=[],
        sample_last_R=last_R,
        sample_target_R=target_R,
    )
    packed_KR = left[0] if is_plain else None
    return replace(inputs, silent_last_R=silent_last_R, pool_last_R=pool_last_R, packed_KR=packed_KR)


def _states(rows: PassRows) -> Columns:
    """Return the last tokens of rows that sample nothing, and of rows that are pooled."""
    last_N = rows.first_token_N + rows.counts_N - 1
    return [last_N[rows.silent_rows], last_N[rows.pool_rows]]
