"""simulate: a workload through one engine or a fleet, on a virtual clock.

Owns: the one call, and the rarer garbage collections during it. Does not: move time (fleet, replica), judge the
outcome (summary) or know a device (costs).
Invariant: equal workload and setup give an equal SimulatedRun, with fast_forward or without.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from octavo.simulator.arrival import Arrival
from octavo.simulator.fleet import Fleet
from octavo.simulator.setup import ReplicaFailure, ReplicaSetup, Setup
from octavo.simulator.totals import ReplicaTotals, Samples, SimulatedRun

__all__ = ["ReplicaFailure", "ReplicaSetup", "ReplicaTotals", "Samples", "Setup", "SimulatedRun", "simulate"]

_YOUNG = 100_000  # allocations between collections; Python's own 700 made a simulation a fifth slower


def simulate(workload: Iterable[Arrival] | Sequence[Arrival], setup: Setup) -> SimulatedRun:
    """Simulate a workload to its end.

    `workload` is in order of time. A request that follows another may be anywhere in a sequence; in an iterator it must
    be after that one, in the order of the earliest times at which they can arrive. Raises ConfigError otherwise.
    """
    with _rare_collections():
        return Fleet(workload, setup).run()


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    if before[0]:  # 0: the caller has switched it off
        gc.set_threshold(max(before[0], _YOUNG), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
