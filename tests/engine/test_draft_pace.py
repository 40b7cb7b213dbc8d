"""How many drafts are made: as many as pay by measured times, and hardly any if they do not."""

from __future__ import annotations

import random
from array import array

import pytest

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
