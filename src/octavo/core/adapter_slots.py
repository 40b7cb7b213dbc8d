"""Adapter slots: how many different adapters may run at once.

Owns: which adapters are in use, and by how many requests. Does not: load them (executors do).
"""

from __future__ import annotations

from octavo.errors import InvariantError


class AdapterSlots:
    """A slot is held while any running request uses its adapter. Adapter 0 is the base model and takes none."""

    __slots__ = ("_users", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._users: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        """Adapters in use."""
        return len(self._users)

    def fits(self, adapter_id: int) -> bool:
        """Whether a request with this adapter may run now."""
        return not adapter_id or adapter_id in self._users or len(self._users) < self.limit

    def take(self, adapter_id: int) -> None:
        """A request with this adapter starts to run."""
        if not self.fits(adapter_id):
            raise InvariantError(f"adapter {adapter_id} takes a slot, but all {self.limit} are in use")
        if adapter_id:
            self._users[adapter_id] = self._users.get(adapter_id, 0) + 1

    def give_back(self, adapter_id: int) -> None:
        """A request with this adapter runs no more."""
        if not adapter_id:
            return
        if adapter_id not in self._users:
            raise InvariantError(f"adapter {adapter_id} gives back a slot that it does not hold")
        self._users[adapter_id] -= 1
        if not self._users[adapter_id]:
            del self._users[adapter_id]
