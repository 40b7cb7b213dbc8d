"""Several plans in flight (S16, S17) and several ranks that run them (S18), through the public verbs."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import pytest
from tests.core.harness import EOS, Run, limits, prompt
from tests.core.random_driver import Driver
from tests.fake_model import FakeExecutor, quads, triples

from octavo.core.limits import Limits
from octavo.core.plan import ROW_BEAM, EventKind, Events, StepPlan
from octavo.core.request import FinishReason

DEPTHS = [2, 3]


class Watched(Run):
    """Counts what happened to requests while plans with their rows were in flight."""

    def __init__(self, sizes: Limits | None = None, **options: Any) -> None:
        super().__init__(sizes, **options)
        self.owner_at: dict[int, dict[int, str]] = {}  # who sat in which slot, by step
        self.seen = {"preempted": 0, "late": 0, "cancelled": 0, "choice": 0, "resumed": 0, "beams": 0}

    def flying(self) -> set[str]:
        """Requests with a row in flight."""
        return {self.owner_at[plan.step][slot] for plan, _ in self.flight for slot in plan.slots}

    def plan(self, only: Iterable[str] | None = None) -> StepPlan:
        flying = self.flying()
        plan = super().plan(only)
        self.owner_at[plan.step] = dict(self.slot_owner)
        for event in plan.events:
            if event.step != plan.step:
                continue
            if event.kind == EventKind.RESUMED:
                assert event.request_id not in flying, "back before its last row is committed"
                self.seen["resumed"] += 1
            elif event.kind == EventKind.PREEMPTED:
                self.seen["preempted"] += event.request_id in flying
        for row in plan.rows():
            if row.flags & ROW_BEAM:
                assert self.slot_owner[row.slot] not in flying, "a beam ran ahead of its commit"
                self.seen["beams"] += 1
        return plan

    def take(self, events: Events) -> Events:
        self.seen["late"] += sum(not self.records[name].is_running for name in events.request_ids)
        return super().take(events)


def mixed_run(seed: int, depth: int, preemption: str) -> Watched:
    """Plain requests, choices and beams in a pool that is too small, with ends from outside all the while."""
    run = Watched(
        limits(num_blocks=15, host_blocks=(12,), preemption=preemption, vocab_size=23, host_load_min_tokens=4),
        depth=depth,
    )
    shared = prompt(6, seed, 23)
    for turn in range(80):
        if turn < 45 and turn % 3 == 0:
            ids = [*shared[: turn % 7], *prompt(3 + turn % 6, seed + turn, 23)]
            kind = (turn // 3 + seed) % 4
            fields: dict[str, Any] = ({}, {"n": 2}, {"n": 2, "best_of": 3}, {"beam_width": 2, "n": 2})[kind]
            run.admit(ids, 12, stop_token_ids=(EOS,) if turn % 2 else (), **fields)
        run.step()
        flying = sorted(run.flying())
        if turn % 19 == 7 and flying:
            run.seen["cancelled"] += run.cancel(flying[seed % len(flying)])
        several = [name for name in flying if run.records[name].request.params.n > 1]
        if turn % 13 == 3 and several and run.records[several[0]].finished is None:
            run.seen["choice"] += run.end_choice(several[0], seed % 2)
    run.finish()
    return run


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("preemption", ["auto", "recompute", "swap"])
def test_S17_choices_beams_cancels_and_preemptions_in_flight_give_the_right_text(preemption: str, depth: int) -> None:
    seen: dict[str, int] = {}
    for seed in range(6):
        run = mixed_run(seed, depth, preemption)  # the texts are the oracle's
        assert [plan.digest() for plan in run.plans] == run.digests  # S16: plans never change
        for name, count in run.seen.items():
            seen[name] = seen.get(name, 0) + count
    assert min(seen.values()) >= 5, seen


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_S16_the_effects_of_every_plan_are_well_formed(depth: int) -> None:
    num = {"copies": 0, "swap_outs": 0, "host_loads": 0, "edits": 0}
    for seed in range(4):
        for plan in mixed_run(seed, depth, "swap").plans:
            assert not (plan.swap_outs and plan.host_loads)
            for name in ("copies", "swap_outs", "host_loads"):
                entries = list(triples(getattr(plan, name)))
                num[name] += len(entries)
                assert len({(group, to) for group, _, to in entries}) == len(entries)
            filled = {(group, to) for group, _, to in (*triples(plan.copies), *triples(plan.host_loads))}
            entered = {(group, block) for _, group, _, block in quads(plan.edits)}
            num["edits"] += len(entered)
            assert filled <= entered  # nothing is copied or loaded that no table names
            assert len(set(plan.slots)) == plan.num_rows
    assert min(num.values()) >= 10, num


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [2, 5])
def test_S17_length_stops_of_choices_waste_nothing(n: int, depth: int) -> None:
    run = Run(limits(num_blocks=60), depth=depth)
    run.admit(prompt(9), 6, n=n)
    run.admit(prompt(6, 1), 1, n=n)
    run.finish()
    assert run.num_scheduled == 9 + 5 * n + 6


@pytest.mark.parametrize("depth", DEPTHS)
def test_S17_a_choice_that_ends_late_wastes_at_most_one_token_for_each_plan_in_flight(depth: int) -> None:
    wasted = 0
    for seed in range(8):
        run = Run(limits(num_blocks=60, vocab_size=7), depth=depth)
        record = run.admit(prompt(6, seed, 7), 20, n=3, eos_token_ids=(EOS,))
        run.finish()
        least = 6 + record.num_outputs - 3
        assert least <= run.num_scheduled <= least + 3 * (depth - 1)
        wasted += run.num_scheduled - least
    assert wasted > 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_S17_late_tokens_of_a_preempted_request_come_once_for_every_choice(depth: int) -> None:
    run = Watched(limits(num_blocks=9, preemption="recompute"), depth=depth)
    run.admit(prompt(8, 1), 17)
    record = run.admit(prompt(9, 2), 9, n=2)
    run.finish()
    assert run.seen["late"] >= 2 and record.of_kind(EventKind.RESUMED)
    assert [len(choice.token_ids) for choice in record.choices] == [9, 9]


@pytest.mark.parametrize("depth", DEPTHS)
def test_S17_a_request_cancelled_in_flight_frees_its_blocks_within_a_step_and_gives_nothing_more(depth: int) -> None:
    run = Run(limits(num_blocks=60), depth=depth)
    record = run.admit(prompt(9), 20, n=3)
    run.steps(3)
    assert len(run.flight) == depth - 1
    run.cancel("r0")
    num_tokens = record.num_outputs
    assert run.scheduler.statistics().num_blocks_used == 0
    run.finish()
    assert record.num_outputs == num_tokens and record.reason == FinishReason.CANCELLED


# -- S18


class Pipeline(Run):
    """`num_stages` stages that each run every plan, one behind the other; the last one's result is committed."""

    def __init__(self, num_stages: int, sizes: Limits) -> None:
        super().__init__(sizes, depth=num_stages)
        self.stages = [FakeExecutor(sizes.groups, vocab_size=sizes.vocab_size) for _ in range(num_stages - 1)]
        for stage in self.stages:
            stage.make_pool(sizes.block_size, sizes.num_blocks, sizes.host_blocks)
        self.inboxes: list[deque[StepPlan]] = [deque() for _ in range(num_stages)]
        self.ran: list[list[bytes]] = [[] for _ in range(num_stages)]
        self.outputs: list[dict[int, list[int]]] = [{} for _ in range(num_stages)]
        self.most_in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)  # the last stage runs it when it is collected
        self.inboxes[0].append(copy.deepcopy(plan))  # each rank has its own copy
        self.most_in_flight = max(self.most_in_flight, len(self.flight))
        self.advance()

    def advance(self) -> None:
        """Each stage runs one plan, if it has one, and hands it on."""
        for index in reversed(range(len(self.stages))):
            if self.inboxes[index]:
                plan = self.inboxes[index].popleft()
                stage = self.stages[index]
                result = stage.collect(stage.submit(plan))
                self.outputs[index][plan.step] = list(result.token_ids or ())
                self.ran[index].append(plan.digest())
                self.inboxes[index + 1].append(plan)

    def commit(self) -> Events:
        plan, _ = self.flight[0]
        while all(plan.step != waiting.step for waiting in self.inboxes[-1]):
            self.advance()
        self.ran[-1].append(self.inboxes[-1].popleft().digest())
        events = super().commit()
        self.outputs[-1][plan.step] = list(events.token_ids)
        return events


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_S18_every_stage_runs_the_same_plans_and_the_last_ones_result_is_committed(num_stages: int) -> None:
    run = Pipeline(num_stages, limits(num_blocks=14, host_blocks=(10,), preemption="swap"))
    for seed in range(7):
        run.admit(prompt(4 + seed, seed % 3), 6 + seed, n=1 + seed % 2, eos_token_ids=(EOS,))
    for turn in range(30):
        run.step()
        if turn == 9:
            run.cancel("r1", "r4")
    run.finish()
    assert run.most_in_flight == num_stages
    submitted = [digest for plan, digest in zip(run.plans, run.digests, strict=True) if not plan.is_empty]
    assert all(ran == submitted for ran in run.ran)
    assert all(record.finished for record in run.records.values())


