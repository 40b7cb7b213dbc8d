"""Convert a plan's rows to the tensors of one forward pass.

Owns: the order of rows in the pass; all index arithmetic of a step, vectorised on the host; which sampled positions of
rows with drafts are accepted. Does not: write slots' tensors, or make drafts. A step that only decodes has a kernel
(csrc/decode_inputs.cpp), whose slow twin is the arithmetic of any step. An accelerator gets everything that the host
knows of a step in one copy (device_inputs), and nothing waits for it.
Shapes: T tokens, N rows, A rows with tokens, M table width, R sampled positions (a row with d drafts has 1 + d).

A row of slot s, positions [a, a + c) becomes c tokens. With W = width of the id buffer, S = block size:
    token j of the row   position p = a + j    id at s * W + p    KV to table[s][p // S] * S + p % S
Rows of one token are first, in ascending order of context length, because attention splits these rows into buckets in
that order. A row that forks has no tokens: it samples after the last token of the nearest earlier row with tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import addressof, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import ROW_BEAM, ROW_CARRY, ROW_FORK, ROW_POOL, ROW_SAMPLE, ROW_SCORE, StepPlan, StepResult
from octavo.executors.cache import CacheGroups
from octavo.executors.slots import Slots, from_packed
from octavo.executors.step_buffers import BufferPair, rounded_words, split_words
from octavo.ops import cpu
from octavo.ops.attention import AttentionBatch, DeviceRows, HostTables
from octavo.ops.triton import available
from octavo.sampling.columns import Ints, SamplingRows, upload

NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
PLAIN_FLAGS = frozenset((ROW_SAMPLE, ROW_SAMPLE | ROW_CARRY))  # flags of rows that only sample one token


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a step. `lengths` is the number of sampled positions of each sampling row.

    `remaining_R` is the number of positions that follow each position in its row. `expected_R` is the draft id after
    each position, or -1 at the last position of a row.
    """

    lengths: Ints
    remaining_R: Ints
    expected_R: Ints

    @classmethod
    def of(cls, plan: StepPlan, sampling_rows: Ints) -> Drafts:
        """Index the drafts of a plan; every row with drafts must be a sampling row."""
        lengths = from_packed(plan.num_drafts)[sampling_rows] + 1
        remaining_R = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum()) - 1
        expected_R = np.full(len(remaining_R), -1, dtype=np.int64)
        expected_R[remaining_R > 0] = from_packed(plan.draft_token_ids)
        return cls(lengths, remaining_R, expected_R)

    def accepted(self, token_ids: array[int]) -> NDArray[np.bool_]:
        """Return, per position, whether all earlier drafts of its row equal the sampled ids."""
        is_wrong_R = from_packed(token_ids) != self.expected_R
        before_R = np.cumsum(is_wrong_R) - is_wrong_R
        first = np.cumsum(self.lengths) - self.lengths
        is_accepted: NDArray[np.bool_] = before_R == np.repeat(before_R[first], self.lengths)
        return is_accepted

    def keep_accepted(self, result: StepResult) -> None:
        """Remove the ids and logprobs of positions that are not accepted, and set each row's number of ids."""
        assert result.token_ids is not None
        is_accepted = self.accepted(result.token_ids)
        first = np.cumsum(self.lengths) - self.lengths
        counts = np.add.reduceat(is_accepted.astype(np.int64), first)
        kept = np.flatnonzero(is_accepted).tolist()
        ids, logprobs = result.token_ids, result.logprobs
        result.token_ids = array("i", [ids[index] for index in kept])
        result.num_token_ids = array("i", counts.tolist())
        if logprobs is not None:
            result.logprobs = [logprobs[index] for index in kept]


@dataclass(slots=True)
class StepInputs:
    """The inputs of one step. `*_rows` are row indices of the plan; `*_last` are token indices of rows' last tokens.

    `attention` and `partial_blocks` have one entry per cache group. A block is partial if this step writes the block's
    first position but not its last (see ops.attention); partial blocks are listed only on request. `first_token_N` is
    the index of each plan row's first token in the pass. `sample_rows` has a row once, and once more for each of the
    row's `drafts`. `sample_last_R` is None if each token samples, in order. `beams` are indices into `sample_rows` of
    the rows that need only candidates. `adapters_T` has each row's adapter; None if no row has one. An accelerator also
    has the last tokens of silent and of pooling rows, and what the sampler reads of plain rows (Sampler.sample_packed).
    """

    token_ids_T: Tensor
    attention: list[AttentionBatch]
    partial_blocks: list[Ints]
    first_token_N: Ints
    slots_N: Ints
    starts_N: Ints
    counts_N: Ints
    sample_rows: Ints
    sample_last_R: Tensor | None
    sampling: SamplingRows
    sample_target_R: Tensor
    beams: Ints
    score_rows: Ints
    pool_rows: Ints
    drafts: Drafts | None = None
    adapters_T: Tensor | None = None
    silent_last_R: Tensor | None = None
    pool_last_R: Tensor | None = None
    packed_KR: Tensor | None = None

    @property
    def silent_rows(self) -> Ints:
        """Indices of rows with tokens that sample nothing: chunks of prompts."""
        if self.drafts is None and len(self.sample_rows) == len(self.slots_N):
            return NO_ROWS
        is_silent_N = self.counts_N > 0
        is_silent_N[self.sample_rows] = False
        return is_silent_N.nonzero()[0]


