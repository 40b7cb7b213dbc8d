"""What the random driver reaches, and the same verbs chosen by hypothesis. The driver's doses: tests/reliability."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.harness import EOS, Run, limits, prompt
from tests.core.random_config import BUILT_IN
from tests.core.random_driver import Driver

from octavo.core.limits import GroupKind, GroupSpec
from octavo.core.plan import EventKind
from octavo.core.request import FinishReason
from octavo.errors import AdmissionError


def test_R11_the_random_steps_reach_everything() -> None:
    """What the seeds of a few thousand steps do, so that a green run says something."""
    kinds = {kind: 0 for kind in EventKind}
    columns = ("copies", "swap_outs", "host_loads", "id_edits", "encode_jobs", "encoder_frees", "shared_prefixes")
    done = dict.fromkeys(columns, 0)
    failures = 0
    for seed in range(150):
        driver = Driver(seed)
        driver.drive(100)
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

    @rule()
    def die(self) -> None:
        self.run.die()

    @rule(num_tokens=st.sampled_from((None, 1, 3, 8)))
    def limit_step(self, num_tokens: int | None) -> None:
        self.run.limit_step(num_tokens)

    @rule(chance=st.sampled_from((0.0, 0.3)))
    def spoil_rows(self, chance: float) -> None:
        self.run.executor.faults.row_error = chance

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
            self.run.executor.faults.row_error = 0.0
            self.run.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
