"""Policy: the base class of all policies, and their registry. Subclass it, give a name and a key, and register it.

Owns: the protocol between scheduler and policy, and the policies by name. Does not: find plug-ins (octavo.plugins), or
check budgets, blocks or progress: the scheduler does, so that no policy can break them. Every answer of a policy is
checked (see policy.guard).
"""

from __future__ import annotations

from octavo.core.limits import Limits
from octavo.core.request import RequestState
from octavo.errors import ConfigError


class Policy:
    """An order of requests and a choice of victims. Lower keys are first; ties go to the earlier arrival.

    `headroom` is the default share of the pool kept free at admission. With `skip_ahead` up to 64 candidates are
    examined after one that lacks room. With `preempt_on_arrival` a waiting request that lacks room may preempt
    running ones of later victim rank. With `lookahead` > 1 that many candidates are admitted in the order of
    `prefer`. With `tracks_service` the scheduler calls `served`. These are read once, after `configure`.
    `rule` is the order in a few words, for people.
    A policy reads the public fields of RequestState and must not write to them. An exception counts as no opinion.
    """

    name = ""
    headroom = 0.01
    skip_ahead = False
    preempt_on_arrival = False
    lookahead = 1
    tracks_service = False
    rule = ""

    def configure(self, limits: Limits) -> None:
        """Read the limits. Called once, before anything else."""

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Return the order of service. Called when a request arrives, is admitted, starts decoding or is preempted."""
        return ()

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Return the order of preemption. The greatest is preempted first; ties go to the later arrival."""
        return ()

    def lane(self, request: RequestState) -> str:
        """Return the name of the line that a request waits in. Called once per request; by default all share one."""
        return ""

    def lane_key(self, lane: str) -> float:
        """Return the order of a line, read for each candidate; it may only grow while requests wait in the line."""
        return 0.0

    def why(self, request: RequestState) -> str:
        """Return what gives a request its place, in words and numbers, for people. Name no other request or tenant."""
        return ""

    def prefer(self, request: RequestState, cached_tokens: int) -> tuple[float, ...]:
        """Return the order among the first `lookahead` candidates, given the length of each one's cached prefix."""
        return ()

    def arrived(self, request: RequestState) -> None:
        """A request was submitted and waits."""

    def admitted(self, request: RequestState, num_tokens: int) -> None:
        """A request starts or resumes; `num_tokens` of its known tokens must be computed."""

    def preempted(self, request: RequestState) -> None:
        """A request waits again."""

    def finished(self, request: RequestState) -> None:
        """A request ended, running or waiting."""

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Output tokens were committed for a request."""


POLICIES: dict[str, type[Policy]] = {}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Register a policy under its name; usable as a decorator. Raises ConfigError for a name in use."""
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigError(f"{policy!r} is no policy; give a subclass of octavo.Policy")
    name: object = policy.name
    if not (isinstance(name, str) and name.isidentifier()):
        raise ConfigError(f"policy {policy!r} has the name {name!r}; give it a name of letters, digits and _")
    if POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"policy {name!r} is registered already, by {POLICIES[name]!r}; choose another name")
    return policy


def find_policy(name: str) -> type[Policy]:
    """Return the registered policy of that name. Raises ConfigError with the known names."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; give one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
