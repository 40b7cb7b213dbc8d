"""Priority with ageing: the smaller number is first, and waiting makes up for a larger one.

Two requests that wait age alike, so their order never changes: a key that adds the time of arrival is ageing without
computing keys again.
"""

from __future__ import annotations

from octavo.core.policy.base import Policy
from octavo.core.request import RequestState


class Priority(Policy):
    """Order of `priority`, where `age_s` seconds of waiting are worth one level; ties by arrival.

    The request with the greatest key is preempted first. A new request does not preempt running ones (as in vLLM);
    in a subclass with `preempt_on_arrival = True` it does.
    """

    name = "priority"
    rule = "smaller priority first, with ageing; then order of arrival"
    age_s = 60.0

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return the arrival, moved back by `age_s` for each level."""
        return (request.request.priority * self.age_s + request.request.arrival,)

    def why(self, request: RequestState) -> str:
        """Return its level, and what that is worth in waiting."""
        level = request.request.priority
        return (
            f"priority {level}, as if it had come {abs(level) * self.age_s:g} s {'earlier' if level < 0 else 'later'}"
        )

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Return the same key."""
        return self.key(request)