def test_S18_stages_agree_on_what_is_sampled_so_only_one_of_them_is_asked() -> None:
    run = Pipeline(3, limits(num_blocks=60))
    for seed in range(4):
        run.admit(prompt(4 + seed, seed), 8)
    run.finish()
    first, second, last = run.outputs
    assert first == second and all(first[step] == ids for step, ids in last.items())
    assert sum(map(len, last.values())) == 4 * 8


@pytest.mark.parametrize("stages", [2, 3])
def test_pipeline_stages_have_plans_without_common_rows(stages: int) -> None:
    run = Run(limits(num_blocks=200, num_stages=stages), depth=stages)
    for number in range(9):
        run.admit(prompt(5, number), max_tokens=12)
    run.steps(3)
    shared = 0
    for _ in range(6):
        run.fill()
        rows = [slot for plan, _ in run.flight for slot in plan.slots]
        assert len(rows) == len(set(rows)), "a row was planned while its last id is in flight"
        assert all(len(plan.slots) <= -(-9 // stages) for plan, _ in run.flight)
        shared += len(run.flight) == stages
        run.commit()
    assert shared >= 4, "one plan took all rows, so that the other stages waited"
    run.finish_all()


@pytest.mark.parametrize("seed", range(6))
def test_random_runs_with_pipeline_stages(seed: int) -> None:
    Driver(seed, num_stages=2 + seed % 3).drive(120)
