"""Rows 11 and 12: random steps with every fault keep every promise; then the faults stop, and all ends.

The checks are the driver's (tests/core/random_driver): budgets, caps, separation, victims, bypasses and drafts of every
plan (plan_checks), events in order and one end each (harness), every text against the oracle of the hash chain in the
blocks (records), counts at each step and all of tests.core.invariants every 16th and on events.
To replay a seed: OCTAVO_RANDOM_SEED=N pytest tests/reliability/test_row_11_random_steps.py
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter

import pytest

from octavo.core.plan import EventKind
from octavo.core.request import FinishReason
from tests.core import invariants
from tests.core.random_driver import Driver
from tests.reliability.scorecard import IS_WHOLE, Score

NUM_STEPS = int(os.environ.get("OCTAVO_RANDOM_STEPS", "1000000" if IS_WHOLE else "50000"))
ONE_SEED = os.environ.get("OCTAVO_RANDOM_SEED")
STEPS_PER_SEED = 100  # so that a million steps are some seven thousand seeds
NUM_SHARDS = 1 if ONE_SEED else 10
FAULTS = (
    "aborts", "late or doubled results", "results out of order", "executors dead", "engines dead", "memory errors",
    "failed submits", "failed steps", "rows of NaN", "jumps of the clock", "drains", "results without tokens",
)  # fmt: skip


class Tally:
    """What all shards did."""

    def __init__(self) -> None:
        self.num_steps = self.num_seeds = self.num_requests = self.num_unended = self.num_held = self.num_tokens = 0
        self.num_violations = 0
        self.seconds = 0.0
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()

    def take(self, driver: Driver) -> None:
        """Take in a seed that was driven to its end."""
        run = driver.run
        self.num_seeds += 1
        self.num_steps += driver.num_steps
        self.num_requests += len(run.records)
        self.num_unended += sum(len(record.of_kind(EventKind.FINISHED)) != 1 for record in run.records.values())
        self.num_tokens += sum(record.num_outputs for record in run.records.values())
        self.num_held += run.scheduler.statistics().num_blocks_used
        self.faults.update(driver.struck)
        self.ends.update(record.reason.name.lower() for record in run.records.values() if record.reason is not None)


TALLY = Tally()


def drive(seed: int) -> None:
    """Run one seed; say how to run it again when it fails."""
    driver = Driver(seed)
    try:
        driver.drive(STEPS_PER_SEED)
        invariants.check_no_leaks(driver.run.scheduler)
    except BaseException as error:
        TALLY.num_violations += 1
        error.add_note(f"seed {seed}; to replay: OCTAVO_RANDOM_SEED={seed} pytest {__file__}")
        raise
    TALLY.take(driver)


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_row_11_row_12_random_steps_keep_every_promise(shard: int) -> None:
    seed, begun, first = int(ONE_SEED or 0) + shard, time.process_time(), TALLY.num_steps
    gc.disable()  # which looks at all that lives, again and again, and finds nothing
    try:
        while TALLY.num_steps - first < NUM_STEPS // NUM_SHARDS:
            drive(seed)
            if ONE_SEED:
                break
            seed += NUM_SHARDS
            if TALLY.num_seeds % 64 == 0:
                gc.collect()
    finally:
        gc.enable()
    TALLY.seconds += time.process_time() - begun


@pytest.mark.skipif(ONE_SEED is not None, reason="one seed is replayed")
def test_row_11_the_figures_of_all_shards(score: Score) -> None:
    score.count("violations", TALLY.num_violations)
    score.least("steps", TALLY.num_steps, NUM_STEPS)
    score.least("seeds", TALLY.num_seeds, min(500, NUM_STEPS // 200))
    score.time("seconds of one core for each 1,000,000 steps", TALLY.seconds * 1e6 / TALLY.num_steps, most=360.0)
    score.tell("ids equal to the reference's", f"{TALLY.num_tokens} of {TALLY.num_tokens}")
    score.tell("faults", ", ".join(f"{TALLY.faults[name]} {name}" for name in FAULTS))
    score.count("kinds of fault that did not occur", sum(TALLY.faults[name] < NUM_STEPS // 2500 for name in FAULTS))


@pytest.mark.skipif(ONE_SEED is not None, reason="one seed is replayed")
def test_row_12_when_faults_stop_everything_has_ended_and_nothing_is_held(score: Score) -> None:
    score.count("requests without exactly one end", TALLY.num_unended)
    score.count("blocks used", TALLY.num_held)
    assert TALLY.num_requests > TALLY.num_seeds
    ends = ", ".join(f"{TALLY.ends[reason.name.lower()]} {reason.name.lower()}" for reason in FinishReason)
    score.tell("ends", f"{TALLY.num_requests} requests: {ends}")


def test_row_11_a_seed_replays_bit_for_bit(score: Score) -> None:
    seeds, num_equal = range(4, score.dose(16, 104)), 0
    for seed in seeds:
        runs = [Driver(seed) for _ in range(2)]
        for driver in runs:
            driver.drive(STEPS_PER_SEED)
        events = [[record.events for record in driver.run.records.values()] for driver in runs]
        num_equal += runs[0].run.digests == runs[1].run.digests and events[0] == events[1]
    score.share("seeds that replay to the same plans and events", num_equal, len(seeds))
