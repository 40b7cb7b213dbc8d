"""What each router prefers, by hand: of two the less loaded, the bound on the load, how much of a prompt is hashed."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.fleet import ROUTER_NAMES
from octavo.fleet.routing import MAX_KEYS, ROUTERS, RecentHomes, create_router
from octavo.simulator.arrival import Arrival

OTHERS = 100  # tokens open at each replica but the one that is preferred


@dataclass
class Replica:
    number: int
    load: int
    num_open: int = 9


def asked(*keys: int, **fields: Any) -> Arrival:
    return Arrival(0.0, 20, 5, keys=keys, key_tokens=16, **fields)


def test_every_router_can_be_set() -> None:
    assert sorted(ROUTER_NAMES) == sorted(ROUTERS)


def test_power_of_two_takes_the_less_loaded_of_two_drawn_ones() -> None:
    router = create_router("power_of_two", 3)
    light, heavy = Replica(0, 10), Replica(1, 500)
    counts = Counter(router.choose(asked(), [light, heavy]).number for _ in range(2000))
    # The heavy one is chosen only where it is drawn twice, one time in four.
    assert 0.20 < counts[heavy.number] / 2000 < 0.30


def test_power_of_two_spreads_equal_loads_over_all() -> None:
    router = create_router("power_of_two", 3)
    replicas = [Replica(number, 10) for number in range(4)]
    counts = Counter(router.choose(asked(), replicas).number for _ in range(2000))
    assert all(0.2 < counts[number] / 2000 < 0.3 for number in range(4))


@pytest.mark.parametrize("name", ["prefix_affinity", "prefix_hash"])
def test_the_preferred_replica_is_left_at_one_and_a_quarter_times_the_mean(name: str) -> None:
    replicas = [Replica(number, OTHERS) for number in range(4)]
    router = create_router(name, 1)
    arrival = asked(7, 8, 9, 10)
    home = router.choose(arrival, replicas)
    # The bound with a load of L at home: 1.25 * (3 * 100 + L + 20) / 4, which L reaches at 145.45.
    home.load = 145
    assert router.choose(arrival, replicas) is home
    home.load = 146
    away = router.choose(arrival, replicas)
    assert away is not home
    home.num_open = 1  # with one request a replica is preferred whatever its load
    if name == "prefix_hash":  # the other remembers where it sent the prefix last
        assert router.choose(arrival, replicas) is home


def test_prefix_hash_takes_the_first_four_keys_of_a_prompt() -> None:
    router = create_router("prefix_hash", 1)
    replicas = [Replica(number, OTHERS) for number in range(8)]

    def home(*keys: int) -> int:
        return router.choose(asked(*keys), replicas).number

    assert len({home(1, 2, 3, 4, more) for more in range(40)}) == 1
    for place in range(4):  # each of the four counts
        keys = [1, 2, 3, 4]
        homes = set()
        for other in range(40):
            keys[place] = 100 + other
            homes.add(home(*keys))
        assert len(homes) > 4, place


class ListInOrderOfUse:
    """The homes of keys in one list in order of use: the slow twin of RecentHomes."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._homes: OrderedDict[Any, int] = OrderedDict()
        self._max_keys = max_keys

    def find(self, keys: Any) -> list[int | None]:
        known = [key for key in keys if key in self._homes]
        return [self._homes[key] for key in known]

    def store(self, keys: Any, number: int) -> None:
        for key in keys:
            self._homes[key] = number
            self._homes.move_to_end(key)
            if len(self._homes) > self._max_keys:
                self._homes.popitem(last=False)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 150))
def test_homes_in_generations_give_the_choices_of_a_list_in_order_of_use(seed: int, count: int, steps: int) -> None:
    rng = random.Random(seed)
    fast, slow = create_router("prefix_affinity", 0), create_router("prefix_affinity", 0)
    slow._homes = ListInOrderOfUse()  # type: ignore[attr-defined]
    replicas = [Replica(number, 0, 0) for number in range(count)]
    for _ in range(steps):
        keys, key = [], 1
        for _ in range(rng.randrange(18)):  # each key is made of the one before it
            key = 3 * key + (rng.random() < 0.2)
            keys.append(key)
        up = [replica for replica in replicas if rng.random() < 0.9] or replicas
        chosen = fast.choose(asked(*keys), up)
        assert slow.choose(asked(*keys), up) is chosen
        chosen.load += 20
        chosen.num_open += 1
        for replica in replicas:
            if replica.num_open and rng.random() < 0.3:
                replica.load, replica.num_open = replica.load - 20, replica.num_open - 1


def test_homes_are_bounded_and_keep_what_was_stored_last() -> None:
    homes = RecentHomes[int](4000)
    for start in range(0, 100_000, 50):
        homes.store(range(start, start + 50), start % 7)
        assert len(homes) <= 4000
        oldest = max(0, start - 2900)
        assert homes.find(range(oldest, oldest + 50)) == [oldest % 7] * 50
    assert homes.find(range(50)) == []


def test_keys_that_are_no_prefixes_are_routed_too() -> None:
    router, replicas, rng = create_router("prefix_affinity", 0), [Replica(0, 5), Replica(1, 6)], random.Random(1)
    for _ in range(200):
        assert router.choose(asked(*rng.choices(range(9), k=rng.randrange(7))), replicas) in replicas


def test_a_prompt_s_known_keys_are_its_first_ones_when_a_generation_is_dropped() -> None:
    homes, rng = RecentHomes[tuple[int, int]](400), random.Random(3)
    for number in range(2000):
        stem = rng.randrange(30)
        keys = [(stem, place) for place in range(rng.randrange(1, 40))]
        known = [bool(homes.find([key])) for key in keys]
        assert known == sorted(known, reverse=True)
        assert len(homes.find(keys)) == sum(known)
        homes.store(keys, number)


def test_a_router_with_a_million_keys_takes_at_most_250_megabytes() -> None:
    rng, num_keys = random.Random(0), 200_000  # a fifth; a dictionary doubles between, so take the worst of many sizes
    homes = RecentHomes[bytes](num_keys)
    tracemalloc.start()
    try:
        most = 0.0
        for _ in range(3 * num_keys // 512):
            homes.store([rng.randbytes(16) for _ in range(512)], 1)
            most = max(most, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(homes) <= num_keys and most / num_keys <= 250
