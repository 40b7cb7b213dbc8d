"""Fifo, as transformers' continuous batching has it: decoding before prefilling before waiting, then arrival."""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState, Status


class Fifo(Policy):
    """Finish what decodes, then what prefills, then take in; the newest arrivals are preempted."""

    name = "fifo"
    rule = "what decodes, then what prefills, then order of arrival"
    headroom = 0.2
    skip_ahead = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Decoding 0, prefilling 1, waiting 2."""
        if request.status == Status.WAITING:
            return (2.0,)
        return (0.0,) if request.is_decoding else (1.0,)

    def why(self, request: RequestState) -> str:
        """Its number."""
        return f"arrival {request.order + 1}"
