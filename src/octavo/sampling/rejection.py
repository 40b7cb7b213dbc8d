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

import torch
from torch import Tensor

from octavo.sampling.columns import Floats, Ints, SamplingRows, upload
from octavo.sampling.selection import SelectionColumns, distribution, first_above

# (slot, position) -> the distribution that the position's draft was drawn from, [V of the draft model], or None
FindDistribution = Callable[[int, int], Tensor | None]


@dataclass(frozen=True, slots=True)
class Rejection:
    """Verifies drafts. Without `find_distribution`, no model drew them."""

    find_distribution: FindDistribution | None = None

    def verify(self, logits_RV: Tensor, rows: SamplingRows, columns: SelectionColumns) -> Tensor:
        """Return the id of each row, all of which have drafts. It is arbitrary if the best logit is not finite."""
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
    residual_RV, certain_R1 = probs_RV.clone(), torch.ones_like(accept_R1)
    residual_RV.scatter_(1, drafts_R1, 0.0)
    for row, (token, other_V) in enumerate(zip(drafts.tolist(), drawn_from, strict=True)):
        if other_V is not None:
            residual_RV[row] = probs_RV[row]
            residual_RV[row, : len(other_V)] -= other_V[:size]
            certain_R1[row] = other_V[token]
    residual_RV.clamp_(min=0.0)
    is_accepted_R1 = accept_R1 * certain_R1 < probs_RV.gather(1, drafts_R1)
    # equal distributions may differ by rounding, and then leave no residual
    is_accepted_R1 |= residual_RV.amax(dim=1, keepdim=True) <= 0
    return torch.where(is_accepted_R1, drafts_R1, first_above(residual_RV, uniform_R1))[:, 0]
