"""Gates: what a request needs to run beside tokens and blocks, and holds while it runs.

Owns: one small object for each such thing. Does not: order requests, look at the cache, or own the executor's slots
(`State.free_slots`), which every request needs.
To add one: a class with these five members, and its place in `State.gates`, the passable ones first.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.plan import WaitReason
from octavo.core.request_state import RequestState
from octavo.errors import InvariantError


class Gate(Protocol):
    """Something bounded that running requests hold.

    A request that waits at a passable gate is skipped for as long as it takes: it never holds back another request.
    At any other gate it is bypassed like a request that lacks blocks: at most `max_bypass` times, then all wait for it.
    """

    reason: WaitReason
    is_passable: bool

    def lack(self, request: RequestState) -> tuple[int, int] | None:
        """Return (needed, available) if the request cannot have its share now, else None."""
        ...

    def take(self, request: RequestState) -> None:
        """Take the share of a request that starts to run."""
        ...

    def give_back(self, request: RequestState) -> None:
        """Give back the share of a request that no longer runs."""
        ...


class AdapterSlots:
    """Slots for adapters: one is held while running requests use its adapter. Adapter 0 is the base model: no slot."""

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
