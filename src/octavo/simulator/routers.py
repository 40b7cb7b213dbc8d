"""Routers: the choice of a replica for each request, by name.

Owns: the protocol, the registry, and what each router remembers. Does not: read of a replica anything but `load`
(prompt tokens of its requests that have not ended) and `num_open` (the number of those requests).
Invariants: equal calls give equal choices for a seed; only replicas that are up are chosen; memory is bounded.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Protocol, TypeVar

from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival

MAX_KEYS = 1_000_000  # prefix keys, and sessions, that a router remembers; the least recently used are dropped first
_Key = TypeVar("_Key")
LOAD_BOUND = 1.25  # times the mean load that a replica may have and still be preferred
FEW_REQUESTS = 1  # with at most this many requests, a replica is preferred whatever the mean is


class RouterTarget(Protocol):
    """A replica as a router sees it."""

    number: int
    load: int
    num_open: int


_load: Callable[[RouterTarget], int] = attrgetter("load")


class Router(Protocol):
    """Chooses among the replicas that are up, of which there is at least one."""

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the replica for a request."""
        ...


class Spread:
    """Chooses the least loaded; of several the one that was given the least, so that an idle fleet fills evenly."""

    def __init__(self) -> None:
        self._given: dict[int, int] = {}

    def choose(self, targets: Sequence[RouterTarget], amount: int) -> RouterTarget:
        """Choose a replica, and count `amount` as given to it."""
        chosen = min(targets, key=lambda target: (target.load, self._given.get(target.number, 0)))
        self._given[chosen.number] = self._given.get(chosen.number, 0) + amount
        return chosen


class RoundRobin:
    """Chooses each replica in turn."""

    def __init__(self, seed: int = 0) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the next one by number, after the one chosen last."""
        chosen = next((target for target in targets if target.number >= self._next), targets[0])
        self._next = chosen.number + 1
        return chosen


class Random:
    """Chooses at random, uniformly."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return a replica drawn uniformly."""
        return targets[self._rng.randrange(len(targets))]


class PowerOfTwo:
    """Chooses the less loaded of two drawn at random (Mitzenmacher, The Power of Two Choices, 2001)."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the less loaded of two; the first drawn if both have the same load."""
        first = targets[self._rng.randrange(len(targets))]
        second = targets[self._rng.randrange(len(targets))]
        return second if second.load < first.load else first


class LeastLoaded:
    """Chooses the fewest prompt tokens of requests that have not ended; ties go to the lower number."""

    def __init__(self, seed: int = 0) -> None:
        pass

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the least loaded replica."""
        return least_loaded(targets)


class LeastRequests:
    """Chooses the fewest requests that have not ended, as web balancers count; ties go to the lower number."""

    def __init__(self, seed: int = 0) -> None:
        pass

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the replica with the fewest open requests."""
        return min(targets, key=lambda target: target.num_open)


class SessionRouter:
    """Keeps a session at the replica where it began, the least loaded then, until that fails.

    Of several equally loaded ones, it begins at the one that was given the fewest requests.
    Requests without a session are kept together by tenant; those without both go to the least loaded.
    """

    def __init__(self, seed: int = 0) -> None:
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._spread = Spread()

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the session's replica."""
        name = f"s{arrival.session}" if arrival.session else f"t{arrival.tenant}" if arrival.tenant else ""
        if not name:
            return self._spread.choose(targets, 1)
        home = self._homes.get(name)
        chosen = next((target for target in targets if target.number == home), None) or self._spread.choose(targets, 1)
        _remember(self._homes, name, chosen.number)
        return chosen


class PrefixAffinityRouter:
    """Chooses the replica that last got the longest prefix of this prompt, unless its load exceeds the bound.

    Otherwise, and for a prompt whose first key is new, it chooses the least loaded. The keys are the router's own
    memory of where it sent them, as a router in front of servers has it (SGLang's cache-aware router, 2024); the bound
    on the load is that of Mirrokni, Thorup and Zadimoghaddam (Consistent Hashing with Bounded Loads, 2018): LOAD_BOUND
    times the mean, this request included.
    """

    def __init__(self, seed: int = 0) -> None:
        self._homes: OrderedDict[int | bytes, int] = OrderedDict()
        self._spread = Spread()

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the replica with the longest prefix within the bound."""
        homes = self._homes
        by_number = {target.number: target for target in targets}
        bound = _bound(arrival, targets)
        chosen = None
        for key in _deepest_first(arrival.keys, homes):
            home = by_number.get(homes[key])
            if home is not None and (home.load <= bound or home.num_open <= FEW_REQUESTS):
                chosen = home
                break
        chosen = chosen or self._spread.choose(targets, len(arrival.keys))
        for key in arrival.keys:
            _remember(homes, key, chosen.number)
        return chosen


class PrefixHash:
    """Consistent hashing of the prompt's first keys (or the session, or tenant) with bounded loads.

    Each key has an order of replicas (rendezvous hashing: Thaler and Ravishankar, 1998); the first within the bound
    gets the request (Mirrokni, Thorup and Zadimoghaddam, 2018). It remembers nothing.
    """

    num_keys = 4  # of the prompt that are hashed, fewer if it has fewer

    def __init__(self, seed: int = 0) -> None:
        self._salt = seed.to_bytes(8, "little", signed=True)

    def choose(self, arrival: Arrival, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the first replica in the key's order that is within the bound."""
        name = repr((list(arrival.keys[: self.num_keys]) or arrival.session or arrival.tenant,)).encode()
        bound = _bound(arrival, targets)
        order = sorted(targets, key=lambda target: self._weight(name, target.number))
        for target in order:
            if target.load <= bound or target.num_open <= FEW_REQUESTS:
                return target
        return least_loaded(targets)

    def _weight(self, name: bytes, number: int) -> bytes:
        return blake2b(name + number.to_bytes(4, "little"), digest_size=8, salt=self._salt).digest()


def _bound(arrival: Arrival, targets: Sequence[RouterTarget]) -> float:
    """Return the load that a preferred replica may have: LOAD_BOUND times the mean, this request included."""
    return LOAD_BOUND * (sum(target.load for target in targets) + arrival.prompt_tokens) / len(targets)


def least_loaded(targets: Sequence[RouterTarget]) -> RouterTarget:
    """Return the replica with the fewest tokens; ties go to the lower number."""
    return min(targets, key=_load)


def _deepest_first(keys: Sequence[int] | Sequence[bytes], homes: OrderedDict[int | bytes, int]) -> list[int | bytes]:
    """Return the keys that are known, the longest prefix first."""
    low, high = 0, len(keys)
    while low < high:  # known keys come before unknown ones, except for those dropped
        middle = (low + high) // 2
        if keys[middle] in homes:
            low = middle + 1
        else:
            high = middle
    return [keys[index] for index in range(low - 1, -1, -1) if keys[index] in homes]


def _remember(homes: OrderedDict[_Key, int], key: _Key, number: int) -> None:
    homes[key] = number
    homes.move_to_end(key)
    if len(homes) > MAX_KEYS:
        homes.popitem(last=False)


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "power_of_two": PowerOfTwo,
    "least_loaded": LeastLoaded,
    "least_requests": LeastRequests,
    "sessions": SessionRouter,
    "prefix_affinity": PrefixAffinityRouter,
    "prefix_hash": PrefixHash,
}


def create_router(name: str, seed: int) -> Router:
    """Return a new router of that name. Raises ConfigError with the known names."""
    if name not in ROUTERS:
        raise ConfigError(f"router is {name!r}; choose one of {', '.join(sorted(ROUTERS))}")
    return ROUTERS[name](seed)
