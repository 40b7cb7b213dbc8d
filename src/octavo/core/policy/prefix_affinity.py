"""Prefix affinity: of the first waiting requests, the one with the longest cached prefix is admitted first.

Invariant: at most (longest cached prefix - 1) / weight later arrivals are admitted before a request, because one that
is k places later is preferred only if more than k * weight further tokens of it are cached.
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
        """Return `weight` for each earlier arrival, minus the cached tokens."""
        return (self.weight * request.order - cached_tokens,)

    def why(self, request: RequestState) -> str:
        """Return its number in the order of arrival, and what is cached of it if that was looked up."""
        cached = "a prefix not looked up yet" if request.seen is None else f"{request.seen[0]} tokens cached"
        return f"arrival {request.order + 1}, {cached}, {self.weight} of which are worth a place"