def build_inputs(plan: StepPlan, slots: Slots, block_size: int, wants_partial: bool = True) -> StepInputs:
    """Convert the plan's columns to tensors on the slots' device. Tables must be current; a row must have tokens.

    Attention kernels want no partial blocks, and take decodes in any order.
    """
    inputs = None
    if plan.is_fast_path and not wants_partial and not plan.num_drafts and PLAIN_FLAGS.issuperset(plan.flags):
        inputs = decode_inputs(plan, slots)
    return inputs or any_inputs(plan, slots, block_size, wants_partial)


def any_inputs(plan: StepPlan, slots: Slots, block_size: int, wants_partial: bool = True) -> StepInputs:
    """Return the inputs of any step, its decodes in ascending order of context length."""
    rows = PassRows.of(plan, slots)
    width = -(-rows.longest // block_size)
    num_groups = len(slots.tables)
    token_index_T, positions_T, last_R, target_R, *paged = upload(
        slots.ids_SW.device,
        rows.places_T,
        rows.positions_T,
        rows.last_R,
        rows.target_R,
        *slot_mappings(slots, block_size, (rows.slots_T, rows.positions_T)),
        *(table_SM[rows.slots_A, :width] for table_SM in slots.tables),
    )
    pairs = zip(paged[:num_groups], paged[num_groups:], strict=True)
    groups = [rows.batch(positions_T, mapping_T, table_AM) for mapping_T, table_AM in pairs]
    ends = rows.slots_N, rows.starts_N, rows.starts_N + rows.counts_N
    return rows.inputs(
        token_ids_T=slots.flat_ids.index_select(0, token_index_T),
        attention=groups,
        partial_blocks=list_partial_blocks(slots, block_size, ends) if wants_partial else [],
        sample_last_R=last_R,
        sample_target_R=target_R,
    )


@dataclass(slots=True)
class PassRows:
    """The host's columns of a pass: per plan row (N), per row with tokens in pass order (A), per token, per sample.

    `places_T` and `target_R` are indices of `Slots.flat_ids`: where tokens are read, and where sampled ids are written.
    `last_R` is the token after which each sampled position samples. `longest` is the longest context.
    """

    slots_N: Ints
    starts_N: Ints
    counts_N: Ints
    flags_N: Ints
    first_token_N: Ints
    order_A: Ints
    slots_A: Ints
    counts_A: Ints
    contexts_A: Ints
    first_A1: Ints
    slots_T: Ints
    positions_T: Ints
    places_T: Ints
    sample_rows: Ints
    last_R: Ints
    target_R: Ints
    sampling: SamplingRows
    drafts: Drafts | None
    longest: int
    adapters_T: Tensor | None

    @classmethod
    def of(cls, plan: StepPlan, slots: Slots) -> PassRows:
        """Index a plan's rows; at least one has tokens."""
        slots_N, starts_N, counts_N, flags_N = map(from_packed, (plan.slots, plan.starts, plan.counts, plan.flags))
        ends_N = starts_N + counts_N
        longest = int(ends_N.max())
        assert longest <= slots.max_model_len, "a row reaches past max_model_len"
        is_long_N = counts_N > 1
        order_A = np.lexsort((ends_N, is_long_N)) if is_long_N.any() else np.argsort(ends_N, kind="stable")
        has_forks = np.count_nonzero(counts_N) < len(counts_N)
        if has_forks:
            order_A = order_A[counts_N[order_A] > 0]
        is_plain = not (has_forks or is_long_N.any())
        of_T, first_A1 = _tokens(order_A, counts_N, is_plain)
        first_token_N = np.empty_like(slots_N)  # the entries of rows without tokens are never read
        first_token_N[order_A] = first_A1[:-1]
        last_token_N = first_token_N + counts_N - 1
        if has_forks:
            last_token_N = last_token_N[_source_rows(counts_N, flags_N)]
        positions_T = starts_N[of_T]
        if not is_plain:
            positions_T += np.arange(first_A1[-1]) - first_token_N[of_T]
        slots_T = slots_N[of_T]
        width = slots.ids_SW.shape[1]
        sample_rows, remaining_R, drafts = _sampled(plan, (flags_N & ROW_SAMPLE).nonzero()[0])
        expected_R = None if drafts is None else drafts.expected_R
        sampling = SamplingRows(slots_N[sample_rows], ends_N[sample_rows] - remaining_R, expected_R)
        return cls(
            slots_N, starts_N, counts_N, flags_N, first_token_N, order_A, slots_N[order_A],
            counts_N[order_A], ends_N[order_A], first_A1, slots_T,
            positions_T, slots_T * width + positions_T, sample_rows, last_token_N[sample_rows] - remaining_R,
            sampling.slots * width + sampling.positions, sampling, drafts, longest,
            _adapters(slots, slots_T) if slots.adapters else None,
        )  # fmt: skip

    @property
    def pool_rows(self) -> Ints:
        """Indices of rows that are pooled."""
        return np.flatnonzero(self.flags_N & ROW_POOL)

    @property
    def silent_rows(self) -> Ints:
        """Indices of rows with tokens that sample nothing: chunks of prompts."""
        return np.flatnonzero((self.counts_N > 0) & (self.flags_N & ROW_SAMPLE == 0))

    def batch(self, positions_T: Tensor, slot_mapping_T: Tensor, block_table_NM: Tensor) -> AttentionBatch:
        """Return a cache group's inputs of attention."""
        return AttentionBatch(
            num_tokens=int(self.first_A1[-1]),
            num_rows=len(self.order_A),
            num_decodes=int(np.count_nonzero(self.counts_A == 1)),
            positions_T=positions_T,
            slot_mapping_T=slot_mapping_T,
            block_table_NM=block_table_NM,
            counts=self.counts_A,
            contexts=self.contexts_A,
        )

    def inputs(
        self,
        token_ids_T: Tensor,
        attention: list[AttentionBatch],
        partial_blocks: list[Ints],
        sample_last_R: Tensor,
        sample_target_R: Tensor,
    ) -> StepInputs:
        """Return the step's inputs, with tensors on the device."""
        wanted = int(np.bitwise_or.reduce(self.flags_N))  # flags that at least one row has
        return StepInputs(
            token_ids_T=token_ids_T,
            attention=attention,
            partial_blocks=partial_blocks,
            first_token_N=self.first_token_N,
            slots_N=self.slots_N,
            starts_N=self.starts_N,
            counts_N=self.counts_N,
            sample_rows=self.sample_rows,
            sample_last_R=sample_last_R,
            sampling=self.sampling,
            sample_target_R=sample_target_R,
            beams=np.flatnonzero(self.flags_N[self.sample_rows] & ROW_BEAM) if wanted & ROW_BEAM else NO_ROWS,
            score_rows=np.flatnonzero(self.flags_N & ROW_SCORE) if wanted & ROW_SCORE else NO_ROWS,
            pool_rows=self.pool_rows if wanted & ROW_POOL else NO_ROWS,
            drafts=self.drafts,
            adapters_T=self.adapters_T,
        )


@dataclass(slots=True)
class DecodeInputs(StepInputs):
    """The inputs of a step in which each row computes one token and samples once, in memory for many such steps.

    Between two steps the caches are full of weights, so that making and dropping a tensor takes many times as long.
    `best` is for the ids and logits of a step that needs only those. `memory` keeps alive what `addresses` point to.
    """

    best: tuple[Tensor, Tensor] | None = None
    memory: tuple[object, ...] = ()
    addresses: tuple[int, ...] = ()

    @classmethod
    def of(cls, slots: Slots, num_rows: int) -> DecodeInputs:
        """Allocate the memory of steps with so many rows."""
        columns = np.empty((4 + len(slots.tables), num_rows), dtype=np.int64)
        token_ids_N = np.empty(num_rows, dtype=np.int32)
        tables = [np.zeros((num_rows, table_SM.shape[1]), dtype=np.int64) for table_SM in slots.tables]
        pointers = np.array([table_NM.ctypes.data for table_NM in tables], dtype=np.int64)
        slots_N, positions_N, contexts_N, targets_N, *mappings = columns
        ones_N, rows_N = np.ones(num_rows, dtype=np.int64), np.arange(num_rows)
        positions_T = torch.from_numpy(positions_N)
        groups = [
            AttentionBatch(
                num_tokens=num_rows,
                num_rows=num_rows,
                num_decodes=num_rows,
                positions_T=positions_T,
                slot_mapping_T=torch.from_numpy(mapping_T),
                block_table_NM=torch.from_numpy(table_NM),
                counts=ones_N,
                contexts=contexts_N,
            )
            for mapping_T, table_NM in zip(mappings, tables, strict=True)
        ]
        return cls(
            token_ids_T=torch.from_numpy(token_ids_N),
            attention=groups,
            partial_blocks=[],
            first_token_N=rows_N,
            slots_N=slots_N,
            starts_N=positions_N,
            counts_N=ones_N,
            sample_rows=rows_N,
            sample_last_R=None,
            sampling=SamplingRows(slots_N, contexts_N),
            sample_target_R=torch.from_numpy(targets_N),
            beams=NO_ROWS,
            score_rows=NO_ROWS,
            pool_rows=NO_ROWS,
            best=(torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)),
            memory=(pointers,),
            addresses=(columns.ctypes.data, token_ids_N.ctypes.data, pointers.ctypes.data),
        )


