"""Earliest deadline first, by the objectives of each request (Liu and Layland, 1973, for the rule).

Owns: when a request's next token is due. Does not: end late requests (Request.deadline and queue_timeout do).
"""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState, Status


class Deadline(Policy):
    """Order of due times: a first token `ttft_objective` after the arrival, each further one `tpot_objective` later.

    Without objectives `ttft_s` and `tpot_s` apply. Only arrivals of the next ttft_objective seconds can pass a waiting
    request. The request whose next token is due last is preempted first.
    """

    name = "deadline"
    rule = "whose token is due first"
    ttft_s = 1.0
    tpot_s = 0.1

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return when the next token is due; for one that does not decode, when the first was due."""
        decodes = request.is_decoding and request.status == Status.RUNNING
        return (self._due(request, self._num_outputs(request) if decodes else 0),)

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Return when the next token is due."""
        return (self._due(request, self._num_outputs(request)),)

    def why(self, request: RequestState) -> str:
        """Return when its first token is due."""
        return f"its first token is due {self._due(request, 0) - request.request.arrival:g} s after its arrival"

    def _num_outputs(self, request: RequestState) -> int:
        return max((sequence.num_committed - sequence.num_prompt for sequence in request.sequences), default=0)

    def _due(self, request: RequestState, num_outputs: int) -> float:
        submitted = request.request
        ttft = self.ttft_s if submitted.ttft_objective is None else submitted.ttft_objective
        tpot = self.tpot_s if submitted.tpot_objective is None else submitted.tpot_objective
        due = submitted.arrival + ttft + (num_outputs * tpot if num_outputs else 0.0)
        return due if submitted.deadline is None else min(due, submitted.deadline)
