"""Budgets: how much of one thing a step, or the engine, may use.

Owns: one limit and what is left of it. Does not: know requests.
Invariant: 0 <= left <= limit.
"""

from __future__ import annotations

from octavo.errors import InvariantError


class Budget:
    """A limit in units of one thing (tokens, sequences). `renew` starts a step for per-step budgets."""

    __slots__ = ("left", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    @property
    def used(self) -> int:
        """Units taken."""
        return self.limit - self.left

    def renew(self) -> None:
        """Make the whole limit available again."""
        self.left = self.limit

    def fits(self, amount: int) -> bool:
        """Whether `amount` can be taken."""
        return amount <= self.left

    def take(self, amount: int) -> None:
        """Use `amount` units."""
        if amount > self.left:
            raise InvariantError(f"budget of {self.limit} has {self.left} left, {amount} taken")
        self.left -= amount

    def give_back(self, amount: int) -> None:
        """Return `amount` units."""
        self.left += amount
        if self.left > self.limit:
            raise InvariantError(f"budget of {self.limit} given back to {self.left}")
