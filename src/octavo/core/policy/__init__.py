"""Policies: an order of requests and a choice of victims, by name.

Owns: the registry, and Judge, which asks a policy and believes nothing: a key that is no tuple of numbers, or an
exception, counts as the empty key, and is counted. Does not: decide (scheduler) or find plug-ins (octavo.plugins).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.core.limits import Limits
from octavo.core.policy.base import Policy
from octavo.core.policy.fcfs import Fcfs
from octavo.core.policy.fifo import Fifo
from octavo.core.request import RequestState
from octavo.errors import ConfigError

__all__ = ["POLICIES", "Judge", "Policy", "create_policy", "register_policy"]

_BUILT_IN: tuple[type[Policy], ...] = (Fcfs, Fifo)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _BUILT_IN}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Make a policy known under its name; usable as a decorator. Raises ConfigError for a name in use."""
    name = getattr(policy, "name", "")
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"policy {policy!r} has the name {name!r}; give it a name of letters, digits and _")
    if POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"policy {name!r} is registered already, by {POLICIES[name]!r}; choose another name")
    return policy


def create_policy(name: str, limits: Limits) -> Policy:
    """Make the policy of that name. Raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"policy is {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    policy = POLICIES[name]()
    policy.configure(limits)
    return policy


class Judge:
    """Asks a policy. Whatever it answers, the scheduler gets a key that can be compared, and no exception."""

    __slots__ = ("first_error", "num_errors", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.num_errors = 0
        self.first_error = ""

    def rank(self, request: RequestState) -> tuple[tuple[float, ...], int]:
        """Order of service, total: the policy's key, then the order of arrival."""
        return self._key(self.policy.key, request), request.order

    def victim_rank(self, request: RequestState) -> tuple[tuple[float, ...], int]:
        """Order of preemption, total: the greatest goes first."""
        return self._key(self.policy.victim_key, request), request.order

    def preference(self, request: RequestState, cached_tokens: int) -> tuple[tuple[float, ...], int]:
        """Order among candidates that were looked up in the cache."""
        return self._key(self.policy.prefer, request, cached_tokens), request.order

    def lane(self, request: RequestState) -> str:
        """The line that a request waits in."""
        lane = self._call(self.policy.lane, request)
        return lane if isinstance(lane, str) else ""

    def lane_key(self, lane: str) -> float:
        """The order of a line."""
        key = self._key(lambda name: (self.policy.lane_key(name),), lane)
        return key[0] if key else 0.0

    def tell(self, hook: Callable[..., Any], *args: Any) -> None:
        """Tell the policy that something happened."""
        self._call(hook, *args)

    def _key(self, method: Callable[..., Any], *args: Any) -> tuple[float, ...]:
        key = self._call(method, *args)
        if key == ():
            return ()
        if isinstance(key, tuple) and all(isinstance(part, (int, float)) and part == part for part in key):  # no NaN
            return tuple(map(float, key))
        self._note(f"{method!r} gave {key!r}")
        return ()

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:  # a user's code; the scheduler goes on without its opinion
            self._note(f"{type(error).__name__}: {error}")
            return ()

    def _note(self, message: str) -> None:
        self.num_errors += 1
        self.first_error = self.first_error or message
