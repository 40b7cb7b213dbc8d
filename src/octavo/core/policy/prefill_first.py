"""Prefill first, as transformers' continuous batching has it: prefilling before decoding before waiting."""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState, Status


class PrefillFirst(Policy):
    """Finish begun prompts before anything decodes; no block is kept free; the newest arrivals are preempted."""

    name = "prefill_first"
    rule = "what prefills, then what decodes, then order of arrival"
    headroom = 0.0
    skip_ahead = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Prefilling 0, decoding 1, waiting 2."""
        if request.status == Status.WAITING:
            return (2.0,)
        return (1.0,) if request.is_decoding else (0.0,)

    def why(self, request: RequestState) -> str:
        """Its number."""
        return f"arrival {request.order + 1}"
