"""Shortest prefill first, with a bound on how many later arrivals are served before an earlier one.

Invariant: at most (num_prompt_tokens - 1) / weight later arrivals are admitted before a request, because one that is k
places later is preferred only if its prompt is more than k * weight tokens shorter.
"""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState


class ShortestPrefill(Policy):
    """Order of prompt length, where each place in the order of arrival is worth `weight` tokens.

    Outputs do not count, so a preempted request keeps its place. The latest arrival is preempted first.
    """

    name = "shortest_prefill"
    rule = "shorter prompts first, each earlier arrival counting as some tokens"
    weight = 32

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return the prompt tokens plus `weight` for each earlier arrival."""
        return (request.request.num_prompt_tokens + self.weight * request.order,)

    def why(self, request: RequestState) -> str:
        """Return the sum."""
        length, earlier = request.request.num_prompt_tokens, request.order
        return (
            f"{length} prompt tokens + {self.weight} for each of {earlier} earlier arrivals = {self.key(request)[0]:g}"
        )
