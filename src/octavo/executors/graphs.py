"""Decode steps that are captured as graphs: forward, sampling and the write of sampled ids are one launch.

Owns: the sizes, the memory that a captured step reads and writes, and padding. Does not: run other steps (prompts,
drafts, edited logits, media, adapters run eagerly), or own ids and tables.
Invariants: a captured step depends only on what is sent to its `words`, on ids, tables and the pool. A padded row reads
and writes the spare word of DeviceTables, has no context, and stores no keys and values.
Shapes: B rows of the size, N rows of the step, G cache groups, K words of a row's draw.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.executors.cache import CacheGroups
from octavo.executors.device import Device, DeviceGraph, reason_of
from octavo.executors.slots import Slots, from_packed
from octavo.executors.step_buffers import BufferPair, rounded_words, split_words
from octavo.executors.step_inputs import NO_ROWS, PLAIN_FLAGS, StepInputs, slot_mappings
from octavo.models.decoder import Decoder
from octavo.ops.attention import AttentionBatch, DeviceRows, HostTables
from octavo.ops.attention_triton import NUM_LISTS, WorkPlanner, WorkRoom
from octavo.sampling.columns import NO_IDS, Ints, SamplingRows, upload
from octavo.sampling.sampler import Sampled

_LOG = logging.getLogger(__name__)
SIZES = (1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16))
EDIT_WORDS = 4096  # room for edits in the one copy; more take a copy of their own


def capture_sizes(max_rows: int) -> list[int]:
    """Return the sizes for steps of up to `max_rows` rows, the largest first."""
    return [size for below, size in reversed(list(pairwise((0, *SIZES)))) if below < max_rows]


@dataclass(slots=True)
class _CapturedStep:
    """A graph, the words that it reads, how they are divided, and the results that it writes."""

    graph: DeviceGraph
    rooms: list[WorkRoom]
    words: Tensor
    num_words: int
    ids_B: Tensor
    best_B: Tensor


class DecodeGraphs:
    """The captured steps of an executor. `sizes` are those that were captured."""

    def __init__(self, device: Device, slots: Slots, cache: CacheGroups, decoder: Decoder, block_size: int) -> None:
        planners = [planner for planner in cache.planners if planner is not None]
        assert len(planners) == len(cache.pools) and slots.on_device is not None, "see can_capture"
        self._device = device
        self._slots = slots
        self._tables = slots.on_device
        self._cache = cache
        self._planners: list[WorkPlanner] = planners
        self._decoder = decoder
        self._block_size = block_size
        self._steps: dict[int, _CapturedStep] = {}

    @property
    def sizes(self) -> list[int]:
        """The captured sizes, ascending."""
        return sorted(self._steps)

    def capture(self, sizes: Sequence[int]) -> str:
        """Capture steps of these sizes, in this order; return why some are left out, or "".

        A size without enough memory is left out. Any other error leaves out this size and those after it.
        """
        for size in sizes:
            try:
                self._steps[size] = self._capture(size)
            except torch.OutOfMemoryError as error:
                reason = f"no memory for a captured step of {size} rows: {reason_of(error)}"
                _LOG.warning("%s", reason)
            except RuntimeError as error:
                return f"steps of {size} rows and less are not captured: {reason_of(error)}"
        left_out = sorted(set(sizes) - set(self._steps))
        return f"no memory for captured steps of {left_out} rows" if left_out else ""

    def _capture(self, size: int) -> _CapturedStep:
        where = self._device.torch_device
        rooms = [planner.room(size, self._slots.max_model_len) for planner in self._planners]
        columns = self._columns(size, rooms, NO_IDS, NO_IDS)
        num_words = sum(map(rounded_words, columns))
        words = torch.zeros(num_words + EDIT_WORDS, dtype=torch.int32, device=where)
        for part, column in zip(split_words(words[:num_words], columns), columns, strict=True):
            part.copy_(upload(where, column)[0])
        ids_B = torch.zeros(size, dtype=torch.int32, device=where)
        best_B = torch.zeros(size, dtype=torch.float32, device=where)
        step = _CapturedStep(self._device.graph(), rooms, words, num_words, ids_B, best_B)
        step.graph.capture(lambda: self._run(size, step, columns))
        return step

    def _columns(self, size: int, rooms: Sequence[WorkRoom], slots_N: Ints, starts_N: Ints) -> list[NDArray[np.int32]]:
        """Return the columns of rows of these slots and positions, padded to `size`; int32."""
        count, slots, spare = len(slots_N), self._slots, self._tables.spare
        shared = np.zeros((5, size), dtype=np.int32)
        places, targets, positions, contexts, of_slots = shared
        places[count:] = targets[count:] = spare
        places[:count] = slots_N * slots.ids_SW.shape[1] + starts_N
        targets[:count] = places[:count] + 1
        positions[:count], contexts[:count], of_slots[:count] = starts_N, starts_N + 1, slots_N
        mappings = np.full((len(rooms), size), -1, dtype=np.int32)
        draws = slots.sampler.selection.draws(slots_N, starts_N + 1).pack()
        packed = np.zeros((len(draws), size), dtype=np.int32)
        packed[:, :count] = draws
        if count:
            mappings[:, :count] = slot_mappings(slots, self._block_size, (slots_N, starts_N))
        columns = [shared, mappings, packed, np.arange(size + 1, dtype=np.int32)]
        ones_B, wide_B = np.ones(size, dtype=np.int64), contexts.astype(np.int64)
        for planner, room, table_SM in zip(self._planners, rooms, slots.tables, strict=True):
            tables = HostTables(table_SM, slots_N, self._block_size) if count else None
            columns += planner.work(ones_B, wide_B, room, tables).lists
        return columns

    def _run(self, size: int, step: _CapturedStep, columns: Sequence[NDArray[Any]]) -> None:
        """Compute a step from its words; what is captured."""
        shared, mappings_GB, packed_KB, first_B1, *lists = split_words(step.words[: step.num_words], columns)
        places_B, targets_B, positions_B = shared[:3].long().unbind()  # torch's own operations want int64
        contexts_B, slots_B = shared[3], shared[4]
        ones_B = np.ones(size, dtype=np.int64)
        batches = []
        for group, (table_SM, room) in enumerate(zip(self._tables.tables, step.rooms, strict=True)):
            shared, items, joins, tiles, num_work = lists[NUM_LISTS * group : NUM_LISTS * (group + 1)]
            rows = DeviceRows(
                first_B1, contexts_B, slots_B, table_SM, shared, items, joins, tiles, num_work, room.num_parts
            )  # fmt: skip
            mapping_B = mappings_GB[group]
            batches.append(AttentionBatch(size, size, size, positions_B, mapping_B, table_SM, ones_B, ones_B))
            batches[-1].device = rows
        self._cache.begin(batches)
        token_ids_B = self._tables.words.index_select(0, places_B)
        hidden_BE = self._decoder.forward(token_ids_B, positions_B, self._cache.attention)
        ids_B, best_B = self._slots.sampler.sample_packed(self._decoder.logits(hidden_BE), packed_KB)
        self._tables.words.index_copy_(0, targets_B, ids_B)
        step.ids_B.copy_(ids_B)
        step.best_B.copy_(best_B)

    def size_of(self, plan: StepPlan) -> int | None:
        """Return the captured size that fits a plan, or None if it must run eagerly."""
        size = next((size for size in self.sizes if size >= len(plan.slots)), None)
        if size is None or not plan.is_fast_path or plan.num_drafts or not PLAIN_FLAGS.issuperset(plan.flags):
            return None
        slots, slots_N = self._slots, from_packed(plan.slots)
        has_adapters = bool(slots.adapters) and bool((slots.adapter_S[slots_N] >= 0).any())
        is_plain = not has_adapters and slots.sampler.is_plain(SamplingRows(slots_N, slots_N))
        return size if is_plain else None

    def launch(self, plan: StepPlan, size: int, pair: BufferPair) -> tuple[StepInputs, Sampled]:
        """Launch a plan, with all pending edits of slots. The results are valid until the next step is launched."""
        slots_N, starts_N = from_packed(plan.slots), from_packed(plan.starts)
        step, count = self._steps[size], len(slots_N)
        columns: list[NDArray[Any]] = list(self._columns(size, step.rooms, slots_N, starts_N))
        edits_CE = self._tables.take_edits()
        if rounded_words(edits_CE) <= EDIT_WORDS:
            words = pair.send([*columns, edits_CE], step.words)
            self._tables.apply(split_words(words, [*columns, edits_CE])[-1])
        else:
            self._tables.apply(upload(self._device.torch_device, edits_CE)[0])
            pair.send(columns, step.words)
        step.graph.replay()
        rows_N = np.arange(count)
        inputs = StepInputs(
            token_ids_T=step.ids_B,
            attention=[],
            partial_blocks=[],
            first_token_N=rows_N,
            slots_N=slots_N,
            starts_N=starts_N,
            counts_N=np.ones(count, dtype=np.int64),
            sample_rows=rows_N,
            sample_last_R=None,
            sampling=SamplingRows(slots_N, starts_N + 1),
            sample_target_R=step.ids_B,
            beams=NO_ROWS,
            score_rows=NO_ROWS,
            pool_rows=NO_ROWS,
        )
        return inputs, Sampled(step.ids_B[:count], step.best_B[:count], NO_IDS, None)
