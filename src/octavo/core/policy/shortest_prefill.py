"""Shortest prefill first, with a bound on how often an early arrival is passed.

Invariant: a request is admitted after at most (num_prompt_tokens - 1) / weight of those that arrived later, as one
k places later goes first only if its prompt is more than k * weight tokens shorter.
"""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState


class ShortestPrefill(Policy):
    """Order of prompt length, where each place in the order of arrival is worth `weight` tokens.

    The length is the prompt's, outputs left out: a preempted request keeps its place. The newest are preempted.
    """

    name = "shortest_prefill"
    rule = "shorter prompts first, each earlier arrival counting as some tokens"
    weight = 32

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Prompt tokens plus `weight` for each arrival before it."""
        return (request.request.num_prompt_tokens + self.weight * request.order,)

    def why(self, request: RequestState) -> str:
        """The sum."""
        length, earlier = request.request.num_prompt_tokens, request.order
        return (
            f"{length} prompt tokens + {self.weight} for each of {earlier} earlier arrivals = {self.key(request)[0]:g}"
        )