def decode_inputs(plan: StepPlan, slots: Slots) -> DecodeInputs | None:
    """Return the inputs of a step in which each row computes one token and samples once; None without the kernel.

    The rows are in the plan's order. The memory is one of `slots.free_inputs`, to which the caller gives it back.
    """
    kernel = _kernel()
    if kernel is None or slots.ids_SW.device.type != "cpu":
        return None
    num_rows, free = len(plan.slots), slots.free_inputs
    inputs: DecodeInputs | None = free.pop() if free else None
    if inputs is None or len(inputs.slots_N) != num_rows:
        free.clear()
        inputs = DecodeInputs.of(slots, num_rows)
    longest = kernel(
        addressof(slots.memory), plan.slots.buffer_info()[0], plan.starts.buffer_info()[0], num_rows, *inputs.addresses
    )
    assert longest >= 0, "a row writes past its block table"
    assert longest <= slots.max_model_len, "a row reaches past max_model_len"
    for batch in inputs.attention:
        batch.seen_T = None
    inputs.adapters_T = _adapters(slots, inputs.slots_N) if slots.adapters else None
    return inputs


@cache
def _kernel() -> Callable[..., int] | None:
    pointers = (c_void_p, c_void_p, c_void_p)
    return cpu.function("octavo_decode_inputs", *pointers, c_int64, *pointers, result=c_int64, is_short=True)


