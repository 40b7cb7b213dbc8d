"""Gates: what a request needs to run beside tokens and blocks, and holds while it runs.

Owns: one small object for each such thing. Does not: order requests, or look at the cache.
To add one: a class with these four members, and its place in `State.gates`.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.adapter_slots import AdapterSlots
from octavo.core.budget import Budget
from octavo.core.plan import WaitReason
from octavo.core.request import RequestState


class Gate(Protocol):
    """Something bounded that running requests hold."""

    reason: WaitReason

    def lack(self, request: RequestState) -> tuple[int, int] | None:
        """(needed, available) when the request cannot have its share now, else None."""
        ...

    def take(self, request: RequestState) -> None:
        """The request starts to run."""
        ...

    def give_back(self, request: RequestState) -> None:
        """The request runs no more."""
        ...


class SequenceGate:
    """The cap on sequences: a request takes one for each choice or beam (S03)."""

    reason = WaitReason.SEQUENCE_CAP

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def lack(self, request: RequestState) -> tuple[int, int] | None:
        """Needed and free slots, where they are too few."""
        return None if self._budget.fits(request.num_slots) else (request.num_slots, self._budget.left)

    def take(self, request: RequestState) -> None:
        """All slots of the request, those of beams to come too."""
        self._budget.take(request.num_slots)

    def give_back(self, request: RequestState) -> None:
        """Those of choices that ended were given back then."""
        self._budget.give_back(request.num_slots)


class AdapterGate:
    """Places for different adapters."""

    reason = WaitReason.ADAPTER_SLOTS

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots

    def lack(self, request: RequestState) -> tuple[int, int] | None:
        """One place, where none is free."""
        return None if self._slots.fits(request.request.adapter_id) else (1, self._slots.limit - self._slots.num_used)

    def take(self, request: RequestState) -> None:
        """A place for the request's adapter, shared with others that use it."""
        self._slots.take(request.request.adapter_id)

    def give_back(self, request: RequestState) -> None:
        """The place is free when nobody uses the adapter."""
        self._slots.give_back(request.request.adapter_id)
