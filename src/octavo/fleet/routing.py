"""Routers: each chooses a replica for each request, in a fleet that serves and in a simulated one.

Owns: the protocols, the registry by name, and each router's state. A router reads only two fields of a replica:
`num_open` (its open requests) and `load` (their prompt tokens).
Invariants: with equal seeds, equal calls give equal choices; only replicas that are up are chosen; memory is bounded.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from octavo.errors import ConfigError

MAX_KEYS = 1_000_000  # maximum prefix keys, or sessions, that a router stores
GENERATIONS = 16  # parts in which they are stored and dropped
_Key = TypeVar("_Key")
LOAD_BOUND = 1.25  # a replica may be preferred while its load is at most this many times the mean
FEW_REQUESTS = 1  # a replica with at most this many requests may be preferred at any mean


class RoutedRequest(Protocol):
    """A request as a router sees it. Equal keys mean equal prefixes; "" means no session, or the default tenant."""

    @property
    def keys(self) -> Sequence[int] | Sequence[bytes]:
        """One key for each full block of the prompt."""

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt."""

    @property
    def session(self) -> str:
        """The conversation of the request."""

    @property
    def tenant(self) -> str:
        """The tenant of the request."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What a router is shown of a request of a fleet that serves. See RoutedRequest."""

    keys: tuple[bytes, ...]
    prompt_tokens: int
    session: str = ""
    tenant: str = ""


class RouterTarget(Protocol):
    """A replica as a router sees it."""

    @property
    def number(self) -> int:
        """The number of the replica."""

    @property
    def load(self) -> int:
        """The prompt tokens of its open requests."""

    @property
    def num_open(self) -> int:
        """Its open requests."""


_load: Callable[[RouterTarget], int] = attrgetter("load")


class Router(Protocol):
    """Chooses one of the replicas that are up. At least one is up."""

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the replica for a request."""


class Spread:
    """Chooses the least loaded replica; among equals the one with the smallest total so far, to fill a fleet evenly."""

    def __init__(self) -> None:
        self._given: dict[int, int] = {}

    def choose(self, targets: Sequence[RouterTarget], amount: int) -> RouterTarget:
        """Choose a replica, and add `amount` to its total."""
        chosen = min(targets, key=lambda target: (target.load, self._given.get(target.number, 0)))
        self._given[chosen.number] = self._given.get(chosen.number, 0) + amount
        return chosen


class RoundRobin:
    """Chooses each replica in turn."""

    def __init__(self, seed: int = 0) -> None:
        self._next = 0

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the replica that follows the last choice by number."""
        chosen = next((target for target in targets if target.number >= self._next), targets[0])
        self._next = chosen.number + 1
        return chosen


class Random:
    """Chooses a replica at random, uniformly."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return a replica drawn uniformly."""
        return targets[self._rng.randrange(len(targets))]


class PowerOfTwo:
    """Chooses the less loaded of two random replicas (Mitzenmacher, The Power of Two Choices, 2001)."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the less loaded of two random replicas; the first one drawn if both have the same load."""
        first = targets[self._rng.randrange(len(targets))]
        second = targets[self._rng.randrange(len(targets))]
        return second if second.load < first.load else first


class LeastLoaded:
    """Chooses the replica whose open requests have the fewest prompt tokens; ties go to the lower number."""

    def __init__(self, seed: int = 0) -> None:
        pass

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the least loaded replica."""
        return least_loaded(targets)


class LeastRequests:
    """Chooses the replica with the fewest open requests, as web load balancers do; ties go to the lower number."""

    def __init__(self, seed: int = 0) -> None:
        pass

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the replica with the fewest open requests."""
        return min(targets, key=lambda target: target.num_open)


