"""A recording in a simulation's terms; with its own durations the simulated times are the recorded ones."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.core.harness import limits
from tests.hash_chain import HABIT
from tests.observe.recording.driving import RecordedRun, write_segment
from tests.simulator.recorded_costs import as_recorded, snap

from octavo.core.limits import Limits
from octavo.core.plan import ROW_SAMPLE, StepPlan
from octavo.core.proposals import DraftRow
from octavo.core.request import Span
from octavo.observe.recording import arrivals, open_recording
from octavo.observe.recording.format import Header
from octavo.simulator.cost_model import CostModel, StepShape
from octavo.simulator.drafts import SimulatedDrafts
from octavo.simulator.recorded import measure
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup


class Turning(RecordedRun):
    """A run whose steps take time, each another; turns are the loop's: commands, plans up to the depth, a commit."""

    def tick(self, number: int) -> None:
        self.now += (1 + number * 7 % 13) / 997


def length(turn: int, choice: int, is_even: bool) -> int:
    """Tokens of a choice; without `is_even` its siblings' are others."""
    return 3 + turn % 17 - (0 if is_even else (choice * 5) % (3 + turn % 17))


def recorded(sizes: Limits, depth: int, folder: Path, n: int = 1, is_even: bool = True) -> Path:
    """Requests of n choices that come one by one over a hundred turns, recorded."""
    run = Turning(sizes, depth=depth, check=False)
    turns: dict[str, int] = {}
    for turn in range(400):
        if turn % 9 == 0 and turn < 200:
            run.now += 0.05 if turn % 36 == 0 and not run.scheduler.has_work else 0.0
            shared = list(range(3, 3 + 4 * (1 + turn % 3)))
            prompt = [*shared, *(5 + (turn * k) % 80 for k in range(turn % 11))]
            record = run.admit(prompt, 3 + turn % 17, ignore_eos=True, n=n, temperature=0.0 if n == 1 else 1.0)
            turns[record.request.request_id] = turn
        run.fill()
        run.tick(turn)
        if run.flight:
            events = run.commit()
            for name, choice, place in zip(events.request_ids, events.choices, events.positions, strict=True):
                if not is_even and place + 1 == length(turns[name], choice, is_even) < 3 + turns[name] % 17:
                    run.end_choice(name, choice)
            run.now += 1e-4
        elif turn > 200:
            break
    run.plan()
    write_segment(folder / "0001.octrec", Header("tiny", sizes, depth), run.lives[0])
    return folder


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "fifo", "shortest_prefill", "prefill_first"])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_recorded_durations_give_the_recorded_times(policy: str, depth: int, num_blocks: int, tmp_path: Path) -> None:
    sizes = limits(policy=policy, num_blocks=num_blocks, max_sequences=4, max_batch_tokens=16)
    recording = open_recording(recorded(sizes, depth, tmp_path))
    came, costs, _ = as_recorded(recording)
    assert len(came) > 10
    run = simulate(came, Setup(sizes, costs, depth=depth))
    simulated = {
        run.outcomes.indices[place]: (run.outcomes.first_tokens[place], run.outcomes.ends[place])
        for place in range(len(run.outcomes))
    }
    was = sorted(arrivals(recording), key=lambda one: one.taken)
    assert simulated == {index: (snap(one.first_token, 0.0), snap(one.end, 0.0)) for index, one in enumerate(was)}


# With two plans in flight, one without rows (it tells that a choice ended) takes no device time in a simulation.
@pytest.mark.parametrize(("depth", "is_even"), [(1, True), (2, True), (1, False)])
def test_choices_of_a_request_are_simulated_each(depth: int, is_even: bool, tmp_path: Path) -> None:
    sizes = limits(num_blocks=64, max_sequences=5, max_batch_tokens=16)
    recording = open_recording(recorded(sizes, depth, tmp_path, n=4, is_even=is_even))
    came, costs, _ = as_recorded(recording)
    assert len(came) > 10 and all(len(one.choices) == 4 for one in came)
    assert is_even == all(len(set(one.choices)) == 1 for one in came)
    run = simulate(came, Setup(sizes, costs, depth=depth))
    simulated = {
        run.outcomes.indices[place]: (run.outcomes.first_tokens[place], run.outcomes.ends[place])
        for place in range(len(run.outcomes))
    }
    was = sorted(arrivals(recording), key=lambda one: one.taken)
    assert simulated == {index: (snap(one.first_token, 0.0), snap(one.end, 0.0)) for index, one in enumerate(was)}
    ours = measure(recording).run.outcomes
    assert list(ours.output_tokens) == list(run.outcomes.output_tokens)
    assert list(ours.longest) == list(run.outcomes.longest)
    assert sum(ours.output_tokens) == sum(sum(one.choices) for one in came) > 2 * sum(ours.longest)


def test_what_was_recorded_is_a_run_as_a_simulation_gives_it(tmp_path: Path) -> None:
    sizes = limits(num_blocks=14, max_sequences=4, max_batch_tokens=16)
    recording = open_recording(recorded(sizes, 1, tmp_path))
    was, found = measure(recording).run, arrivals(recording)
    came, costs, _ = as_recorded(recording)
    run = simulate(came, Setup(sizes, costs))
    ours, theirs = was.replicas[0], run.replicas[0]
    assert len(was.outcomes) == len(found) == len(run.outcomes)
    assert ours.steps - theirs.steps in (0, 1)  # the last may only tell an executor who ended
    assert (ours.computed_tokens, ours.output_tokens) == (theirs.computed_tokens, theirs.output_tokens)
    assert (ours.hit_tokens, ours.queried_tokens, ours.preemptions) == (
        theirs.hit_tokens, theirs.queried_tokens, theirs.preemptions,
    )  # fmt: skip
    assert ours.busy_s == pytest.approx(theirs.busy_s, abs=1e-3)
    assert list(was.outcomes.output_tokens) == list(run.outcomes.output_tokens)