def _adapters(slots: Slots, slot_T: Ints) -> Tensor | None:
    """Return the decoder's number of each row's adapter, int32, -1 for none; None if no row has one."""
    adapters_T = slots.adapter_S[slot_T]
    return torch.from_numpy(adapters_T) if (adapters_T >= 0).any() else None


def _sampled(plan: StepPlan, rows: Ints) -> tuple[Ints, Ints | int, Drafts | None]:
    """Return the row of each sampled position, the number of later positions in the same row, and the drafts."""
    if not plan.num_drafts:
        return rows, 0, None
    drafts = Drafts.of(plan, rows)
    return np.repeat(rows, drafts.lengths), drafts.remaining_R, drafts


def _tokens(order_A: Ints, counts_N: Ints, is_plain: bool) -> tuple[Ints, Ints]:
    """Return each token's row and each row's first token, in pass order. `is_plain`: every row has one token."""
    if is_plain:
        return order_A, np.arange(len(order_A) + 1)
    counts_A = counts_N[order_A]
    return np.repeat(order_A, counts_A), np.concatenate(([0], np.cumsum(counts_A)))


def list_partial_blocks(slots: Slots, block_size: int, rows: tuple[Ints, Ints, Ints]) -> list[Ints]:
    """Return, per cache group, the blocks whose first position the rows write and whose last position they do not."""
    slots_N, starts_N, ends_N = rows
    last_block_N = (ends_N - 1) // block_size
    is_partial_N = (ends_N % block_size != 0) & (last_block_N * block_size >= starts_N)
    return [table_SM[slots_N, last_block_N][is_partial_N] for table_SM in slots.tables]


def _source_rows(counts_N: Ints, flags_N: Ints) -> Ints:
    """Return, per row, the row after whose last token it samples: itself, or the nearest earlier row with tokens."""
    has_tokens_N = counts_N > 0
    assert (flags_N[~has_tokens_N] & ROW_FORK).all(), "a row without tokens does not fork"
    source_N: Ints = np.maximum.accumulate(np.where(has_tokens_N, np.arange(len(counts_N)), -1))
    assert source_N[0] >= 0, "a row that forks has no row before it"
    return source_N


def slot_mappings(slots: Slots, block_size: int, tokens: tuple[Ints, Ints]) -> list[Ints]:
    """Return, per cache group, each token's KV slot, of tokens with these slots and positions."""
    slots_T, positions_T = tokens
    index_T, offset_T = positions_T // block_size, positions_T % block_size
    mappings: list[Ints] = []
    for table_SM, null_block in zip(slots.tables, slots.null_blocks, strict=True):
        block_T = table_SM[slots_T, index_T]
        assert block_T.max() != null_block, "a row writes past its block table"
        mappings.append(block_T * block_size + offset_T)
    return mappings


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
