"""Gates: bounded resources other than tokens and blocks that a request holds while it runs (adapter slots).

Owns: one object per resource. Does not: order requests, look at the cache, or own the executor's slots
(`State.free_slots`), which every request needs.
To add a gate, write a class with Gate's five members and add it to `State.gates`, passable gates first.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.plan import WaitReason
from octavo.core.request_state import RequestState
from octavo.errors import InvariantError


class Gate(Protocol):
    """A bounded resource that running requests hold.

    A request that waits at a passable gate never holds back another request. A request that waits at any other gate is
    bypassed at most `max_bypass` times, like a request that lacks blocks; after that, all others wait for it.
    """

    reason: WaitReason
    is_passable: bool

    def lack(self, request: RequestState) -> tuple[int, int] | None:
        """Return (needed, available) if the request cannot have its share now, else None."""

    def take(self, request: RequestState) -> None:
        """Take the share of a request that starts to run."""

    def give_back(self, request: RequestState) -> None:
        """Give back the share of a request that no longer runs."""


class AdapterSlots:
    """Slots for adapters: each adapter that running requests use holds one. Adapter 0 is the base model: no slot."""

    reason = WaitReason.ADAPTER_SLOTS
    is_passable = False

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._users: dict[int, int] = {}  # running requests by adapter

    @property
    def num_used(self) -> int:
        """Adapters in use."""
        return len(self._users)

    def lack(self, request: RequestState) -> tuple[int, int] | None:
        """Return (1, 0) if the request needs a new slot and none is free."""
        adapter = request.request.adapter_id
        if not adapter or adapter in self._users or len(self._users) < self.limit:
            return None
        return 1, 0

    def take(self, request: RequestState) -> None:
        """Hold the slot of the request's adapter, shared with others that use it."""
        adapter = request.request.adapter_id
        if self.lack(request) is not None:
            raise InvariantError(f"adapter {adapter} takes a slot, but all {self.limit} are in use")
        if adapter:
            self._users[adapter] = self._users.get(adapter, 0) + 1

    def give_back(self, request: RequestState) -> None:
        """Free the slot when no other running request uses the adapter."""
        adapter = request.request.adapter_id
        if not adapter:
            return
        if adapter not in self._users:
            raise InvariantError(f"adapter {adapter} gives back a slot that it does not hold")
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
