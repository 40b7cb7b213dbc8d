"""Scheduling policies by name: each orders requests and chooses victims. This package registers the built-in ones."""

from octavo.core.policy import basic, fair
from octavo.core.policy.base import POLICIES, Policy, PolicyGuard, create_policy, find_policy, register_policy

__all__ = [
    "POLICIES", "Policy", "PolicyGuard", "basic", "create_policy", "fair", "find_policy", "register_policy",
]  # fmt: skip
