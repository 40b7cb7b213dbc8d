"""Fifo as in transformers' continuous batching: decoding before prefilling before waiting, then arrival."""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState, Status


class Fifo(Policy):
    """Serve requests that decode, then those that prefill, then the rest. The latest arrival is preempted first."""

    name = "fifo"
    rule = "what decodes, then what prefills, then order of arrival"
    headroom = 0.2
    skip_ahead = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return 0 for decoding, 1 for prefilling, 2 for waiting."""
        if request.status == Status.WAITING:
            return (2.0,)
        return (0.0,) if request.is_decoding else (1.0,)

    def why(self, request: RequestState) -> str:
        """Return its number in the order of arrival."""
        return f"arrival {request.order + 1}"
