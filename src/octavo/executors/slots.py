"""An executor's state per sequence: known ids, block tables, sampling.

Owns: the slots, the effects of a plan on the slots, and copies of a plan's packed columns (a NumPy view of a column
would prevent core from appending to it). Does not: run rows, or decide anything.
Shapes: S slots, W = max_model_len + 1 positions, M blocks of the longest table.
Invariants: `ids_SW` is on the device and the sampler writes into it, so a CARRY row reads its slot's newest id without
the host. Tables are on the host, one per cache group. An accelerator also has them (DeviceTables), and there what a
plan changes is pending until a step sends it. A dropped table entry, and every entry after a table's end, is the
group's null block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import DROP_BLOCK, NewSequence, StepPlan
from octavo.sampling.columns import NO_IDS, Ints, SequenceIds
from octavo.sampling.sampler import Sampler

NO_ADAPTER = -1


def from_packed(column: array[int]) -> NDArray[np.int64]:
    """Copy a packed column as int64."""
    if not column:
        return np.zeros(0, dtype=np.int64)
    return np.frombuffer(column, dtype=np.int32).astype(np.int64)


class SlotMemory(Structure):
    """Twin of struct SlotMemory (csrc/decode_inputs.cpp): where the ids and tables of all slots are."""

    _fields_ = (
        ("ids", c_void_p),
        *((name, c_int64) for name in ("ids_width", "table_width", "block_size", "num_groups")),
        ("tables", c_void_p),
        ("null_blocks", c_void_p),
    )


class Slots:
    """State of all slots. `faults` maps a slot to the reason why this model cannot run the slot's request.

    `tables` and `null_blocks` have one entry per cache group; a table is [S, M]. `on_device` is None on a CPU.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        null_blocks: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.null_blocks = tuple(null_blocks)
        max_blocks = -(-max_model_len // block_size)
        self.tables: list[Ints] = [np.full((num_slots, max_blocks), null, dtype=np.int64) for null in null_blocks]
        self.on_device: DeviceTables | None = None
        if device.type == "cpu":
            self.ids_SW = torch.zeros((num_slots, max_model_len + 1), dtype=torch.int32)
            self._groups = np.array((*(table.ctypes.data for table in self.tables), *null_blocks), dtype=np.int64)
            where = self._groups.ctypes.data
            self.memory = SlotMemory(
                self.ids_SW.data_ptr(), max_model_len + 1, max_blocks, block_size, len(null_blocks),
                where, where + self._groups.itemsize * len(null_blocks),
            )  # fmt: skip
        else:
            self.on_device = DeviceTables((num_slots, max_model_len + 1), self.tables, device)
            self.ids_SW = self.on_device.ids_SW
        self.flat_ids = self.ids_SW.view(-1)  # the id of slot s at position p has index s * W + p
        self._host_ids = self.flat_ids.numpy() if device.type == "cpu" else None  # the same memory
        self.sampler = Sampler(num_slots, self.ids_SW, vocab_size)
        self.free_inputs: list[Any] = []  # of steps that ended (see step_inputs.decode_inputs)
        self.faults: dict[int, str] = {}
        self.adapters: dict[int, int] = {}  # of loaded adapters: id -> the decoder's number
        self.adapter_S = np.full(num_slots, NO_ADAPTER, dtype=np.int32)  # the decoder's numbers

    def change_sequences(self, plan: StepPlan) -> None:
        """Empty the freed slots and fill those of new sequences."""
        for slot in plan.freed_slots:
            self._empty(slot)
        self.sampler.mirostat.forget(plan.finished_ids)
        for new in plan.new_sequences:
            self._empty(new.slot)
            self._fill(new)

    def write_ids(self, plan: StepPlan) -> None:
        """Write the ids that the host chose. Each is the next output of its slot."""
        if not plan.id_edits:
            return
        slots, positions, ids = from_packed(plan.id_edits).reshape(-1, 3).T
        self._put_ids(slots * self.ids_SW.shape[1] + positions, ids)
        self.sampler.processors.append(slots, ids)

    def write_sampled(self, where_R: Tensor, ids_R: Tensor) -> None:
        """Write sampled ids at indices of `flat_ids`."""
        if self._host_ids is None:
            self.flat_ids.index_copy_(0, where_R, ids_R.int())
        else:
            for where, token in zip(where_R.tolist(), ids_R.tolist(), strict=True):  # no cold code for a few ids
                self._host_ids[where] = token

    def write_drafts(self, plan: StepPlan) -> None:
        """Write each row's drafts after the row's known ids, as inputs of this step; sampling overwrites them."""
        if not plan.num_drafts:
            return
        num_drafts = from_packed(plan.num_drafts)
        after = np.arange(num_drafts.sum()) - np.repeat(np.cumsum(num_drafts) - num_drafts, num_drafts)
        first = from_packed(plan.slots) * self.ids_SW.shape[1] + from_packed(plan.starts) + 1
        self._put_ids(np.repeat(first, num_drafts) + after, from_packed(plan.draft_token_ids))

    def _put_ids(self, places: Ints, ids: Ints) -> None:
        """Write ids at indices of `flat_ids`."""
        if self.on_device is None:
            self.flat_ids.index_copy_(0, torch.from_numpy(places), torch.from_numpy(ids).int())
        else:
            self.on_device.put_ids(places, ids)

    def edit_tables(self, plan: StepPlan) -> None:
        """Apply the plan's table edits, all at once."""
        if not plan.edits:
            return
        edits = from_packed(plan.edits).reshape(-1, 4)
        groups = edits[:, 1]
        assert 0 <= groups.min() <= groups.max() < len(self.tables), "an edit names an unknown cache group"
        for group, (table_SM, null_block) in enumerate(zip(self.tables, self.null_blocks, strict=True)):
            slots, _, indices, blocks = (edits if len(self.tables) == 1 else edits[groups == group]).T
            table_SM[slots, indices] = np.where(blocks == DROP_BLOCK, null_block, blocks)
            if self.on_device is not None and len(slots):
                self.on_device.touch(group, slots * table_SM.shape[1] + indices)

    def _empty(self, slot: int) -> None:
        for group, (table_SM, null_block) in enumerate(zip(self.tables, self.null_blocks, strict=True)):
            if self.on_device is not None and len(used := np.flatnonzero(table_SM[slot] != null_block)):
                self.on_device.touch(group, slot * table_SM.shape[1] + used)
            table_SM[slot] = null_block
        self.sampler.release(slot)
        self.adapter_S[slot] = NO_ADAPTER
        self.faults.pop(slot, None)

    def _fill(self, new: NewSequence) -> None:
        assert new.token_ids is not None, f"{new.request_id} has a length but no token ids: only a simulator can run it"
        ids = from_packed(new.token_ids)
        fault = self._fault(new, ids)
        if fault is not None:
            # the request's rows still run, which keeps the step's shape; the step reports the fault for these rows
            self.faults[new.slot] = fault
            ids = np.clip(ids, 0, self.vocab_size - 1)
        if self.on_device is None:
            self.ids_SW[new.slot, : len(ids)].copy_(torch.from_numpy(ids.astype(np.int32)))
        else:
            self.on_device.put_ids(new.slot * self.ids_SW.shape[1] + np.arange(len(ids)), ids)
        self.adapter_S[new.slot] = self.adapters.get(new.adapter_id, NO_ADAPTER)
        known = SequenceIds(ids[: new.num_prompt], ids[new.num_prompt :], new.eos_token_ids, new.request_id)
        self.sampler.put(new.slot, new.params, known, new.choice)

    def _fault(self, new: NewSequence, ids: Ints) -> str | None:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            wrong = int(ids.max()) if ids.max() >= self.vocab_size else int(ids.min())
            return f"token id {wrong} is outside the model's vocabulary of {self.vocab_size}"
        if new.adapter_id and new.adapter_id not in self.adapters:
            return f"adapter {new.adapter_id} is not loaded"
        for token, _ in new.params.logit_bias:
            if token >= self.vocab_size:
                return f"logit_bias names token {token}, the model's vocabulary has {self.vocab_size}"
        return None


MAX_WORDS = 1 << 31  # places are int32


class DeviceTables:
    """The known ids and block tables of all slots on a device, in one int32 tensor that a step edits by one scatter.

    `tables` are the host's. Of several edits of one place the last one counts. Table entries are sent as they are in
    the host's tables when the step is sent. Word `spare` is written by padded rows and means nothing.
    """

    def __init__(self, ids_shape: tuple[int, int], tables: Sequence[Ints], device: torch.device) -> None:
        sizes = [ids_shape[0] * ids_shape[1], *(table.size for table in tables)]
        self._first = np.cumsum([0, *sizes]).tolist()
        self.spare = int(self._first[-1])
        assert self.spare < MAX_WORDS, "the slots' ids and tables have more words than an int32 can number"
        self._host_tables = tables
        self.words = torch.zeros(self.spare + 1, dtype=torch.int32, device=device)
        parts = torch.split(self.words[: self.spare], sizes)
        self.ids_SW: Tensor = parts[0].view(ids_shape)
        self.tables = [part.view(table.shape) for part, table in zip(parts[1:], tables, strict=True)]
        for own_SM, table_SM in zip(self.tables, tables, strict=True):
            own_SM.fill_(int(table_SM[0, 0]))  # the null block
        self._places: list[Ints] = []
        self._values: list[Ints] = []

    def put_ids(self, places: Ints, ids: Ints) -> None:
        """Write ids at flat places of `ids_SW`."""
        self._places.append(places)
        self._values.append(ids)

    def touch(self, group: int, places: Ints) -> None:
        """Send these flat places of a group's host table, with what they have when the step is sent."""
        self._places.append(places + self._first[group + 1])
        self._values.append(NO_IDS)

    def take_edits(self) -> NDArray[np.int32]:
        """Return the pending edits, [2, edits]: places and values, each place once. They are no longer pending."""
        if not self._places:
            return np.zeros((2, 0), dtype=np.int32)
        values = [
            given if len(given) == len(places) else self._current(places)
            for places, given in zip(self._places, self._values, strict=True)
        ]
        places, last = np.concatenate(self._places), np.concatenate(values)
        self._places, self._values = [], []
        found, first = np.unique(places[::-1], return_index=True)
        return np.stack((found, last[::-1][first])).astype(np.int32)

    def _current(self, places: Ints) -> Ints:
        """Return what the host's tables have at places of one group."""
        group = int(np.searchsorted(self._first, places[0], side="right")) - 2
        current: Ints = self._host_tables[group].reshape(-1)[places - self._first[group + 1]]
        return current

    def apply(self, edits_CE: Tensor) -> None:
        """Write edits, which are on the device."""
        if edits_CE.shape[1]:
            self.words.index_copy_(0, edits_CE[0].long(), edits_CE[1])
