"""How many drafts are made: as many as pay by measured times, and hardly any if they do not."""

from __future__ import annotations

import random
from array import array

import pytest

from octavo.core.ngrams import Lookup
from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult, StepTimings
from octavo.core.proposals import DraftRow
from octavo.core.request import Request
from octavo.engine.draft_pace import REMEASURE, DraftPace

REQUEST = Request("r", array("i", [1, 2]))


class Machine:
    """A target and a draft model whose times and acceptance are given, in seconds of plain steps."""

    def __init__(self, acceptance: float, draft_s: float, verify_s: float = 0.05, num_rows: int = 1) -> None:
        self.pace = DraftPace()
        self.acceptance, self.draft_s, self.verify_s, self.num_rows = acceptance, draft_s, verify_s, num_rows
        self.random = random.Random(1)
        self.seconds = 0.0
        self.num_tokens = 0
        self.lengths: list[int] = []

    def step(self, num_behind: int = 0, num_left: int = 1000) -> None:
        rows = [DraftRow(REQUEST, slot, 0, array("i"), 7, num_left) for slot in range(self.num_rows)]
        length = self.pace.length(rows, lambda: num_behind)
        self.lengths.append(length)
        counts = []
        for _ in rows:
            count = 1
            while count <= length and self.random.random() < self.acceptance:
                count += 1
            counts.append(count)
        if length:
            passes = [(num_behind + self.num_rows, self.draft_s * (1 + num_behind / 10))]
            passes += [(self.num_rows, self.draft_s)] * (length - 1)
            self.pace.drafted(self.num_rows, passes)
            self.seconds += sum(seconds for _, seconds in passes)
        seconds = 1.0 + self.verify_s * length * self.num_rows
        self.seconds += seconds
        self.num_tokens += sum(counts)
        plan = StepPlan(
            0,
            0.0,
            array("i", range(self.num_rows)),
            counts=array("i", [1 + length] * self.num_rows),
            flags=array("i", [ROW_SAMPLE] * self.num_rows),
            num_drafts=array("i", [length] * self.num_rows if length else ()),
            num_query_tokens=(1 + length) * self.num_rows,
        )
        result = StepResult(None, array("i", counts) if length else None, timings=StepTimings(0.0, seconds))
        self.pace.stepped(plan, result, frozenset(range(self.num_rows)) if length else frozenset())

    @property
    def gain(self) -> float:
        """Tokens for each second, of those without drafts."""
        return self.num_tokens / self.num_rows / self.seconds


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(("acceptance", "draft_s"), [(0.0, 0.3), (0.3, 0.5), (0.5, 1.0), (0.9, 2.0), (0.1, 0.05)])
def test_drafts_that_do_not_pay_cost_at_most_3_percent(acceptance: float, draft_s: float, num_rows: int) -> None:
    machine = Machine(acceptance, draft_s, num_rows=num_rows)
    for _ in range(2000):
        machine.step()
    assert machine.gain > 0.97
    assert sum(map(bool, machine.lengths[1000:])) < 150


@pytest.mark.parametrize(("acceptance", "draft_s", "least"), [(0.95, 0.1, 2.5), (0.85, 0.3, 1.3), (0.7, 0.1, 1.5)])
def test_drafts_that_pay_are_made_at_the_best_length(acceptance: float, draft_s: float, least: float) -> None:
    machine = Machine(acceptance, draft_s)
    for _ in range(500):
        machine.step()
    assert machine.gain > least
    assert machine.lengths.count(0) <= 2 + 500 // REMEASURE, "only to measure plain steps"
    best = max(
        range(1, 8), key=lambda k: sum(acceptance**i for i in range(k + 1)) / (1 + k * (draft_s + machine.verify_s))
    )
    later = [length for length in machine.lengths[100:] if length]
    assert abs(sum(later) / len(later) - best) < 1.5


def test_a_text_that_becomes_predictable_brings_the_drafts_back() -> None:
    machine = Machine(0.0, 0.2)
    for _ in range(1500):
        machine.step()
    machine.acceptance = 0.95
    machine.lengths.clear()
    for _ in range(2500):
        machine.step()
    assert sum(map(bool, machine.lengths[-500:])) > 400


def test_no_drafts_for_a_short_answer_to_a_long_prompt() -> None:
    machine = Machine(0.9, 0.2)
    for _ in range(50):
        machine.step()
    machine.step(num_behind=400, num_left=900)
    assert machine.lengths[-1] > 0, "a long answer pays for the draft model's prompt"
    for _ in range(3):
        machine.step(num_behind=4000, num_left=5)
    assert machine.lengths[-1] == 0


