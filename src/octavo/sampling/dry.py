"""The DRY penalty: an id that would extend a repetition is penalised, more for a longer repetition.

Owns: for each slot with the penalty, how much of the sequence's end is repeated at each earlier position.
Does not: wait for the device, where alone the last id may be known. Slots without the penalty hold no state.
Source: p-e-w, "DRY: a modern repetition penalty that reliably prevents looping", text-generation-webui, 2024.
Invariants: matches[place[slot], i] = how many ids at the end of the first known[slot] ids equal those that end at i,
back to a breaker; another id changes it to the left neighbour's + 1 where the id is equal, else to 0. So a step
costs O(C); ids that the host chose are added in the next `apply`.
Shapes: D rows with the penalty, C longest context of these, P places, W positions of a slot, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.columns import Ints, SamplingColumns, SamplingRows
from octavo.sampling.upload import upload

LARGEST = 1e30  # of a penalty: the probability becomes 0, and logits stay finite


class DryPenalty:
    """The penalty's state and edit. `ids_SW` is the executor's buffer of known ids."""

    def __init__(self, columns: SamplingColumns, ids_SW: Tensor, vocab_size: int) -> None:
        device = ids_SW.device
        self._columns = columns
        self._ids_SW = ids_SW
        self._place = np.full(len(columns.temperature), -1, dtype=np.int64)
        self._known = np.zeros(len(columns.temperature), dtype=np.int64)
        self._free: list[int] = []
        self._matches_PW = torch.zeros((0, ids_SW.shape[1]), dtype=torch.int32, device=device)
        self._is_breaker_PV = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def admit(self, slot: int, ids: Ints) -> None:
        """Build a slot's state from its sequence's known ids, including the prompt."""
        self.release(slot)
        if not self._columns.dry_multiplier[slot]:
            return
        if not self._free:
            held = len(self._matches_PW)
            more = max(2, held)
            self._matches_PW = torch.cat([self._matches_PW, self._matches_PW.new_zeros((more, self._ids_SW.shape[1]))])
            self._is_breaker_PV = torch.cat(
                [self._is_breaker_PV, self._is_breaker_PV.new_zeros((more, self._is_breaker_PV.shape[1]))]
            )
            self._free.extend(range(held + more - 1, held - 1, -1))
        place = self._free.pop()
        self._place[slot], self._known[slot] = place, len(ids)
        breakers = self._columns.breakers[slot]
        device, window = self._ids_SW.device, int(self._columns.dry_range[slot]) or len(ids)
        start = max(0, len(ids) - window)
        found = matching_ends(ids[start:].tolist(), breakers.tolist())
        self._matches_PW[place, start : len(ids)] = upload(device, np.asarray(found, dtype=np.int32))[0]
        self._is_breaker_PV[place].zero_()
        self._is_breaker_PV[place].index_fill_(0, upload(device, breakers)[0], True)

    def release(self, slot: int) -> None:
        """Drop a slot's state. Idempotent."""
        if self._place[slot] >= 0:
            self._free.append(int(self._place[slot]))
            self._place[slot] = -1

    def apply(self, logits_RV: Tensor, rows: SamplingRows) -> None:
        """Edit the logits of the rows with the penalty, in place, after adding the ids known since the last call."""
        chosen = np.flatnonzero(self._place[rows.slots] >= 0)
        chosen = chosen[rows.positions[chosen] > 1]
        if not len(chosen):
            return
        slots, lengths = rows.slots[chosen], rows.positions[chosen]
        assert (self._known[slots] <= lengths).all(), "known ids were taken back without a new sequence"
        while len(behind := np.flatnonzero(self._known[slots] < lengths)):
            self._take_in(slots[behind])
        columns, device, width = self._columns, logits_RV.device, int(lengths.max()) - 1
        ranges = columns.dry_range[slots]
        starts = np.where(ranges > 0, np.maximum(0, lengths - ranges), 0)
        numbers = np.stack([chosen, slots, self._place[slots], starts, lengths, columns.dry_allowed[slots]])
        row_D, slot_D, place_D, start_D, length_D, allowed_D = upload(device, numbers)[0].unbind()
        factors = np.stack([columns.dry_multiplier[slots], columns.dry_base[slots]])
        multiplier_D1, base_D1 = upload(device, factors)[0][:, :, None].unbind()
        at_C = torch.arange(width, device=device)
        next_DC = self._ids_SW[:, 1 : width + 1].index_select(0, slot_D).long()
        match_DC = torch.minimum(
            self._matches_PW[:, :width].index_select(0, place_D).long(), at_C - start_D[:, None] + 1
        )
        is_hit_DC = (match_DC >= allowed_D[:, None]) & (at_C < length_D[:, None] - 1)
        is_hit_DC &= ~self._is_breaker_PV[place_D[:, None], next_DC]
        penalty_DC = multiplier_D1 * base_D1 ** (match_DC - allowed_D[:, None]).clamp_(min=0)
        penalty_DC = torch.where(is_hit_DC, penalty_DC, 0.0).clamp_(max=LARGEST).float()
        where_DC = row_D[:, None] * logits_RV.shape[1] + next_DC
        flat = logits_RV.view(-1)
        # an id with several penalties gets the largest
        new_DC = flat[where_DC] - penalty_DC
        flat.scatter_reduce_(0, where_DC.view(-1), new_DC.view(-1), "amin")

    def _take_in(self, slots: Ints) -> None:
        """Add the next known id of each of the slots."""
        self._known[slots] += 1
        device, width = self._ids_SW.device, int(self._known[slots].max())
        slot_D, place_D, last_D = upload(device, np.stack([slots, self._place[slots], self._known[slots] - 1]))[
            0
        ].unbind()
        ids_DC = self._ids_SW[:, :width].index_select(0, slot_D)
        last_D1 = ids_DC.gather(1, last_D[:, None])
        # entries from the last id on are not read: the next id overwrites them
        goes_on_DC = (ids_DC == last_D1) & ~self._is_breaker_PV[place_D[:, None], last_D1.long()]
        left_DC = torch.nn.functional.pad(self._matches_PW[:, : width - 1].index_select(0, place_D), (1, 0))
        self._matches_PW[:, :width].index_copy_(0, place_D, torch.where(goes_on_DC, left_DC + 1, 0))


def matching_ends(ids: Sequence[int], breakers: Sequence[int]) -> list[int]:
    """Return, for each position, how many ids that end there equal those that end the sequence, back to a breaker.

    The last position is always 0. Linear: the Z algorithm (Gusfield 1997) from the end.
    """
    size = len(ids)
    breaking = frozenset(breakers)
    most = next((back for back in range(size) if ids[size - 1 - back] in breaking), size)
    backwards = list(reversed(ids))
    found = [0] * size
    left = right = 0  # the match that reaches furthest is backwards[left:right]
    for at in range(1, size):
        match = min(right - at, found[at - left]) if at < right else 0
        while at + match < size and backwards[match] == backwards[at + match]:
            match += 1
        if at + match > right:
            left, right = at, at + match
        found[at] = match
    return [min(match, most) for match in reversed(found)]
