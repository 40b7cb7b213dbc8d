"""Beam search: chooses the beams that stay live, keeps the best ended beams, and decides when the search is over.

Owns: the scores of one request's live beams, and its pool of ended hypotheses. Does not: know slots, blocks or plans,
or make candidates (the sampler does).
Invariants: at most `width` beams are live, and the pool has at most `width` hypotheses; both are sorted best first.
Equal scores are ordered by beam, then by candidate; an old hypothesis precedes a new one. Sums and quotients are
rounded to float32 after each operation, so they equal those of transformers' beam search (version 5). The rules are
also transformers': a step looks at the best max(2, 1 + number of stop ids) * width continuations. Of the first `width`
of them, those that end enter the pool. Of all of them, the first `width` that do not end stay live.
Source of the search: Lowerre, "The Harpy speech recognition system", 1976; score: sum / length ** length_penalty.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.request import SamplingParams


def _rounded(value: float) -> float:
    """Round to float32; a value that is too large becomes infinite."""
    return array("f", (value,))[0]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An ended beam: its output ids, its score (length penalty applied), and the sum of its log-probabilities.

    `stop_token_id` is the id that ended the beam, or None if the beam ended at its length limit.
    """

    token_ids: array[int]
    score: float
    cumulative_logprob: float
    stop_token_id: int | None = None


class BeamGroup:
    """The beams of one request. `scores` has each live beam's sum of log-probabilities, best first.

    A beam has at most `max_outputs` output ids. `stop_ids` are all ids that end a beam, the model's own included.
    `pool` has the best ended beams.
    """

    def __init__(self, params: SamplingParams, max_outputs: int, stop_ids: frozenset[int]) -> None:
        assert max_outputs > 0, "there is no room for an output"
        self.params = params
        self.width = params.beam_width
        self.max_outputs = max_outputs
        self.stop_ids = stop_ids
        self.scores: list[float] = [0.0]
        self.is_over = False
        self.num_steps = 0
        self.pool: list[Hypothesis] = []

    def advance(
        self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]], paths: Sequence[array[int]]
    ) -> list[tuple[int, int]]:
        """Extend the beams by one token; return the live beams as (parent index, token id), best first.

        The list is empty when the search is over, and shorter than the width only if too few ids may follow.
        `candidates` and `paths` have one entry per live beam, in order. Candidates are (ids, log-probabilities), best
        first: as many as the step looks at, or the whole vocabulary. A path is the beam's output ids; it is copied.
        """
        assert not self.is_over and len(candidates) == len(paths) == len(self.scores), "one entry per live beam"
        self.num_steps += 1
        at_limit = self.num_steps >= self.max_outputs
        may_stop = self.num_steps > self.params.min_tokens
        ended: list[Hypothesis] = []
        live: list[tuple[float, int, int]] = []
        for rank, (total, parent, token_id) in enumerate(self._best_continuations(candidates)):
            stops = may_stop and token_id in self.stop_ids
            if not stops and not at_limit:
                live.append((total, parent, token_id))
            elif rank < self.width:
                ended.append(self._hypothesis(paths[parent], token_id, total, stops))
        self.pool = sorted([*self.pool, *ended], key=lambda one: -one.score)[: self.width]
        del live[self.width :]
        self.scores = [total for total, _, _ in live]
        self.is_over = not live or not self._may_improve()
        if self.is_over:
            self.scores = []
            return []
        return [(parent, token_id) for _, parent, token_id in live]

    def best(self, num: int) -> list[Hypothesis]:
        """Return the `num` best ended hypotheses, or all if there are fewer; best first."""
        return self.pool[:num]

    def _best_continuations(
        self, candidates: Sequence[tuple[Sequence[int], Sequence[float]]]
    ) -> list[tuple[float, int, int]]:
        num_looked_at = max(2, 1 + len(self.stop_ids)) * self.width
        every: list[tuple[float, int, int]] = []
        for parent, (so_far, (token_ids, logprobs)) in enumerate(zip(self.scores, candidates, strict=True)):
            totals = array("f", [so_far + logprob for logprob in logprobs[:num_looked_at]])
            every += [
                (total, parent, token_id)
                for total, token_id in zip(totals, token_ids, strict=False)
                if math.isfinite(total)  # a barred id is no continuation
            ]
        every.sort(key=lambda one: -one[0])
        return every[:num_looked_at]

    def _hypothesis(self, path: array[int], token_id: int, total: float, stops: bool) -> Hypothesis:
        assert len(path) == self.num_steps - 1, "a live beam has one output id per step"
        token_ids = path[:]
        token_ids.append(token_id)
        return Hypothesis(token_ids, self.score(total, self.num_steps), total, token_id if stops else None)

    def score(self, total: float, num_tokens: int) -> float:
        """Return total / num_tokens ** length_penalty."""
        try:
            divisor = _rounded(float(num_tokens) ** self.params.length_penalty)
        except OverflowError:
            divisor = math.inf
        return -math.inf if divisor == 0.0 else _rounded(total / divisor)

    def _may_improve(self) -> bool:
        """Return True if the best live beam may still enter the pool.

        If the pool is full and `early_stopping` is not True, the answer is an estimate. It takes the score that the
        beam would have if it ended now or, for "never" with a positive length_penalty, at the greatest length.
        """
        if len(self.pool) < self.width:
            return True
        if self.params.early_stopping is True:
            return False
        is_hopeful = self.params.early_stopping == "never" and self.params.length_penalty > 0.0
        length = self.max_outputs if is_hopeful else self.num_steps
        return self.score(self.scores[0], length) > self.pool[-1].score
