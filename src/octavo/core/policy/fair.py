"""Fair shares of tenants: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

Owns: one counter per tenant, what it is charged, and when it is lifted.
Invariants: counters only grow; those of tenants with waiting requests differ by at most one charge of a request or
of a full batch, so the service of two that both wait differs by at most twice that; a tenant is forgotten when it
has no request and its counter would be lifted anyway, so that memory follows the live requests.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace

from octavo.core.limits import Limits
from octavo.core.policy.base import Policy
from octavo.core.request import RequestState


class _Tenant:
    """A tenant's counter (charges divided by its weight) and how many requests it has, waiting and at all."""

    __slots__ = ("counter", "name", "num_live", "num_waiting", "serial", "weight")

    def __init__(self, name: str, serial: int, weight: float, counter: float) -> None:
        self.name = name
        self.serial = serial
        self.weight = weight
        self.counter = counter
        self.num_live = 0
        self.num_waiting = 0


class _Account:
    """One live request: where it stands, and whether its prompt is paid for."""

    __slots__ = ("is_charged", "is_waiting", "tenant")

    def __init__(self, tenant: _Tenant) -> None:
        self.tenant = tenant
        self.is_waiting = True
        self.is_charged = False


class _Lowest:
    """Tenants by counter, the lowest on top. Counters only grow: an old entry is put right when it comes up."""

    __slots__ = ("_belongs", "_entered", "_heap")

    def __init__(self, belongs: Callable[[_Tenant], bool]) -> None:
        self._belongs = belongs
        self._entered: dict[int, None] = {}
        self._heap: list[tuple[float, int, _Tenant]] = []

    def add(self, tenant: _Tenant) -> None:
        """Enter a tenant, once."""
        if tenant.serial not in self._entered:
            self._entered[tenant.serial] = None
            heappush(self._heap, (tenant.counter, tenant.serial, tenant))

    def peek(self) -> _Tenant | None:
        """The lowest that still belongs here, or None."""
        while self._heap:
            counter, serial, tenant = self._heap[0]
            if not self._belongs(tenant):
                heappop(self._heap)
                del self._entered[serial]
            elif counter < tenant.counter:
                heapreplace(self._heap, (tenant.counter, serial, tenant))
            else:
                return tenant
        return None


class Fair(Policy):
    """A line for each tenant; the one that had least service for its weight is next. Within a line, arrival.

    A prompt is charged at its first admission, `prompt_weight` for each token computed (what was cached is free),
    outputs as they come, `output_weight` each. A tenant that had nothing waiting starts at the lowest of those
    that wait, or at that of the last to leave: nobody saves up service. The most served is preempted first.
    """

    name = "fair"
    rule = "the tenant with the least service for its weight; then order of arrival"
    tracks_service = True
    prompt_weight = 1.0
    output_weight = 2.0

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._accounts: dict[int, _Account] = {}
        self._waiting = _Lowest(lambda tenant: tenant.num_waiting > 0)
        self._idle = _Lowest(lambda tenant: tenant.num_live == 0)
        self._last: _Tenant | None = None  # the last to have nothing waiting any more
        self._floor = 0.0
        self._num_tenants = 0  # that ever came

    def configure(self, limits: Limits) -> None:
        """Take the tenants' weights."""
        self._weights = dict(limits.tenant_weights)

    def lane(self, request: RequestState) -> str:
        """The tenant."""
        return request.request.tenant

    def lane_key(self, lane: str) -> float:
        """The tenant's counter."""
        tenant = self._tenants.get(lane)
        return self._floor if tenant is None else tenant.counter

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """The tenant's counter: the most served gives way."""
        return (self.lane_key(request.request.tenant),)

    def why(self, request: RequestState) -> str:
        """Its tenant's counter and weight, and its number."""
        served, weight = self.lane_key(request.lane), self._weights.get(request.lane, 1.0)
        return f"its tenant was given {served:g} (of weight {weight:g}), arrival {request.order + 1}"

    def arrived(self, request: RequestState) -> None:
        """Open its account; its tenant may be new, or back."""
        name = request.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = _Tenant(name, self._num_tenants, self._weights.get(name, 1.0), self._floor)
            self._tenants[name] = tenant
            self._num_tenants += 1
        tenant.num_live += 1
        self._accounts[request.order] = _Account(tenant)
        self._enter(tenant)

    def admitted(self, request: RequestState, num_tokens: int) -> None:
        """Charge the prompt, unless it was paid for before it was preempted."""
        account = self._accounts[request.order]
        if account.is_waiting:
            account.is_waiting = False
            self._leave(account.tenant)
        if not account.is_charged:
            account.is_charged = True
            self._charge(account.tenant, self.prompt_weight * num_tokens)

    def preempted(self, request: RequestState) -> None:
        """It waits again."""
        account = self._accounts[request.order]
        if not account.is_waiting:
            account.is_waiting = True
            self._enter(account.tenant)

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Charge outputs."""
        self._charge(self._accounts[request.order].tenant, self.output_weight * num_tokens)

    def finished(self, request: RequestState) -> None:
        """Close the account; forget tenants that would start at the floor anyway."""
        account = self._accounts.pop(request.order)
        tenant = account.tenant
        if account.is_waiting:
            self._leave(tenant)
        tenant.num_live -= 1
        if not tenant.num_live:
            self._idle.add(tenant)
        self._raise_floor()
        while (idle := self._idle.peek()) is not None and idle.counter <= self._floor:
            del self._tenants[idle.name]
            idle.num_live = -1  # belongs nowhere any more

    def _charge(self, tenant: _Tenant, service: float) -> None:
        tenant.counter += service / tenant.weight

    def _enter(self, tenant: _Tenant) -> None:
        if not tenant.num_waiting:
            self._raise_floor()
            tenant.counter = max(tenant.counter, self._floor)
        tenant.num_waiting += 1
        self._waiting.add(tenant)

    def _leave(self, tenant: _Tenant) -> None:
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            self._last = tenant

    def _raise_floor(self) -> None:
        """Where a tenant starts that comes now: the lowest of those that wait, else the last that did."""
        lowest = self._waiting.peek() or self._last
        if lowest is not None:
            self._floor = max(self._floor, lowest.counter)
