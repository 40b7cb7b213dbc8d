"""The built-in policies except `fair`, which has its own module. To add one, write a class with @register_policy.

Owns: the policies' orders, as keys of requests. Does not: check budgets, blocks or progress (the scheduler does).
"""

from __future__ import annotations

from octavo.core.policy.base import Policy, register_policy
from octavo.core.request_state import RequestState, Status


@register_policy
class Fcfs(Policy):
    """First come, first served: order of arrival. The latest arrival is preempted first."""

    name = "fcfs"
    rule = "order of arrival"

    def why(self, request: RequestState) -> str:
        """Return the request's number in the order of arrival."""
        return f"arrival {request.order + 1}"


@register_policy
class Fifo(Fcfs):
    """Serve decoding requests, then prefilling, then waiting requests (as transformers' continuous batching does)."""

    name = "fifo"
    rule = "what decodes, then what prefills, then order of arrival"
    headroom = 0.2
    skip_ahead = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return 0 for decoding, 1 for prefilling, 2 for waiting."""
        if request.status == Status.WAITING:
            return (2.0,)
        return (0.0,) if request.is_decoding else (1.0,)


@register_policy
class PrefillFirst(Fcfs):
    """Finish started prompts before any request decodes (as transformers' continuous batching does); no headroom."""

    name = "prefill_first"
    rule = "what prefills, then what decodes, then order of arrival"
    headroom = 0.0
    skip_ahead = True

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return 0 for prefilling, 1 for decoding, 2 for waiting."""
        if request.status == Status.WAITING:
            return (2.0,)
        return (1.0,) if request.is_decoding else (0.0,)


@register_policy
class Priority(Policy):
    """Smallest `priority` first, then arrival; `age_s` seconds of waiting count as one priority level.

    All waiting requests age equally, so their order never changes: a key that includes the arrival time needs no
    update. The request with the greatest key is preempted first. A new request does not preempt running requests (as
    in vLLM), except in a subclass with `preempt_on_arrival = True`.
    """

    name = "priority"
    rule = "smaller priority first, with ageing; then order of arrival"
    age_s = 60.0

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return the arrival time plus `age_s` for each priority level."""
        return (request.request.priority * self.age_s + request.request.arrival,)

    def why(self, request: RequestState) -> str:
        """Return the request's priority, and the waiting time that it counts for."""
        level = request.request.priority
        moved = "earlier" if level < 0 else "later"
        return f"priority {level}, as if it had arrived {abs(level) * self.age_s:g} s {moved}"

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Return the key in the order of service."""
        return self.key(request)


@register_policy
class Deadline(Policy):
    """Earliest deadline first (Liu and Layland, 1973): requests are ordered by when their next token is due.

    A request's first token is due `ttft_objective` seconds after its arrival, and each further token `tpot_objective`
    seconds later. A request without objectives has `ttft_s` and `tpot_s`. A later request can pass a waiting one only
    if it arrives within the waiting request's ttft_objective. The request whose next token is due last is preempted
    first. This policy does not end late requests; Request.deadline and queue_timeout do.
    """

    name = "deadline"
    rule = "whose token is due first"
    ttft_s = 1.0
    tpot_s = 0.1

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return when the next token is due; if the request does not decode, when its first token was due."""
        decodes = request.is_decoding and request.status == Status.RUNNING
        return (self._due(request, self._num_outputs(request) if decodes else 0),)

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Return when the next token is due."""
        return (self._due(request, self._num_outputs(request)),)

    def why(self, request: RequestState) -> str:
        """Return when the request's first token is due."""
        return f"its first token is due {self._due(request, 0) - request.request.arrival:g} s after its arrival"

    def _num_outputs(self, request: RequestState) -> int:
        return max((sequence.num_outputs for sequence in request.sequences), default=0)

    def _due(self, request: RequestState, num_outputs: int) -> float:
        submitted = request.request
        ttft = self.ttft_s if submitted.ttft_objective is None else submitted.ttft_objective
        tpot = self.tpot_s if submitted.tpot_objective is None else submitted.tpot_objective
        due = submitted.arrival + ttft + (num_outputs * tpot if num_outputs else 0.0)
        return due if submitted.deadline is None else min(due, submitted.deadline)


@register_policy
class ShortestPrefill(Policy):
    """Shortest prompt first, where each earlier arrival adds `weight` tokens to a request's length.

    Outputs do not count, so a preempted request keeps its rank. The latest arrival is preempted first.
    Invariant: at most (num_prompt_tokens - 1) / weight later arrivals are admitted before a request, because the k-th
    arrival after it is preferred only if its prompt is more than k * weight tokens shorter.
    """

    name = "shortest_prefill"
    rule = "shorter prompts first, each earlier arrival counting as some tokens"
    weight = 32

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return the prompt tokens plus `weight` for each earlier arrival."""
        return (request.request.num_prompt_tokens + self.weight * request.order,)

    def why(self, request: RequestState) -> str:
        """Return the key as a sum of its parts."""
        length, earlier = request.request.num_prompt_tokens, request.order
        return (
            f"{length} prompt tokens + {self.weight} for each of {earlier} earlier arrivals = {self.key(request)[0]:g}"
        )


@register_policy
class PrefixAffinity(Policy):
    """Order of arrival, where `weight` cached tokens move a request forward by one position.

    Invariant: at most (longest cached prefix - 1) / weight later arrivals are admitted before a request, because the
    k-th arrival after it is preferred only if more than k * weight more of its tokens are cached.
    """

    name = "prefix_affinity"
    rule = "order of arrival; of the first 64, a longer cached prefix is first"
    lookahead = 64
    weight = 16

    def prefer(self, request: RequestState, cached_tokens: int) -> tuple[float, ...]:
        """Return `weight` for each earlier arrival, minus the cached tokens."""
        return (self.weight * request.order - cached_tokens,)

    def why(self, request: RequestState) -> str:
        """Return the request's number in the order of arrival, and its cached tokens if they are known."""
        cached = "a prefix not looked up yet" if request.seen is None else f"{request.seen.num_tokens} tokens cached"
        return f"arrival {request.order + 1}, {cached}, {self.weight} of which are worth a place"
