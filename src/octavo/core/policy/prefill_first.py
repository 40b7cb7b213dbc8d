"""Prefill first as in transformers' continuous batching: prefilling before decoding before waiting."""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState, Status


class PrefillFirst(Policy):
    """Finish started prompts before any request decodes; keep no block free. The latest arrival is preempted first."""

    name = "prefill_first"
    rule = "what prefills, then what decodes, then order of arrival"
    headroom = 0.0
    skip_ahead = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return 0 for prefilling, 1 for decoding, 2 for waiting."""
        if request.status == Status.WAITING:
            return (2.0,)
        return (1.0,) if request.is_decoding else (0.0,)

    def why(self, request: RequestState) -> str:
        """Return its number in the order of arrival."""
        return f"arrival {request.order + 1}"