def recorded_features(sizes: Limits, folder: Path, seed: int = 0) -> tuple[RecordedRun, Path]:
    """Requests with media, adapters and, where there is speculation, ids that can be foreseen; recorded."""
    run = Turning(sizes, check=False)
    for turn in range(400):
        if turn % 6 == 0 and turn < 200:
            prompt = [3 + (turn * k) % 15 for k in range(12 + turn % 11)]
            fields: dict[str, Any] = {}
            if sizes.encoder_budget:
                key = (b"cat", b"dog", b"sea")[turn % 3]
                fields["spans"] = (Span(2, 4, key), Span(7, 3, b"sun"))
                prompt[2:6], prompt[7:10] = [1] * 4, [1] * 3
            fields["adapter_id"] = turn // 6 % 4 if sizes.adapter_slots else 0
            run.admit(prompt, 5 + turn % 17, ignore_eos=True, seed=turn % 3 + seed, **fields)
        run.fill()
        run.tick(turn)
        if run.flight:
            run.commit()
            run.now += 1e-4
        elif turn > 200:
            break
    run.plan()
    write_segment(folder / "0001.octrec", Header("tiny", sizes, 1), run.lives[0])
    return run, folder


def test_recorded_media_and_adapters_are_simulated_with_their_budgets(tmp_path: Path) -> None:
    """With the recorded durations each request has its times again."""
    sizes = limits(
        num_blocks=64, max_sequences=6, max_batch_tokens=16, encoder_budget=4, encoder_cache=8, adapter_slots=2
    )
    recording = open_recording(recorded_features(sizes, tmp_path)[1])
    was = sorted(arrivals(recording), key=lambda one: one.taken)
    expected = {index: (snap(one.first_token, 0.0), snap(one.end, 0.0)) for index, one in enumerate(was)}
    came, costs, _ = as_recorded(recording)
    assert len(came) > 10 and all(one.spans for one in came) and {one.adapter_id for one in came} == {0, 1, 2, 3}
    found = simulate(came, Setup(sizes, costs)).outcomes
    times = zip(found.first_tokens, found.ends, strict=True)
    assert dict(zip(found.indices, times, strict=True)) == expected
    plain = [replace(one, spans=(), adapter_id=0) for one in came]
    ends = [list(simulate(arrived, Setup(sizes, Fixed())).outcomes.ends) for arrived in (came, plain)]
    assert ends[0] != ends[1]  # the budgets did hold requests back


def test_recorded_drafts_are_simulated_with_their_share_length_and_acceptance(tmp_path: Path) -> None:
    sizes = limits(num_blocks=200, max_sequences=4, max_batch_tokens=64, max_draft_tokens=4, max_draft_rows=8)
    run, folder = recorded_features(sizes, tmp_path, HABIT)
    recording = open_recording(folder)
    drafts, totals = measure(recording).drafts, run.scheduler.statistics()
    assert drafts is not None and totals.num_accepted_tokens > 20
    assert 0 < drafts.share <= 1 and drafts.length is not None and drafts.cost < 1e-3
    # Drafts behind a rejected one count as rejected in the totals.
    assert totals.num_accepted_tokens / totals.num_drafted_tokens <= drafts.acceptance < 1
    came, steps = as_recorded(recording)[0], {}
    for name, most, kept in (("plain", 0, None), ("drafts", 4, drafts)):
        changed = replace(sizes, max_draft_tokens=most, has_draft_model=True)
        steps[name] = simulate(came, Setup(changed, Fixed(), drafts=kept)).replicas[0].steps
    assert steps["drafts"] < steps["plain"]
    source = SimulatedDrafts(drafts, 1)
    row = DraftRow(next(iter(run.records.values())).request, 0, 0, array("i"), 4, 100)
    made = [len(ids) for ids in source.propose([row] * 4000, 4000)]
    assert sum(map(bool, made)) / 4000 == pytest.approx(drafts.share, abs=0.02) and set(made) == {0, drafts.length}
    size, ones = drafts.length + 1, array("i", [1]) * 4000
    plan = StepPlan(0, 0.0, array("i", range(4000)), ones, array("i", [size]) * 4000, array("i", [ROW_SAMPLE]) * 4000)
    plan.num_drafts = array("i", [drafts.length]) * 4000
    lengths = source.result(plan, 0.01).num_token_ids
    assert lengths is not None
    tried = sum(min(drafts.length, count) for count in lengths)
    assert (sum(lengths) - 4000) / tried == pytest.approx(drafts.acceptance, abs=0.02)


def test_a_recording_without_drafts_has_none_to_simulate(tmp_path: Path) -> None:
    assert measure(open_recording(recorded(limits(num_blocks=64), 1, tmp_path))).drafts is None


class Fixed(CostModel):
    """Steps of one duration."""

    name = "fixed"

    def step_s(self, shape: StepShape) -> float:
        return 0.01

    def host_s(self, shape: StepShape) -> float:
        return 0.0
