"""Prefix affinity: among the first waiting requests, the one with the longest cached prefix goes first.

Invariant: a request is admitted after at most (longest cached prefix - 1) / weight of those that arrived later, as
one k places later goes first only if more than k * weight further tokens of it are cached.
"""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState


class PrefixAffinity(Policy):
    """Order of arrival, where each cached token moves a request forward by 1 / `weight` places."""

    name = "prefix_affinity"
    rule = "order of arrival; of the first 64, a longer cached prefix goes first"
    lookahead = 64
    weight = 16

    def prefer(self, request: RequestState, cached_tokens: int) -> tuple[float, ...]:
        """`weight` for each arrival before it, less what is cached."""
        return (self.weight * request.order - cached_tokens,)

    def why(self, request: RequestState) -> str:
        """Its number and what is cached of it, as far as it was looked up."""
        cached = "a prefix not looked up yet" if request.seen is None else f"{request.seen[0]} tokens cached"
        return f"arrival {request.order + 1}, {cached}, {self.weight} of which are worth a place"
