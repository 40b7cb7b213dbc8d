"""Policies: an order of requests and a choice of victims, by name.

Owns: the registry. Does not: ask policies (see guard), decide (the scheduler does) or find plug-ins (octavo.plugins).
"""

from __future__ import annotations

from octavo.core.limits import Limits
from octavo.core.policy.base import Policy
from octavo.core.policy.deadline import Deadline
from octavo.core.policy.fair import Fair
from octavo.core.policy.fcfs import Fcfs
from octavo.core.policy.fifo import Fifo
from octavo.core.policy.guard import PolicyGuard, shown
from octavo.core.policy.prefill_first import PrefillFirst
from octavo.core.policy.prefix_affinity import PrefixAffinity
from octavo.core.policy.priority import Priority
from octavo.core.policy.shortest_prefill import ShortestPrefill
from octavo.errors import ConfigError

__all__ = ["POLICIES", "Policy", "PolicyGuard", "create_policy", "find_policy", "register_policy"]

_BUILT_IN: tuple[type[Policy], ...] = (
    Fcfs, Fifo, PrefillFirst, Priority, Fair, Deadline, ShortestPrefill, PrefixAffinity,
)  # fmt: skip
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _BUILT_IN}


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
