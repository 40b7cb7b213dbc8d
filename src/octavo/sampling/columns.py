"""The host's sampling parameters of every slot, and their upload to the device.

Owns: the columns that say what a slot's rows must return, the rows of a step, state rows for slots that need device
state, and uploads. Does not: know what a parameter does to logits (processors, dry) or to a draw (selection).
Invariants: a slot's entries are those of its last `put`. NumPy decides about a step's rows on the host, so nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.request import SamplingParams

NO_LOGPROBS = -1
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
NO_IDS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class SamplingRows:
    """The rows of one step that sample: their slots, and the index of each sampled token in its sequence.

    `drafts` has each row's draft of the sampled token, or -1; None if no row has one.
    """

    slots: Ints
    positions: Ints
    drafts: Ints | None = None

    def take(self, rows: Ints) -> SamplingRows:
        """Return some of the rows."""
        return SamplingRows(self.slots[rows], self.positions[rows], None if self.drafts is None else self.drafts[rows])


@dataclass(frozen=True, slots=True)
class SequenceIds:
    """A new sequence's known ids, the model's end-of-text ids, and the name of its request."""

    prompt: Ints
    output: Ints = field(default_factory=lambda: NO_IDS)
    eos: tuple[int, ...] = ()
    request_id: str = ""

    def stops(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the ids that end the sequence."""
        return params.stop_token_ids if params.ignore_eos else (*self.eos, *params.stop_token_ids)


class SamplingColumns:
    """What each slot's rows must return; every column has one entry per slot."""

    def __init__(self, num_slots: int) -> None:
        self.num_prompt: Ints = np.zeros(num_slots, dtype=np.int64)
        self.logprobs: Ints = np.full(num_slots, NO_LOGPROBS, dtype=np.int64)
        self.prompt_logprobs: Ints = np.full(num_slots, NO_LOGPROBS, dtype=np.int64)
        self.num_candidates: Ints = np.zeros(num_slots, dtype=np.int64)  # candidates that a beam's row must return
        self.has_grammar: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)  # its rows sample only with a mask
        self.may_reject: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)  # see core.proposals
        self.wants_more: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)  # more than an id from unedited logits
        self.wants_logits: NDArray[np.bool_] = np.zeros(num_slots, dtype=np.bool_)  # more than the best id

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds, has_edits: bool, has_rare_draw: bool) -> None:
        """Set a slot's entries. `has_edits`: logits processors edit the slot's rows. See selection.is_rare."""
        self.num_prompt[slot] = len(ids.prompt)
        self.logprobs[slot] = NO_LOGPROBS if params.num_logprobs is None else params.num_logprobs
        self.prompt_logprobs[slot] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        # enough that beam_width candidates remain even if each beam's best candidates end it
        self.num_candidates[slot] = max(2, 1 + len(set(ids.stops(params)))) * params.beam_width
        self.has_grammar[slot] = bool(params.grammar)
        self.wants_more[slot] = has_edits or params.num_logprobs is not None or has_rare_draw
        self.wants_logits[slot] = self.wants_more[slot] or bool(params.grammar) or params.temperature > 0


class SlotState:
    """Device tensors with one row for each slot that needs state; other slots take no memory.

    `rows[slot]` is the slot's row in each of `tensors`, or -1 if it has none.
    """

    def __init__(self, num_slots: int, *tensors: Tensor) -> None:
        self.rows: Ints = np.full(num_slots, -1, dtype=np.int64)
        self.tensors = list(tensors)
        self._free: list[int] = []

    def reserve(self, slot: int) -> int:
        """Assign a row to a slot that has none. The row may have any content; longer tensors may replace `tensors`."""
        assert self.rows[slot] < 0, "a slot without a row"
        if not self._free:
            held = len(self.tensors[0])
            more = max(2, held)
            self.tensors = [torch.cat([tensor, tensor.new_zeros((more, *tensor.shape[1:]))]) for tensor in self.tensors]
            self._free.extend(range(held + more - 1, held - 1, -1))
        self.rows[slot] = self._free.pop()
        return int(self.rows[slot])

    def release(self, slot: int) -> None:
        """Free a slot's row. Idempotent."""
        if self.rows[slot] >= 0:
            self._free.append(int(self.rows[slot]))
            self.rows[slot] = -1


def distinct(ids: Sequence[int], vocab_size: int) -> Ints:
    """Return the distinct ids below `vocab_size`, ascending: an id of another vocabulary can never be sampled."""
    return np.asarray(sorted({token for token in ids if token < vocab_size}), dtype=np.int64)


def upload(device: torch.device, *columns: NDArray[Any]) -> list[Tensor]:
    """Return each column as a tensor on `device`, without waiting for the copy; a CPU tensor shares the array's memory.

    Columns of one call share a dtype and one transfer. Torch's caching host allocator provides the pinned staging
    memory and reuses it only after the copy is done, so several steps may be in flight.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]
    sizes = [column.size for column in columns]
    staging = torch.empty(sum(sizes), dtype=torch.from_numpy(columns[0]).dtype, pin_memory=True)
    np.concatenate([column.reshape(-1) for column in columns], out=staging.numpy())
    parts = torch.split(staging.to(device, non_blocking=True), sizes)
    return [part.view(column.shape) for part, column in zip(parts, columns, strict=True)]
