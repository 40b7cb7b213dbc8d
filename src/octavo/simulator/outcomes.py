"""Outcomes: how each request of a simulation ended, as packed columns (a million fit in a hundred megabytes).

Owns: the columns. Does not: judge (summary does).
"""

from __future__ import annotations

from array import array

from octavo.core.request import FinishReason

NEVER = -1.0  # a time that was not reached


class Outcomes:
    """One entry per request that ended, in the order of their ends.

    Times are seconds on the simulation's clock: `arrivals`, `starts` (first scheduled), `first_tokens`, `ends`, NEVER
    if not reached. `reasons` are FinishReasons, `indices` the requests' places in the workload, `replicas` the replicas
    that served them, `tenants` indices into `tenant_names`. `cached` counts tokens found in the prefix cache,
    `restarts` those by a replica's failure. `output_tokens` are of all choices, `longest` of the longest one.
    """

    def __init__(self) -> None:
        self.indices = array("q")
        self.arrivals = array("d")
        self.starts = array("d")
        self.first_tokens = array("d")
        self.ends = array("d")
        self.prompt_tokens = array("i")
        self.output_tokens = array("i")
        self.longest = array("i")
        self.cached = array("i")
        self.preemptions = array("i")
        self.restarts = array("i")
        self.replicas = array("i")
        self.tenants = array("i")
        self.reasons = array("b")
        self.tenant_names: list[str] = []
        self._tenant_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.indices)

    def tenant(self, name: str) -> int:
        """Return a tenant's number."""
        number = self._tenant_of.setdefault(name, len(self.tenant_names))
        if number == len(self.tenant_names):
            self.tenant_names.append(name)
        return number

    def served(self, place: int) -> bool:
        """Return True if the entry ended as requested, not by an error, a timeout or a cancellation."""
        return self.reasons[place] in (FinishReason.STOP, FinishReason.LENGTH)