def test_no_drafts_before_a_plain_step_was_measured() -> None:
    machine = Machine(0.9, 0.2)
    machine.step()
    assert machine.lengths == [0]
    machine.step()
    assert machine.lengths[1] > 0


class LookupMachine:
    """Rows whose lookups are right with a given chance; `ids` of a row are 1, and 0 where the lookup was wrong."""

    def __init__(self, chance: float, verify_s: float = 0.1, num_rows: int = 1) -> None:
        self.pace = DraftPace()
        self.chance, self.verify_s, self.slowness = chance, verify_s, 1.0
        self.ids = [array("i", [1]) for _ in range(num_rows)]
        self.random = random.Random(1)
        self.seconds = 0.0
        self.counts: list[int] = []

    def step(self) -> None:
        size, lookup = len(self.ids), Lookup(array("i", [1] * 7), 3)
        rows = [DraftRow(REQUEST, slot, 0, ids, 7, 1000, lookup) for slot, ids in enumerate(self.ids)]
        self.counts = self.pace.choose(rows, size)
        got = array("i")
        for ids, count in zip(self.ids, self.counts, strict=True):
            before = len(ids)
            while len(ids) - before < count and self.random.random() < self.chance:
                ids.append(1)
            ids.append(int(len(ids) - before == count and self.random.random() < self.chance))
            got.append(len(ids) - before)
        num_drafts = sum(self.counts)
        seconds = (1.0 + self.verify_s * num_drafts) * self.slowness
        self.seconds += seconds
        flags, counts = array("i", [ROW_SAMPLE] * size), array("i", [1 + count for count in self.counts])
        drafts = array("i", self.counts if num_drafts else ())
        plan = StepPlan(
            0, 0.0, array("i", range(size)), counts=counts, flags=flags, num_drafts=drafts,
            num_query_tokens=size + num_drafts,
        )  # fmt: skip
        result = StepResult(None, got if num_drafts else None, timings=StepTimings(0.0, seconds))
        self.pace.stepped(plan, result, frozenset())

    def run(self, num_steps: int) -> float:
        """Make steps; return their tokens for each second, of those without drafts."""
        tokens, seconds = sum(map(len, self.ids)), self.seconds
        for _ in range(num_steps):
            self.step()
        return (sum(map(len, self.ids)) - tokens) / len(self.ids) / (self.seconds - seconds)


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(("chance", "verify_s"), [(0.0, 0.1), (0.1, 0.3), (0.5, 0.7), (0.9, 1.0)])
def test_lookups_that_do_not_pay_cost_at_most_2_percent(chance: float, verify_s: float, num_rows: int) -> None:
    machine = LookupMachine(chance, verify_s, num_rows)
    assert machine.run(2000) > 0.98


def test_lookups_that_pay_are_verified_and_a_text_that_changes_is_followed() -> None:
    machine = LookupMachine(0.95)
    assert machine.run(300) > 2.5
    machine.chance = 0.0
    assert machine.run(1000) > 0.98
    machine.chance = 0.95
    assert machine.run(100) > 1.5, "lookups are checked without being verified"


def test_a_slow_phase_of_the_machine_does_not_end_lookups() -> None:
    machine = LookupMachine(0.8)
    machine.slowness = 10.0  # cold at first
    machine.step()
    machine.slowness = 1.0
    assert machine.run(100) > 1.8
    machine.slowness = 8.0
    machine.run(2)
    machine.slowness = 1.0
    assert machine.run(100) > 1.8


def test_the_likeliest_lookups_are_verified() -> None:
    machine = LookupMachine(0.9, verify_s=0.2, num_rows=2)
    machine.run(50)
    machine.pace.stepped(*machine_plain(2))
    rows = [DraftRow(REQUEST, 8 + slot, 0, array("i", [1]), 7, 9, Lookup(array("i", [1] * 7), match))
            for slot, match in enumerate((2, 3))]  # fmt: skip
    some, more = machine.pace.choose(rows, 2)
    assert some < more


def machine_plain(size: int) -> tuple[StepPlan, StepResult, frozenset[int]]:
    """A plain step of so many rows, in one second."""
    ones = array("i", [1] * size)
    plan = StepPlan(0, 0.0, array("i", range(size)), counts=ones, flags=ones, num_query_tokens=size)
    return plan, StepResult(None, timings=StepTimings(0.0, 1.0)), frozenset()


def test_a_cold_first_pass_of_the_draft_model_is_not_counted() -> None:
    machine = Machine(0.9, 0.2)
    machine.step()
    machine.draft_s = 30.0
    machine.step()
    machine.draft_s = 0.2
    for _ in range(20):
        machine.step()
    assert all(machine.lengths[-15:])
