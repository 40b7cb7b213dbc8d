"""The budget of restarts: useful lives are free, useless ones wait longer each time, too many of them end it."""

import random

from octavo.restarts import RestartBudget


def test_lives_that_were_useful_cost_nothing() -> None:
    budget = RestartBudget(max_useless=2)
    assert [budget.ended(float(t), 0.5, was_useful=True) for t in range(50)] == [0.0] * 50
    assert budget.num_useless(50.0) == 0


def test_the_sixth_useless_life_in_a_minute_is_the_last() -> None:
    budget = RestartBudget()
    waits = [budget.ended(float(t), 1.0, was_useful=False) for t in range(6)]
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, None]


def test_old_failures_are_forgotten() -> None:
    budget = RestartBudget(max_useless=2, within_s=60.0)
    assert None not in [budget.ended(31.0 * t, 0.0, was_useful=False) for t in range(100)]


def test_the_wait_is_drawn_and_bounded() -> None:
    rng, budget = random.Random(1), RestartBudget(max_useless=1000, first_s=1.0, longest_s=8.0)
    waits = [budget.ended(0.01 * t, rng.random(), was_useful=False) or 0.0 for t in range(1000)]
    assert all(4.0 <= wait <= 8.0 for wait in waits[3:]) and len(set(waits)) > 900
    assert 0.5 <= waits[0] <= 1.0
