"""Fair shares of tenants: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

Owns: one counter per tenant, its charges, and when it is raised.
Invariants: counters only grow. The counters of tenants with waiting requests differ by at most one charge of a request
or of a full batch, so while two tenants both wait, their service differs by at most twice that charge. A tenant without
requests is forgotten once its counter is at or below the floor, at which a new tenant would start, so that memory is
bounded by the open requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush, heapreplace
from typing import Any

from octavo.core.limits import Limits
from octavo.core.policy.base import Policy, register_policy
from octavo.core.request_state import RequestState


class _Tenant:
    """A tenant's counter (charges divided by its weight), and the numbers of its open and of its waiting requests."""

    __slots__ = ("counter", "name", "num_live", "num_waiting", "serial", "weight")

    def __init__(self, name: str, serial: int, weight: float, counter: float) -> None:
        self.name = name
        self.serial = serial
        self.weight = weight
        self.counter = counter
        self.num_live = 0
        self.num_waiting = 0


class _Account:
    """One open request: whether it waits, and whether its prompt was charged."""

    __slots__ = ("is_charged", "is_waiting", "tenant")

    def __init__(self, tenant: _Tenant) -> None:
        self.tenant = tenant
        self.is_waiting = True
        self.is_charged = False


class _Lowest:
    """A heap of tenants by counter, lowest first. Counters only grow, so an outdated entry is corrected when read."""

    __slots__ = ("_belongs", "_entered", "_heap")

    def __init__(self, belongs: Callable[[_Tenant], bool]) -> None:
        self._belongs = belongs
        self._entered: dict[int, None] = {}
        self._heap: list[tuple[float, int, _Tenant]] = []

    def add(self, tenant: _Tenant) -> None:
        """Add a tenant, unless the heap has it."""
        if tenant.serial not in self._entered:
            self._entered[tenant.serial] = None
            heappush(self._heap, (tenant.counter, tenant.serial, tenant))

    def peek(self) -> _Tenant | None:
        """Return the lowest tenant that still belongs here, or None."""
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


@register_policy
class Fair(Policy):
    """One waiting line per tenant: the tenant with the least service for its weight is next, then order of arrival.

    At its first admission a prompt is charged `prompt_weight` for each token to compute; cached tokens are free. Each
    output token is charged `output_weight`. A tenant that had no waiting request starts at least at the lowest counter
    of the waiting tenants or, if none waits, of the last that waited, so that unused service cannot be saved up. A
    request of the tenant with the highest counter is preempted first.
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
        self._last: _Tenant | None = None  # the last tenant that ceased to have waiting requests
        self._floor = 0.0
        self._num_tenants = 0  # since the start

    def configure(self, limits: Limits) -> None:
        """Read the tenants' weights."""
        self._weights = dict(limits.tenant_weights)

    def lane(self, request: RequestState) -> str:
        """Return the tenant."""
        return request.request.tenant

    def lane_key(self, lane: str) -> float:
        """Return the tenant's counter."""
        tenant = self._tenants.get(lane)
        return self._floor if tenant is None else tenant.counter

    def victim_key(self, request: RequestState) -> tuple[float, ...]:
        """Return the tenant's counter."""
        return (self.lane_key(request.request.tenant),)

    def why(self, request: RequestState) -> str:
        """Return the tenant's counter and weight, and the request's number in the order of arrival."""
        served, weight = self.lane_key(request.lane), self._weights.get(request.lane, 1.0)
        return f"its tenant was given {served:g} (of weight {weight:g}), arrival {request.order + 1}"

    def arrived(self, request: RequestState) -> None:
        """Open the request's account, and create its tenant if it is unknown."""
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
        """Charge the prompt, unless it was charged before a preemption."""
        account = self._accounts[request.order]
        if account.is_waiting:
            account.is_waiting = False
            self._leave(account.tenant)
        if not account.is_charged:
            account.is_charged = True
            self._charge(account.tenant, self.prompt_weight * num_tokens)

    def preempted(self, request: RequestState) -> None:
        """Count the request as waiting again."""
        account = self._accounts[request.order]
        if not account.is_waiting:
            account.is_waiting = True
            self._enter(account.tenant)

    def served(self, request: RequestState, num_tokens: int) -> None:
        """Charge the request's tenant for output tokens."""
        tenant = self._accounts[request.order].tenant  # as _charge: called for each token of each request
        tenant.counter += self.output_weight * num_tokens / tenant.weight

    def finished(self, request: RequestState) -> None:
        """Close the request's account, and forget idle tenants whose counter is not above the floor."""
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
            idle.num_live = -1  # belongs to no heap any more

    def save(self) -> Any:
        """Return the tenants and the accounts; heaps follow from them."""
        known = list(self._tenants.values())
        return {
            "tenants": [[one.name, one.serial, one.counter, one.num_live, one.num_waiting] for one in known],
            "accounts": [
                [order, one.tenant.name, one.is_waiting, one.is_charged] for order, one in self._accounts.items()
            ],
            "last": None if self._last is None else [self._last.serial, self._last.counter],
            "floor": self._floor,
            "num_tenants": self._num_tenants,
        }

    def restore(self, saved: Any, requests: Mapping[int, RequestState]) -> None:
        """Take over what `save` returned."""
        for name, serial, counter, num_live, num_waiting in saved["tenants"]:
            tenant = self._tenants[name] = _Tenant(name, serial, self._weights.get(name, 1.0), counter)
            tenant.num_live, tenant.num_waiting = num_live, num_waiting
            if num_waiting:
                self._waiting.add(tenant)
            if not num_live:
                self._idle.add(tenant)
        for order, name, is_waiting, is_charged in saved["accounts"]:
            account = self._accounts[order] = _Account(self._tenants[name])
            account.is_waiting, account.is_charged = is_waiting, is_charged
        if saved["last"] is not None:
            serial, counter = saved["last"]
            same = (one for one in self._tenants.values() if one.serial == serial)
            self._last = next(same, _Tenant("", serial, 1.0, counter))  # it may be forgotten
        self._floor, self._num_tenants = saved["floor"], saved["num_tenants"]

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
        """Raise the counter of new tenants to that of the lowest waiting tenant or, if none waits, of the last one."""
        lowest = self._waiting.peek() or self._last
        if lowest is not None:
            self._floor = max(self._floor, lowest.counter)
