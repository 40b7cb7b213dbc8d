"""Rows 11 and 12 of the reliability scorecard: random steps with faults keep every promise, then all ends."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.harness import EOS, Run, limits, prompt
from tests.core.random_driver import Driver

from octavo.core.request import FinishReason

NUM_STEPS = int(os.environ.get("OCTAVO_STATE_MACHINE_STEPS", "50000"))
FIRST_SEED = int(os.environ.get("OCTAVO_STATE_MACHINE_SEED", "0"))
STEPS_PER_SEED = 100
NUM_SHARDS = 1 if "OCTAVO_STATE_MACHINE_SEED" in os.environ else 10


def drive(seed: int) -> int:
    """Run one seed; say how to run it again when it fails."""
    try:
        return Driver(seed).drive(STEPS_PER_SEED)
    except Exception as error:
        replay = (
            f"OCTAVO_STATE_MACHINE_SEED={seed} OCTAVO_STATE_MACHINE_STEPS=1 pytest tests/core/test_state_machine.py"
        )
        error.add_note(f"seed {seed}; to replay: {replay}")
        raise


@pytest.mark.timeout(0 if NUM_STEPS > 50_000 else 120)
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_random_steps_keep_every_promise(shard: int) -> None:
    seed, num_steps = FIRST_SEED + shard, 0
    while num_steps < NUM_STEPS // NUM_SHARDS or num_steps == 0:
        num_steps += drive(seed)
        seed += NUM_SHARDS


def test_a_seed_replays_bit_for_bit() -> None:
    runs = [Driver(4) for _ in range(2)]
    for driver in runs:
        driver.drive(STEPS_PER_SEED)
    assert runs[0].run.digests == runs[1].run.digests


class SchedulerMachine(RuleBasedStateMachine):
    """The same verbs, chosen and shrunk by hypothesis."""

    @initialize(
        depth=st.integers(1, 3),
        policy=st.sampled_from(("fcfs", "fifo")),
        blocks=st.integers(4, 10),
        cap=st.integers(1, 4),
        caching=st.booleans(),
        chunked=st.booleans(),
    )
    def start(self, depth: int, policy: str, blocks: int, cap: int, caching: bool, chunked: bool) -> None:
        sizes = limits(
            num_blocks=blocks,
            policy=policy,
            max_sequences=cap,
            prefix_caching=caching,
            chunked_prefill=chunked,
            max_batch_tokens=16,
            max_model_len=16,
        )
        self.run = Run(sizes, depth=depth)

    @rule(length=st.integers(1, 15), family=st.integers(0, 1), max_tokens=st.one_of(st.none(), st.integers(1, 12)))
    def admit(self, length: int, family: int, max_tokens: int | None) -> None:
        if len(self.run.records) < 20:
            room = 4 * self.run.limits.num_blocks[0] + 1 - length
            self.run.admit(prompt(length, family), max_tokens and min(max_tokens, room), eos_token_ids=(EOS,))

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

    @rule()
    def reset(self) -> None:
        self.run.scheduler.reset_prefix_cache()

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "run"):
            num_open = sum(record.finished is None for record in self.run.records.values())
            assert self.run.scheduler.num_waiting + self.run.scheduler.num_running <= num_open

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
