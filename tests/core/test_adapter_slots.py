"""Adapter slots: how many adapters run at once, counted against a list of who runs."""

from __future__ import annotations

import random

import pytest

from octavo.core.adapter_slots import AdapterSlots
from octavo.errors import InvariantError


def test_the_base_model_takes_no_slot() -> None:
    slots = AdapterSlots(0)
    assert slots.fits(0)
    slots.take(0)
    slots.give_back(0)
    assert slots.num_used == 0


def test_X05_requests_of_one_adapter_share_its_slot_until_the_last_leaves() -> None:
    slots = AdapterSlots(1)
    slots.take(7)
    assert slots.fits(7) and not slots.fits(8)
    slots.take(7)
    slots.give_back(7)
    assert not slots.fits(8)
    slots.give_back(7)
    assert slots.fits(8) and slots.num_used == 0


def test_no_adapter_fits_an_engine_without_slots() -> None:
    assert not AdapterSlots(0).fits(1)


def test_taking_beyond_the_limit_and_giving_back_twice_raise_and_change_nothing() -> None:
    slots = AdapterSlots(1)
    slots.take(3)
    with pytest.raises(InvariantError, match="adapter 4"):
        slots.take(4)
    with pytest.raises(InvariantError, match="adapter 4"):
        slots.give_back(4)
    assert slots.num_used == 1
    slots.give_back(3)
    with pytest.raises(InvariantError, match="adapter 3"):
        slots.give_back(3)


@pytest.mark.parametrize("seed", range(10))
def test_slots_agree_with_a_list_of_those_who_run(seed: int) -> None:
    rng = random.Random(seed)
    slots, running = AdapterSlots(rng.randrange(4)), []
    for _ in range(500):
        adapter = rng.randrange(6)
        in_use = {other for other in running if other}
        assert slots.num_used == len(in_use)
        assert slots.fits(adapter) == (adapter == 0 or adapter in in_use or len(in_use) < slots.limit)
        if running and rng.random() < 0.5:
            slots.give_back(running.pop(rng.randrange(len(running))))
        elif slots.fits(adapter):
            slots.take(adapter)
            running.append(adapter)
