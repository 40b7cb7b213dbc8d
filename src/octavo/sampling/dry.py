"""The DRY penalty: an id that would extend a repetition is penalised, more for a longer repetition.

Owns: for each slot with the penalty, the length of the repetition that ends at each earlier position.
Does not: wait for the device, which may be the only one to know the last id. Other slots hold no state.
Source: p-e-w, "DRY: a modern repetition penalty that reliably prevents looping", text-generation-webui, 2024.
Invariants: matches[row of slot, i] is how many ids at the end of the first known[slot] ids equal the ids that end at i,
back to a breaker. A new id sets the entry to the left neighbour's + 1 where the ids are equal, else to 0. A step
therefore costs O(C). Ids that the host chose are added in the next `apply`.
Shapes: D rows with the penalty, C their longest context, P state rows, W positions of a slot, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.request import SamplingParams
from octavo.sampling.columns import Floats, Ints, SamplingRows, SequenceIds, SlotState, distinct, upload

ALWAYS, OFF = 1 << 62, 0  # see processors.LogitsProcessor.put
LARGEST = 1e30  # largest penalty: the probability becomes 0, and logits stay finite


class DryPenalty:
    """The penalty's state and its edit of logits (a `processors.LogitsProcessor`), by the `dry_*` parameters."""

    def __init__(self, num_slots: int, ids_SW: Tensor, vocab_size: int) -> None:
        self._ids_SW = ids_SW
        self._vocab_size = vocab_size
        self._multiplier: Floats = np.zeros(num_slots)
        self._base: Floats = np.ones(num_slots)
        self._allowed: Ints = np.ones(num_slots, dtype=np.int64)
        self._range: Ints = np.zeros(num_slots, dtype=np.int64)  # 0 = the whole context
        self._known: Ints = np.zeros(num_slots, dtype=np.int64)
        matches_PW = torch.zeros((0, ids_SW.shape[1]), dtype=torch.int32, device=ids_SW.device)
        is_breaker_PV = torch.zeros((0, vocab_size), dtype=torch.bool, device=ids_SW.device)
        self._state = SlotState(num_slots, matches_PW, is_breaker_PV)

    def put(self, slot: int, params: SamplingParams, ids: SequenceIds) -> int:
        """Build a slot's state from its sequence's known ids."""
        if not params.dry_multiplier:
            return OFF
        self._multiplier[slot], self._base[slot] = params.dry_multiplier, params.dry_base
        self._allowed[slot], self._range[slot] = params.dry_allowed_length, params.dry_range
        known = np.concatenate([ids.prompt, ids.output])
        row, self._known[slot] = self._state.reserve(slot), len(known)
        matches_PW, is_breaker_PV = self._state.tensors
        breakers = distinct(params.dry_breaker_ids, self._vocab_size)
        device, start = self._ids_SW.device, max(0, len(known) - (params.dry_range or len(known)))
        lengths = matching_ends(known[start:].tolist(), breakers.tolist())
        matches_PW[row, start : len(known)] = upload(device, np.asarray(lengths, dtype=np.int32))[0]
        is_breaker_PV[row].zero_()
        is_breaker_PV[row].index_fill_(0, upload(device, breakers)[0], True)
        return ALWAYS

    def release(self, slot: int) -> None:
        """Drop a slot's state. Idempotent."""
        self._state.release(slot)

    def apply(self, logits_RV: Tensor, rows: SamplingRows, chosen: Ints) -> None:
        """Add the ids known since the last call, then edit the logits of the chosen rows in place."""
        chosen = chosen[rows.positions[chosen] > 1]
        if not len(chosen):
            return
        slots, lengths = rows.slots[chosen], rows.positions[chosen]
        assert (self._known[slots] <= lengths).all(), "known ids were taken back without a new sequence"
        while len(older := np.flatnonzero(self._known[slots] < lengths)):
            self._add_next(slots[older])
        matches_PW, is_breaker_PV = self._state.tensors
        device, width = logits_RV.device, int(lengths.max()) - 1
        ranges = self._range[slots]
        starts = np.where(ranges > 0, np.maximum(0, lengths - ranges), 0)
        numbers = np.stack([chosen, slots, self._state.rows[slots], starts, lengths, self._allowed[slots]])
        row_D, slot_D, state_D, start_D, length_D, allowed_D = upload(device, numbers)[0].unbind()
        factors = np.stack([self._multiplier[slots], self._base[slots]])
        multiplier_D1, base_D1 = upload(device, factors)[0][:, :, None].unbind()
        at_C = torch.arange(width, device=device)
        next_DC = self._ids_SW[:, 1 : width + 1].index_select(0, slot_D).long()
        match_DC = torch.minimum(matches_PW[:, :width].index_select(0, state_D).long(), at_C - start_D[:, None] + 1)
        is_hit_DC = (match_DC >= allowed_D[:, None]) & (at_C < length_D[:, None] - 1)
        is_hit_DC &= ~is_breaker_PV[state_D[:, None], next_DC]
        penalty_DC = multiplier_D1 * base_D1 ** (match_DC - allowed_D[:, None]).clamp_(min=0)
        penalty_DC = torch.where(is_hit_DC, penalty_DC, 0.0).clamp_(max=LARGEST).float()
        where_DC = row_D[:, None] * logits_RV.shape[1] + next_DC
        flat = logits_RV.view(-1)
        # an id with several penalties gets the largest one
        new_DC = flat[where_DC] - penalty_DC
        flat.scatter_reduce_(0, where_DC.view(-1), new_DC.view(-1), "amin")

    def _add_next(self, slots: Ints) -> None:
        """Add the next known id of each of these slots."""
        self._known[slots] += 1
        matches_PW, is_breaker_PV = self._state.tensors
        device, width = self._ids_SW.device, int(self._known[slots].max())
        numbers = np.stack([slots, self._state.rows[slots], self._known[slots] - 1])
        slot_D, state_D, last_D = upload(device, numbers)[0].unbind()
        ids_DC = self._ids_SW[:, :width].index_select(0, slot_D)
        last_D1 = ids_DC.gather(1, last_D[:, None])
        # entries from the last id on are not read: the next id overwrites them
        is_longer_DC = (ids_DC == last_D1) & ~is_breaker_PV[state_D[:, None], last_D1.long()]
        left_DC = torch.nn.functional.pad(matches_PW[:, : width - 1].index_select(0, state_D), (1, 0))
        matches_PW[:, :width].index_copy_(0, state_D, torch.where(is_longer_DC, left_DC + 1, 0))


def matching_ends(ids: Sequence[int], breakers: Sequence[int]) -> list[int]:
    """Return, for each position, how many ids that end there equal the ids that end the sequence, back to a breaker.

    The last position is always 0. Linear: the Z algorithm (Gusfield 1997) from the end.
    """
    size = len(ids)
    breaker_set = frozenset(breakers)
    max_match = next((back for back in range(size) if ids[size - 1 - back] in breaker_set), size)
    backwards = list(reversed(ids))
    lengths = [0] * size
    left = right = 0  # the match that reaches furthest is backwards[left:right]
    for at in range(1, size):
        match = min(right - at, lengths[at - left]) if at < right else 0
        while at + match < size and backwards[match] == backwards[at + match]:
            match += 1
        if at + match > right:
            left, right = at, at + match
        lengths[at] = match
    return [min(match, max_match) for match in reversed(lengths)]
