"""Budgets: how much of one resource a step may use.

Owns: a limit and what is left of it. Does not: know requests or sequences.
Invariant: 0 <= left <= limit.
"""

from __future__ import annotations

from octavo.core.kv.group import GroupKind, GroupSpec
from octavo.errors import InvariantError

UNBOUNDED = 2**62


class Budget:
    """A limit in units of one resource (tokens). `renew` starts a step."""

    __slots__ = ("left", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit

    def renew(self) -> None:
        """Make the whole limit available again."""
        self.left = self.limit

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


class ReadBudget(Budget):
    """Context tokens read in a step (S04). A row that exceeds the whole limit fits an unused budget and fills it."""

    __slots__ = ("_window",)

    def __init__(self, limit: int, groups: tuple[GroupSpec, ...]) -> None:
        super().__init__(limit or UNBOUNDED)
        is_sliding = all(group.kind == GroupKind.SLIDING for group in groups)
        self._window = max(group.window for group in groups) if is_sliding else UNBOUNDED

    @property
    def is_plain(self) -> bool:
        """True if a row costs the length of its context."""
        return self._window == UNBOUNDED

    def cost(self, start: int, count: int) -> int:
        """Return the context that a row of positions [start, start + count) reads, its own tokens included."""
        return min(start, self._window - 1) + count if count else 0

    def fits(self, amount: int) -> bool:
        """Return True if a row may read `amount`."""
        return amount <= self.left or self.left == self.limit

    def take(self, amount: int) -> None:
        """Use `amount`, or all that is left."""
        self.left -= min(amount, self.left)

    def give_back(self, amount: int) -> None:
        """Return `amount`, or all that was used."""
        self.left = min(self.limit, self.left + amount)
