"""First come, first served: the order of arrival decides everything, preemption too (the latest goes first)."""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState


class Fcfs(Policy):
    """Order of arrival."""

    name = "fcfs"
    rule = "order of arrival"

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Nothing beside the arrival."""
        return ()

    def why(self, request: RequestState) -> str:
        """Its number."""
        return f"arrival {request.order + 1}"
