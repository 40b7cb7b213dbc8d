"""Policies: an order of requests and a choice of victims, by name.

Owns: the registry, and PolicyGuard, which asks a policy and believes nothing: a key that is no tuple of numbers, or an
exception, counts as the empty key, and is counted. Does not: decide (scheduler) or find plug-ins (octavo.plugins).
Invariant: whatever a policy answers, PolicyGuard gives plain tuples of floats (no NaN), plain strings, no exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.limits import Limits
from octavo.core.policy.base import Policy
from octavo.core.policy.deadline import Deadline
from octavo.core.policy.fair import Fair
from octavo.core.policy.fcfs import Fcfs
from octavo.core.policy.fifo import Fifo
from octavo.core.policy.prefill_first import PrefillFirst
from octavo.core.policy.prefix_affinity import PrefixAffinity
from octavo.core.policy.priority import Priority
from octavo.core.policy.shortest_prefill import ShortestPrefill
from octavo.core.request import MAX_RETURNS, RequestState
from octavo.errors import ConfigError

__all__ = ["POLICIES", "Policy", "PolicyGuard", "create_policy", "find_policy", "register_policy"]

_BUILT_IN: tuple[type[Policy], ...] = (
    Fcfs, Fifo, PrefillFirst, Priority, Fair, Deadline, ShortestPrefill, PrefixAffinity,
)  # fmt: skip
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _BUILT_IN}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Make a policy known under its name; usable as a decorator. Raises ConfigError for a name in use."""
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigError(f"{policy!r} is no policy; give a subclass of octavo.Policy")
    name: object = policy.name
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"policy {policy!r} has the name {name!r}; give it a name of letters, digits and _")
    if POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"policy {name!r} is registered already, by {POLICIES[name]!r}; choose another name")
    return policy


def find_policy(name: str) -> type[Policy]:
    """The registered policy of that name. Raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; give one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


def create_policy(name: str, limits: Limits) -> Policy:
    """Make the policy of that name. Raises ConfigError when there is none, or it does not start."""
    kind = find_policy(name)
    try:
        policy = kind()
        policy.configure(limits)
        _Traits(policy)
    except Exception as error:  # a user's code
        raise ConfigError(f"policy {name!r} does not start: {type(error).__name__}: {_text(error)}") from error
    return policy


class _Traits:
    """A policy's attributes, read once and checked. Raises ConfigError naming the bad one."""

    __slots__ = ("headroom", "lookahead", "preempt_on_arrival", "skip_ahead", "tracks_service")

    def __init__(self, policy: Policy) -> None:
        headroom, lookahead = policy.headroom, policy.lookahead
        if not (isinstance(headroom, (int, float)) and 0 <= headroom < 1):
            raise ConfigError(f"headroom is {headroom!r}; give a share of the pool from 0 up to, but not, 1")
        if not (isinstance(lookahead, int) and lookahead >= 1):
            raise ConfigError(f"lookahead is {lookahead!r}; give a number of candidates of at least 1")
        self.headroom = float(headroom)
        self.lookahead = int(lookahead)
        self.skip_ahead = bool(policy.skip_ahead)
        self.preempt_on_arrival = bool(policy.preempt_on_arrival)
        self.tracks_service = bool(policy.tracks_service)


def _text(value: object) -> str:
    """What to show of a user's object, whose own words may fail."""
    try:
        return str(value)[:200]
    except Exception:
        return f"<{type(value).__name__}>"


class PolicyGuard:
    """Asks a policy. Whatever it answers, the scheduler gets a key that can be compared, and no exception.

    `headroom`, `skip_ahead`, `preempt_on_arrival`, `lookahead` and `tracks_service` are the policy's as it was made.
    Victims that a policy names may take turns forever, each losing its work to the other. So a request that was
    preempted MAX_RETURNS times comes after all others as a victim, and among its like the latest arrival goes:
    whoever came first of these is never preempted again, and ends.
    """

    __slots__ = (
        "first_error",
        "headroom",
        "lookahead",
        "names_victims",
        "num_errors",
        "policy",
        "preempt_on_arrival",
        "skip_ahead",
        "tracks_service",
    )

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.num_errors = 0
        self.first_error = ""
        traits = _Traits(policy)
        self.names_victims = getattr(policy.victim_key, "__func__", None) is not Policy.victim_key
        self.headroom = traits.headroom
        self.lookahead = traits.lookahead
        self.preempt_on_arrival = traits.preempt_on_arrival
        self.skip_ahead = traits.skip_ahead
        self.tracks_service = traits.tracks_service

    def rank(self, request: RequestState) -> tuple[tuple[float, ...], int]:
        """Order of service, total: the policy's key, then the order of arrival."""
        return self._key("key", request), request.order

    def victim_rank(self, request: RequestState) -> tuple[tuple[float, ...], int]:
        """Order of preemption, total: the greatest goes first."""
        if request.num_preemptions >= MAX_RETURNS:
            return (0.0,), request.order
        if not self.names_victims:
            return (1.0,), request.order
        return (1.0, *self._key("victim_key", request)), request.order

    def preference(self, request: RequestState, cached_tokens: int) -> tuple[tuple[float, ...], int]:
        """Order among candidates that were looked up in the cache."""
        return self._key("prefer", request, cached_tokens), request.order

    def rule(self) -> str:
        """The order of service in words. For people: what fails here is not counted."""
        return self._words(lambda: self.policy.rule) or "as the policy ranks them"

    def why(self, request: RequestState) -> str:
        """What gives a request its place, in words; nothing where the policy says nothing. Likewise."""
        return self._words(lambda: self.policy.why(request))

    def lane(self, request: RequestState) -> str:
        """The line that a request waits in. Ask once: a policy may not answer the same twice."""
        try:
            lane: object = self.policy.lane(request)
            if isinstance(lane, str):
                return str.__str__(lane)  # plain, whatever its class does
            self._note(f"lane gave {_text(lane)}")
        except Exception as error:  # a user's code; the scheduler goes on without its opinion
            self._note(f"lane: {type(error).__name__}: {_text(error)}")
        return ""

    def lane_key(self, lane: str) -> float:
        """The order of a line."""
        try:
            key = float(self.policy.lane_key(lane))
            if key == key:
                return key
            self._note("lane_key gave NaN")
        except Exception as error:
            self._note(f"lane_key: {type(error).__name__}: {_text(error)}")
        return 0.0

    def tell(self, hook: str, *args: Any) -> None:
        """Tell the policy that something happened, by the name of its hook."""
        try:
            getattr(self.policy, hook)(*args)
        except Exception as error:
            self._note(f"{hook}: {type(error).__name__}: {_text(error)}")

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
            self._note(f"{name} gave {_text(given)}")
        except Exception as error:
            self._note(f"{name}: {type(error).__name__}: {_text(error)}")
        return ()

    def _note(self, message: str) -> None:
        self.num_errors += 1
        self.first_error = self.first_error or message
