"""First come, first served: the order of arrival decides everything, preemption too (the latest goes first)."""

from __future__ import annotations

from octavo.core.request import RequestState


class Fcfs:
    """Order of arrival."""

    name = "fcfs"
    headroom = 0.01
    skip_ahead = False

    def key(self, request: RequestState) -> tuple[float, ...]:
        """Nothing beside the arrival."""
        return ()

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Nothing beside the arrival: the latest goes first."""
        return ()
