"""What each router prefers, by hand: of two the less loaded, the bound on the load, how much of a prompt is hashed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.fleet.routing import create_router
from octavo.simulator.arrival import Arrival

OTHERS = 100  # tokens open at each replica but the one that is preferred


@dataclass
class Replica:
    number: int
    load: int
    num_open: int = 9


def asked(*keys: int, **fields: Any) -> Arrival:
    return Arrival(0.0, 20, 5, keys=keys, key_tokens=16, **fields)


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
