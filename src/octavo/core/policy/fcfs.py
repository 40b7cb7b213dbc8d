"""First come, first served. The latest arrival is preempted first."""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState


class Fcfs(Policy):
    """Order of arrival."""

    name = "fcfs"
    rule = "order of arrival"

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return nothing: the order of arrival decides."""
        return ()

    def why(self, request: RequestState) -> str:
        """Return its number in the order of arrival."""
        return f"arrival {request.order + 1}"