class RecentHomes(Generic[_Key]):
    """The replica of each key that was stored lately, in generations, of which the oldest is dropped as a whole.

    All keys of one call are stored in one generation, so a prompt's known keys are always its first ones, and one call
    of the dictionary stores them all; a list in order of use took six look-ups a key. A key is found at least until
    (GENERATIONS - 1) / GENERATIONS of `max_keys` keys were stored after it. No call takes long: a dictionary of 62,500
    keys grows in 2 ms (one of 500,000 in 10), and a dropped one is freed little by little.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_size = max_keys // GENERATIONS
        self._generations: deque[dict[_Key, int]] = deque([{}])  # newest first
        self._dropped: dict[_Key, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._generations)) + len(self._dropped)

    def find(self, keys: Sequence[_Key]) -> list[int | None]:
        """Return the replicas of a prompt's known keys, which are its first ones; None where a key is missing."""
        homes: list[int | None] = []
        for generation in self._generations:
            start = len(homes)
            if start == len(keys):
                break
            if keys[start] in generation:
                rest = range(start, len(keys))
                num_known = bisect_left(rest, True, key=lambda index: keys[index] not in generation)
                homes += map(generation.get, keys[start : start + num_known])
        return homes

    def store(self, keys: Sequence[_Key], number: int) -> None:
        """Store a replica for these keys."""
        newest = self._generations[0]
        if newest and len(newest) + len(keys) > self._max_size:
            newest = {}
            self._generations.appendleft(newest)
            if len(self._generations) > GENERATIONS:
                self._dropped = self._generations.pop()
        newest.update(dict.fromkeys(keys, number))
        for _ in range(min(2 * len(keys), len(self._dropped))):
            self._dropped.popitem()


class SessionRouter:
    """Sends all requests of a session to one replica, until that replica fails.

    A new session is assigned to the least loaded replica; ties go to the replica with the fewest requests so far.
    A request without a session uses its tenant as the session; without both, the least loaded replica is chosen.
    """

    def __init__(self, seed: int = 0) -> None:
        self._homes = RecentHomes[str]()
        self._spread = Spread()

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the session's replica."""
        name = f"s{request.session}" if request.session else f"t{request.tenant}" if request.tenant else ""
        if not name:
            return self._spread.choose(targets, 1)
        homes = self._homes.find((name,))
        chosen = next((target for target in targets if target.number in homes), None) or self._spread.choose(targets, 1)
        self._homes.store((name,), chosen.number)
        return chosen


class PrefixAffinityRouter:
    """Chooses the replica that last received the longest prefix of this prompt, unless that replica's load is too high.

    In that case, and for a prompt whose first key is new, chooses the least loaded replica. The router only remembers
    where it sent each key; it does not see the replicas' caches (as SGLang's cache-aware router, 2024). The load limit
    is LOAD_BOUND times the mean, this request included (Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with
    Bounded Loads, 2018).
    """

    def __init__(self, seed: int = 0) -> None:
        self._homes = RecentHomes[int | bytes]()
        self._spread = Spread()

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the replica with the longest prefix whose load is within the limit."""
        keys, bound = request.keys, _bound(request, targets)
        preferred: dict[int | None, RouterTarget] = {
            target.number: target for target in targets if target.load <= bound or target.num_open <= FEW_REQUESTS
        }
        chosen = next((preferred[home] for home in reversed(self._homes.find(keys)) if home in preferred), None)
        chosen = chosen or self._spread.choose(targets, len(keys))
        self._homes.store(keys, chosen.number)
        return chosen


class PrefixHash:
    """Consistent hashing, with bounded loads, of the prompt's first keys (else the session, else the tenant).

    Each hash has an order of replicas (rendezvous hashing: Thaler and Ravishankar, 1998). The first replica within the
    load limit gets the request (Mirrokni, Thorup and Zadimoghaddam, 2018). The router has no state.
    """

    num_keys = 4  # maximum number of the prompt's keys that are hashed

    def __init__(self, seed: int = 0) -> None:
        self._salt = seed.to_bytes(8, "little", signed=True)

    def choose(self, request: RoutedRequest, targets: Sequence[RouterTarget]) -> RouterTarget:
        """Return the first replica in the hash's order whose load is within the limit."""
        name = repr((list(request.keys[: self.num_keys]) or request.session or request.tenant,)).encode()
        bound = _bound(request, targets)
        order = sorted(targets, key=lambda target: self._weight(name, target.number))
        for target in order:
            if target.load <= bound or target.num_open <= FEW_REQUESTS:
                return target
        return least_loaded(targets)

    def _weight(self, name: bytes, number: int) -> bytes:
        return blake2b(name + number.to_bytes(4, "little"), digest_size=8, salt=self._salt).digest()


def _bound(request: RoutedRequest, targets: Sequence[RouterTarget]) -> float:
    """Return the load limit of a preferred replica: LOAD_BOUND times the mean, this request included."""
    return LOAD_BOUND * (sum(target.load for target in targets) + request.prompt_tokens) / len(targets)


def least_loaded(targets: Sequence[RouterTarget]) -> RouterTarget:
    """Return the replica with the lowest load; ties go to the lower number."""
    return min(targets, key=_load)


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
