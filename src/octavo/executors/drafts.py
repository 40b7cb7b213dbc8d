"""Rows of a step that verify drafts: the layout of their sampled positions, and which of them are accepted.

Owns: the layout of results where rows sample more than once. Does not: sample, or make drafts (core.drafts).
Shapes: R sampled positions of the step, row by row; a row of d drafts has 1 + d of them.
Invariant: a position counts iff every draft before it in its row equals the id sampled at its position.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import StepPlan, StepResult
from octavo.executors.columns import from_packed
from octavo.sampling.columns import Ints


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a step. `lengths` are positions per sampling row; `behind_R` how many of its row follow each.

    `expected_R` is the draft that continues each position; -1 for the last position of a row, which has none.
    """

    lengths: Ints
    behind_R: Ints
    expected_R: Ints

    @classmethod
    def of(cls, plan: StepPlan, sampling_rows: Ints) -> Drafts:
        """Lay out a plan with drafts; all rows with drafts are sampling rows."""
        lengths = from_packed(plan.num_drafts)[sampling_rows] + 1
        behind_R = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum()) - 1
        expected_R = np.full(len(behind_R), -1, dtype=np.int64)
        expected_R[behind_R > 0] = from_packed(plan.draft_token_ids)
        return cls(lengths, behind_R, expected_R)

    def counting(self, token_ids: array[int]) -> NDArray[np.bool_]:
        """Return which positions count, given the ids sampled at each."""
        is_wrong_R = from_packed(token_ids) != self.expected_R
        before_R = np.cumsum(is_wrong_R) - is_wrong_R
        first = np.cumsum(self.lengths) - self.lengths
        is_counted: NDArray[np.bool_] = before_R == np.repeat(before_R[first], self.lengths)
        return is_counted

    def cut(self, result: StepResult) -> None:
        """Reduce a result with an id for each position to those that count, and set each row's number of ids."""
        assert result.token_ids is not None
        is_counted = self.counting(result.token_ids)
        first = np.cumsum(self.lengths) - self.lengths
        counts = np.add.reduceat(is_counted.astype(np.int64), first)
        kept = np.flatnonzero(is_counted).tolist()
        ids, logprobs = result.token_ids, result.logprobs
        result.token_ids = array("i", [ids[place] for place in kept])
        result.num_token_ids = array("i", counts.tolist())
        if logprobs is not None:
            result.logprobs = [logprobs[place] for place in kept]
