"""PolicyGuard: asks a policy and checks its answers, so that no policy can break the scheduler.

Owns: the checks, and the count of bad answers. Does not: decide (the scheduler does).
Invariants: whatever a policy answers or raises, the scheduler gets plain tuples of floats (no NaN), plain strings, and
no exception; a bad answer counts as no opinion. Some running request is never preempted again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.limits import Limits
from octavo.core.policy.base import Policy, find_policy
from octavo.core.request import MAX_RETURNS, RequestState
from octavo.errors import ConfigError

Rank = tuple[tuple[float, ...], int]


def shown(value: object) -> str:
    """Return what to show of a user's object, whose own methods may fail."""
    try:
        return str(value)[:200]
    except Exception:
        return f"<{type(value).__name__}>"


class PolicyGuard:
    """Asks one policy. Its attributes are the policy's, read and checked once; raises ConfigError for a bad one.

    Victims that a policy names may take turns forever, each losing its work to the other. So a request that was
    preempted MAX_RETURNS times is a victim only after all others, and among such requests the latest arrival is
    preempted first: the first of them is never preempted again, and finishes.
    """

    __slots__ = (
        "first_error", "headroom", "lookahead", "names_victims", "num_errors", "policy", "preempt_on_arrival",
        "skip_ahead", "tracks_service",
    )  # fmt: skip

    def __init__(self, policy: Policy) -> None:
        headroom, lookahead = policy.headroom, policy.lookahead
        if not (isinstance(headroom, (int, float)) and 0 <= headroom < 1):
            raise ConfigError(f"headroom is {headroom!r}; give a share of the pool from 0 up to, but not, 1")
        if not (isinstance(lookahead, int) and lookahead >= 1):
            raise ConfigError(f"lookahead is {lookahead!r}; give a number of candidates of at least 1")
        self.policy = policy
        self.headroom = float(headroom)
        self.lookahead = int(lookahead)
        self.skip_ahead = bool(policy.skip_ahead)
        self.preempt_on_arrival = bool(policy.preempt_on_arrival)
        self.tracks_service = bool(policy.tracks_service)
        self.names_victims = getattr(policy.victim_key, "__func__", None) is not Policy.victim_key
        self.num_errors = 0
        self.first_error = ""

    def rank(self, request: RequestState) -> Rank:
        """Return the place in the order of service: the policy's key, then the order of arrival."""
        return self._key("key", request), request.order

    def victim_rank(self, request: RequestState) -> Rank:
        """Return the place in the order of preemption; the greatest is preempted first."""
        if request.num_preemptions >= MAX_RETURNS:
            return (0.0,), request.order
        if not self.names_victims:
            return (1.0,), request.order
        return (1.0, *self._key("victim_key", request)), request.order

    def preference(self, request: RequestState, cached_tokens: int) -> Rank:
        """Return the place among candidates that were looked up in the cache."""
        return self._key("prefer", request, cached_tokens), request.order

    def lane(self, request: RequestState) -> str:
        """Return the line that a request waits in. Ask once: a policy may not answer the same twice."""
        try:
            lane: object = self.policy.lane(request)
            if isinstance(lane, str):
                return str.__str__(lane)  # plain, whatever its class does
            self._count(f"lane gave {shown(lane)}")
        except Exception as error:  # a user's code; the scheduler goes on without its opinion
            self._count(f"lane: {type(error).__name__}: {shown(error)}")
        return ""

    def lane_key(self, lane: str) -> float:
        """Return the place of a line among lines."""
        try:
            key = float(self.policy.lane_key(lane))
            if key == key:
                return key
            self._count("lane_key gave NaN")
        except Exception as error:
            self._count(f"lane_key: {type(error).__name__}: {shown(error)}")
        return 0.0

    def tell(self, hook: str, *args: Any) -> None:
        """Call the policy's hook of that name."""
        try:
            getattr(self.policy, hook)(*args)
        except Exception as error:
            self._count(f"{hook}: {type(error).__name__}: {shown(error)}")

    def rule(self) -> str:
        """Return the order of service in words, for people. What fails here is not counted."""
        return self._words(lambda: self.policy.rule) or "as the policy ranks them"

    def why(self, request: RequestState) -> str:
        """Return what gives a request its place, in words, for people. What fails here is not counted."""
        return self._words(lambda: self.policy.why(request))

    @staticmethod
    def _words(say: Callable[[], object]) -> str:
        try:
            said = say()
            return str.__str__(said)[:200] if isinstance(said, str) else ""
        except Exception:  # a user's code
            return ""

    def _key(self, name: str, *args: Any) -> tuple[float, ...]:
        try:
            given = getattr(self.policy, name)(*args)
            if isinstance(given, tuple):
                parts = list(given)
                key = tuple([float(part) for part in parts if isinstance(part, (int, float))])
                if len(key) == len(parts) and all([part == part for part in key]):  # no NaN
                    return key
            self._count(f"{name} gave {shown(given)}")
        except Exception as error:
            self._count(f"{name}: {type(error).__name__}: {shown(error)}")
        return ()

    def _count(self, message: str) -> None:
        self.num_errors += 1
        self.first_error = self.first_error or message


def create_policy(name: str, limits: Limits) -> Policy:
    """Create the policy of that name. Raises ConfigError if there is none, or it does not start."""
    kind = find_policy(name)
    try:
        policy = kind()
        policy.configure(limits)
        PolicyGuard(policy)  # checks its attributes
    except Exception as error:  # a user's code
        raise ConfigError(f"policy {name!r} does not start: {type(error).__name__}: {shown(error)}") from error
    return policy
