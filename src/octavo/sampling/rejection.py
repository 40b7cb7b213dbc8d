"""Rejection sampling of drafts: accepts more drafts than equal draws do; ids have the same distribution.

Owns: the rule and its random numbers. Does not: edit logits, make drafts, or drop what follows a rejected draft: the
id of a position equals the draft exactly if the draft is accepted, so executors.step_inputs compares ids as always.
Rule for a position with draft x, the target's distribution p and the draft's q: accept x if u * q(x) < p(x), else draw
from max(p - q, 0). A draft that no model drew (prompt lookup), or whose q is not known, has q(x) = 1: given x, the id
has distribution p then too. p and q are those of selection.distribution, after all edits, masks and truncations.
Invariants: u, the draw, and the draws of a draft model are different sequences of the request's seed, by position.
Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.columns import Floats, Ints, SamplingRows, upload
from octavo.sampling.selection import SelectionColumns, distribution, first_above

# (slot, position) -> the distribution that the position's draft was drawn from, [V of the draft model], or None
FindDistribution = Callable[[int, int], Tensor | None]
MANY_IDS = 2048  # from here on a pass over the vocabulary takes longer than a call


@dataclass(frozen=True, slots=True)
class Rejection:
    """Verifies drafts. Without `find_distribution`, no model drew them."""

    find_distribution: FindDistribution | None = None

    def verify(self, logits_RV: Tensor, rows: SamplingRows, columns: SelectionColumns) -> Tensor:
        """Return the id of each row, all of which have drafts.

        It is arbitrary if the best logit is not finite, and after a rejected draft of the same sequence.
        """
        assert rows.drafts is not None
        if not logits_RV.is_cpu or logits_RV.shape[1] < MANY_IDS:
            return self._verify(logits_RV, rows, columns)
        # one row at a time: each costs a pass over V, and what follows a rejected draft is dropped
        ids_R, is_lost = torch.from_numpy(rows.drafts.copy()), False
        for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
            is_next = row > 0 and slot == rows.slots[row - 1] and position == rows.positions[row - 1] + 1
            if not (is_lost and is_next):
                one = np.array([row])
                ids_R[row] = self._verify(logits_RV[row : row + 1], rows.take(one), columns)[0]
                is_lost = bool(ids_R[row] != rows.drafts[row])
        return ids_R

    def _verify(self, logits_RV: Tensor, rows: SamplingRows, columns: SelectionColumns) -> Tensor:
        """Verify the rows together, without waiting for the device."""
        assert rows.drafts is not None
        find, drawn_from = self.find_distribution, list[Tensor | None]()
        for slot, position in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True):
            drawn_from.append(None if find is None else find(slot, position))
        draws = columns.draws(rows.slots, rows.positions)
        numbers = columns.acceptances(rows.slots, rows.positions), draws.uniform
        return accept_or_draw(distribution(logits_RV, draws), rows.drafts, drawn_from, numbers)


def accept_or_draw(
    probs_RV: Tensor, drafts: Ints, drawn_from: Sequence[Tensor | None], numbers: tuple[Floats, Floats]
) -> Tensor:
    """Return each row's draft, or an id from the residual distribution.

    `drawn_from` are the drafts' distributions; `numbers` are the uniform numbers of acceptance and of the draw.
    """
    device, size = probs_RV.device, probs_RV.shape[1]
    drafts_R1 = upload(device, drafts[:, None])[0]
    accept_R1, uniform_R1 = upload(device, numbers[0][:, None], numbers[1][:, None])
    certain_R1 = torch.ones_like(accept_R1)
    for row, (token, other_V) in enumerate(zip(drafts.tolist(), drawn_from, strict=True)):
        if other_V is not None:
            certain_R1[row] = other_V[token]
    is_accepted_R1 = accept_R1 * certain_R1 < probs_RV.gather(1, drafts_R1)
    if probs_RV.is_cpu and bool(is_accepted_R1.all()):
        return drafts_R1[:, 0]
    residual_RV = probs_RV.scatter(1, drafts_R1, 0.0)
    for row, other_V in enumerate(drawn_from):
        if other_V is not None:
            residual_RV[row] = probs_RV[row]
            residual_RV[row, : len(other_V)] -= other_V[:size]
    residual_RV.clamp_(min=0.0)
    # equal distributions may differ by rounding, and then leave no residual
    is_accepted_R1 |= residual_RV.amax(dim=1, keepdim=True) <= 0
    return torch.where(is_accepted_R1, drafts_R1, first_above(residual_RV, uniform_R1))[:, 0]
