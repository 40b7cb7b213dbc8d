"""Rows 10 to 12 of the reliability scorecard: a tiny pool makes progress; random steps with faults keep every promise;
then the faults stop and all ends.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.harness import EOS, Run, limits, prompt
from tests.core.random_config import BUILT_IN
from tests.core.random_driver import Driver

from octavo.core import invariants
from octavo.core.kv.group import GroupKind, GroupSpec
from octavo.core.plan import EventKind
from octavo.core.request import FinishReason
from octavo.errors import AdmissionError

NUM_STEPS = int(os.environ.get("OCTAVO_STATE_MACHINE_STEPS", "50000"))
FIRST_SEED = int(os.environ.get("OCTAVO_STATE_MACHINE_SEED", "0"))
STEPS_PER_SEED = 100  # so that a million steps are some ten thousand seeds
NUM_SHARDS = 1 if "OCTAVO_STATE_MACHINE_SEED" in os.environ else 10


def drive(seed: int) -> int:
    """Run one seed; say how to run it again when it fails."""
    try:
        return Driver(seed).drive(STEPS_PER_SEED)
    except BaseException as error:
        replay = (
            f"OCTAVO_STATE_MACHINE_SEED={seed} OCTAVO_STATE_MACHINE_STEPS=1 pytest tests/core/test_state_machine.py"
        )
        error.add_note(f"seed {seed}; to replay: {replay}")
        raise


@pytest.mark.timeout(0 if NUM_STEPS > 50_000 else 120)
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_R11_random_steps_keep_every_promise(shard: int) -> None:
    seed, num_steps, num_seeds = FIRST_SEED + shard, 0, 0
    while num_steps < NUM_STEPS // NUM_SHARDS or num_steps == 0:
        num_steps += drive(seed)
        seed += NUM_SHARDS
        num_seeds += 1
    print(f"shard {shard}: {num_steps} steps, {num_seeds} seeds, 0 violations")
    assert num_seeds * NUM_SHARDS >= min(500, NUM_STEPS // 500)


@pytest.mark.parametrize("seed", [4, 11, 27, 58])
def test_R11_a_seed_replays_bit_for_bit(seed: int) -> None:
    runs = [Driver(seed) for _ in range(2)]
    for driver in runs:
        driver.drive(STEPS_PER_SEED)
    assert runs[0].run.digests == runs[1].run.digests
    assert [record.events for record in runs[0].run.records.values()] == [
        record.events for record in runs[1].run.records.values()
    ]


def test_R11_the_random_steps_reach_everything() -> None:
    """What the seeds of a few thousand steps do, so that a green run says something."""
    kinds = {kind: 0 for kind in EventKind}
    columns = ("copies", "swap_outs", "host_loads", "id_edits", "encode_jobs", "encoder_frees", "shared_prefixes")
    done = dict.fromkeys(columns, 0)
    failures = 0
    for seed in range(150):
        driver = Driver(seed)
        driver.drive(STEPS_PER_SEED)
        failures += driver.run.num_failures
        for record in driver.run.records.values():
            for event in record.events:
                kinds[event.kind] += 1
        for plan in driver.run.plans:
            for name in done:
                done[name] += bool(getattr(plan, name))
    assert min(kinds.values()) > 10, kinds
    assert min(done.values()) > 10, done
    assert failures > 100


@pytest.mark.parametrize("seed", range(12))
def test_R12_when_faults_stop_everything_ends_and_nothing_is_held(seed: int) -> None:
    driver = Driver(3000 + seed)
    driver.drive(40)
    run = driver.run
    assert all(record.finished is not None for record in run.records.values())
    assert all(len(record.of_kind(EventKind.FINISHED)) == 1 for record in run.records.values())
    invariants.check_no_leaks(run.scheduler)
    assert run.scheduler.statistics().num_blocks_used == 0


@pytest.mark.parametrize("policy", BUILT_IN)
def test_R10_a_pool_of_little_more_than_one_request_serves_all(policy: str) -> None:
    rng = random.Random(5)
    run = Run(limits(policy=policy, num_blocks=19, max_model_len=64, max_batch_tokens=16), depth=2, check_every=16)
    run.is_ordered = False
    for index in range(64):
        run.admit(prompt(rng.randrange(1, 40), index % 5), rng.randrange(1, 24), ignore_eos=True, arrival=index / 100)
    run.finish()
    assert max(len(record.of_kind(EventKind.PREEMPTED)) for record in run.records.values()) <= 3


class SchedulerMachine(RuleBasedStateMachine):
    """The same verbs, chosen and shrunk by hypothesis."""

    @initialize(
        depth=st.integers(1, 3),
        policy=st.sampled_from(BUILT_IN),
        blocks=st.integers(4, 10),
        window=st.sampled_from((0, 0, 5)),
        cap=st.integers(1, 4),
        switches=st.tuples(*[st.booleans()] * 4),
    )
    def start(self, depth: int, policy: str, blocks: int, window: int, cap: int, switches: tuple[bool, ...]) -> None:
        caching, chunked, sharing, has_host = switches
        groups = (GroupSpec(), GroupSpec(GroupKind.SLIDING, window))[: 1 + bool(window)]
        sizes = limits(
            groups=groups,
            num_blocks=(blocks,) * len(groups),
            policy=policy,
            max_sequences=cap,
            prefix_caching=caching,
            chunked_prefill=chunked,
            block_sharing=sharing,
            host_blocks=(blocks,) * len(groups) if has_host else (),
            host_load_min_tokens=4,
            preemption="swap",
            max_batch_tokens=16,
            max_model_len=16,
        )
        self.run = Run(sizes, depth=depth)
        self.run.is_ordered = False

    @rule(
        length=st.integers(1, 15),
        family=st.integers(0, 1),
        max_tokens=st.integers(1, 12),
        shape=st.sampled_from(({}, {}, {"n": 2}, {"n": 3}, {"beam_width": 2, "n": 1})),
    )
    def admit(self, length: int, family: int, max_tokens: int, shape: dict[str, int]) -> None:
        count = shape.get("beam_width", shape.get("n", 1))
        room = 4 * self.run.limits.num_blocks[0] // count - length
        if len(self.run.records) < 20 and count <= self.run.limits.max_sequences and room > 0:
            with suppress(AdmissionError):
                self.run.admit(prompt(length, family), min(max_tokens, room), eos_token_ids=(EOS,), **shape)

    @precondition(lambda self: len(self.run.flight) < self.run.depth)
    @rule()
    def plan(self) -> None:
        plan = self.run.plan()
        if not plan.is_empty:
            self.run.submit(plan)

    @precondition(lambda self: self.run.flight)
    @rule()
    def commit(self) -> None:
        self.run.commit()

    @precondition(lambda self: self.run.flight)
    @rule()
    def fail(self) -> None:
        self.run.fail_oldest()

    @precondition(lambda self: self.run.records)
    @rule(index=st.integers(0, 19), reason=st.sampled_from((FinishReason.CANCELLED, FinishReason.STOP)))
    def cancel(self, index: int, reason: FinishReason) -> None:
        self.run.cancel(list(self.run.records)[index % len(self.run.records)], reason=reason)

    @precondition(lambda self: self.run.records)
    @rule(index=st.integers(0, 19), choice=st.integers(0, 2))
    def end_choice(self, index: int, choice: int) -> None:
        name = list(self.run.records)[index % len(self.run.records)]
        record = self.run.records[name]
        if choice < len(record.choices) and not record.request.params.beam_width:
            self.run.end_choice(name, choice)

    @rule()
    def reset(self) -> None:
        self.run.scheduler.reset_prefix_cache()

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "run"):
            num_open = sum(record.finished is None for record in self.run.records.values())
            assert self.run.scheduler.num_waiting <= num_open
            assert self.run.scheduler.num_running <= self.run.limits.max_sequences

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
